// Scores of a block of queries and a block of keys, before and after the exponential, lane by lane.
//
// Scores are in units of ln 2 here: log2(e) * score, whose powers of two are the probabilities.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/kernels.h"

namespace fused_tp::attention {
namespace {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// The queries of a block; padding sees nothing.
struct Rows {
  alignas(64) int32_t starts[kQueries], stops[kQueries], places[kQueries], indices[kQueries];
  int32_t count;
  int32_t first, last;          // keys that any of these queries sees
  int32_t all_first, all_last;  // keys that all of them see; none if last <= first
  int64_t at;                   // row of the first of these queries

  Rows(const Problem& step, int64_t block) : at(block * kQueries) {
    const int64_t left = step.shape.rows - at;
    count = static_cast<int32_t>(left < kQueries ? left : kQueries);
    for (int i = 0; i < kQueries; ++i) {
      const bool real = i < count;
      starts[i] = real ? step.seen.starts[at + i] : 0;
      stops[i] = real ? step.seen.stops[at + i] : 0;
      places[i] = real && step.seen.places != nullptr ? step.seen.places[at + i] : 0;
      indices[i] = real && step.seen.q_indices != nullptr ? step.seen.q_indices[at + i] : 0;
    }
    measure();
  }

  // Excludes a query.
  void blind(int i) { starts[i] = stops[i] = 0; }

  void measure() {
    first = all_last = INT32_MAX;
    last = all_first = 0;
    for (int i = 0; i < count; ++i) {
      all_first = starts[i] > all_first ? starts[i] : all_first;
      all_last = stops[i] < all_last ? stops[i] : all_last;
      if (starts[i] >= stops[i]) continue;
      first = starts[i] < first ? starts[i] : first;
      last = stops[i] > last ? stops[i] : last;
    }
  }
};

// The part of a block of keys that a block of queries sees.
struct Part {
  int64_t begin;      // of the block
  int64_t low, high;  // rows of the block, multiples of 8
  bool any, masked;

  Part(const Rows& rows, int64_t block, int64_t keys) : begin(block * kKeys) {
    const int64_t end = begin + kKeys < keys ? begin + kKeys : keys;
    any = false;
    for (int i = 0; i < rows.count; ++i) {
      const int64_t from = rows.starts[i] > begin ? rows.starts[i] : begin;
      const int64_t to = rows.stops[i] < end ? rows.stops[i] : end;
      any |= from < to;
    }
    low = rows.first > begin ? (rows.first - begin) / 8 * 8 : 0;
    const int64_t seen = (rows.last < end ? rows.last : end) - begin;
    high = (seen + 7) / 8 * 8;
    masked = !(rows.all_first <= begin + low && rows.all_last >= begin + high);
  }
};

template <class L>
struct Rule {
  using Real = typename L::Real;
  using Vector = typename L::Vector;
  bool plain;     // a score is the product times `factor`, which is positive
  Vector factor;  // of a plain score
  Vector scale;   // of the product; with a cap, divided by softcap
  bool capped;
  Vector cap;  // log2(e) softcap
  bool sloped;
  Vector slope;  // -log2(e) slope

  Rule(const Scores& scores, int64_t head) {
    capped = scores.softcap != 0;
    sloped = scores.slopes != nullptr;
    plain = !capped && !sloped && scores.scale > 0;
    factor = L::broadcast(static_cast<Real>(scores.scale * kLog2E));
    scale = capped ? L::broadcast(static_cast<Real>(scores.scale / scores.softcap)) : factor;
    cap = L::broadcast(static_cast<Real>(scores.softcap * kLog2E));
    slope = L::zero();
    if (sloped) slope = L::broadcast(static_cast<Real>(-kLog2E * static_cast<const Real*>(scores.slopes)[head]));
  }

  // Score of a product; sets `bend` to the derivative of the cap.
  Vector score(Vector product, Vector distance, Vector& bend) const {
    Vector x = product * scale;
    if (capped) {
      const Vector t = L::tanh(x);
      bend = L::fma(-t, t, L::broadcast(1));
      x = t * cap;
    }
    return sloped ? L::fma(slope, distance, x) : x;
  }
};

// Philox4x32-10 (Salmon et al., SC 2011), whose four words serve four consecutive keys.
template <class L>
class Draw {
 public:
  using Vector = typename L::Vector;
  using Integers = typename L::Integers;

  Draw(const Scores& scores, int64_t batch, int64_t head, const int32_t* q_indices)
      : scores_(scores),
        queries_(L::load_integers(q_indices)),
        head_(static_cast<uint32_t>(scores.first_head + head)),
        batch_(static_cast<uint32_t>(batch)),
        keep_(L::broadcast(static_cast<typename L::Real>(scores.keep_factor))) {}

  // Dropout factor of the probabilities of this key.
  Vector factor(int32_t k_index) {
    if (k_index / 4 != known_) mix(known_ = k_index / 4);
    return L::select(L::at_least(words_[k_index % 4], scores_.threshold), keep_, L::zero());
  }

 private:
  void mix(int32_t quarter) {
    const Integers zero = queries_ ^ queries_;
    Integers c0 = zero + quarter, c1 = queries_, c2 = zero + word(head_), c3 = zero + word(batch_);
    uint32_t key0 = static_cast<uint32_t>(scores_.seed), key1 = static_cast<uint32_t>(scores_.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      Integers high0{}, low0{}, high2{}, low2{};
      L::products(c0, 0xD2511F53u, high0, low0);
      L::products(c2, 0xCD9E8D57u, high2, low2);
      c0 = high2 ^ c1 ^ word(key0);
      c1 = low2;
      c2 = high0 ^ c3 ^ word(key1);
      c3 = low0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    words_[0] = c0, words_[1] = c1, words_[2] = c2, words_[3] = c3;
  }
  // 32 bits in a lane, which may be wider: its upper bits are zero then.
  static typename L::Integer word(uint32_t x) { return static_cast<typename L::Integer>(x); }

  const Scores& scores_;
  Integers queries_;
  uint32_t head_, batch_;
  Vector keep_;
  Integers words_[4];
  int32_t known_ = -1;
};

}  // namespace
}  // namespace fused_tp::attention

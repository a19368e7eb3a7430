// Scores of a block of queries and a block of keys, and their dropout.
//
// All scores here are multiplied by log2(e), so that exp2 instead of exp yields the probabilities.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/kernels.h"

namespace fused_tp::attention {
namespace {

constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453;

// A block of queries: their intervals of keys and their positions. Padding queries have empty intervals.
struct QueryBlock {
  alignas(64) int32_t starts[kQueries], stops[kQueries], positions[kQueries], indices[kQueries];
  int32_t count;                    // without padding
  int32_t any_start, any_stop;      // smallest interval that contains all intervals of these queries
  int32_t every_start, every_stop;  // keys in the intervals of all of these queries; empty if stop <= start
  int64_t first_row;                // row of the first query

  QueryBlock(const Problem& problem, int64_t block) : first_row(block * kQueries) {
    const int64_t remaining = problem.shape.rows - first_row;
    count = static_cast<int32_t>(remaining < kQueries ? remaining : kQueries);
    for (int i = 0; i < kQueries; ++i) {
      const bool exists = i < count;
      starts[i] = exists ? problem.intervals.starts[first_row + i] : 0;
      stops[i] = exists ? problem.intervals.stops[first_row + i] : 0;
      positions[i] =
          exists && problem.intervals.q_positions != nullptr ? problem.intervals.q_positions[first_row + i] : 0;
      indices[i] = exists && problem.intervals.q_indices != nullptr ? problem.intervals.q_indices[first_row + i] : 0;
    }
    update_bounds();
  }

  // Makes the interval of query i empty. Call update_bounds() after the last change.
  void exclude(int i) { starts[i] = stops[i] = 0; }

  void update_bounds() {
    any_start = every_stop = INT32_MAX;
    any_stop = every_start = 0;
    for (int i = 0; i < count; ++i) {
      every_start = starts[i] > every_start ? starts[i] : every_start;
      every_stop = stops[i] < every_stop ? stops[i] : every_stop;
      if (starts[i] >= stops[i]) continue;
      any_start = starts[i] < any_start ? starts[i] : any_start;
      any_stop = stops[i] > any_stop ? stops[i] : any_stop;
    }
  }
};

// The rows of a key block that a query block needs.
struct KeySpan {
  int64_t begin;      // first key of the block
  int64_t low, high;  // rows [low, high) of the block, multiples of 8: the largest register tile
  bool is_used;       // the interval of at least one query contains a key of the block
  bool needs_mask;    // some query's interval does not contain all of these rows

  KeySpan(const QueryBlock& rows, int64_t block, int64_t keys) : begin(block * kKeys) {
    const int64_t end = begin + kKeys < keys ? begin + kKeys : keys;
    is_used = false;
    for (int i = 0; i < rows.count; ++i) {
      const int64_t common_begin = rows.starts[i] > begin ? rows.starts[i] : begin;
      const int64_t common_end = rows.stops[i] < end ? rows.stops[i] : end;
      is_used |= common_begin < common_end;
    }
    low = rows.any_start > begin ? (rows.any_start - begin) / 8 * 8 : 0;
    const int64_t used_rows = (rows.any_stop < end ? rows.any_stop : end) - begin;
    high = (used_rows + 7) / 8 * 8;
    needs_mask = !(rows.every_start <= begin + low && rows.every_stop >= begin + high);
  }
};

// The scores of one head as a function of the products q.k and of distances.
template <class L>
struct ScoreFunction {
  using Real = typename L::Real;
  using Vector = typename L::Vector;
  bool is_linear;  // neither cap nor slopes: score = product * factor, with factor > 0
  Vector factor;   // if is_linear
  Vector scale;    // multiplies the product; with a cap, scale / softcap
  bool has_cap;
  Vector cap;  // softcap * log2(e)
  bool has_slope;
  Vector slope;  // -slope * log2(e)

  ScoreFunction(const ScoreParameters& parameters, int64_t head) {
    has_cap = parameters.softcap != 0;
    has_slope = parameters.slopes != nullptr;
    is_linear = !has_cap && !has_slope && parameters.scale > 0;
    factor = L::broadcast(static_cast<Real>(parameters.scale * kLog2E));
    scale = has_cap ? L::broadcast(static_cast<Real>(parameters.scale / parameters.softcap)) : factor;
    cap = L::broadcast(static_cast<Real>(parameters.softcap * kLog2E));
    slope = L::zero();
    if (has_slope) slope = L::broadcast(static_cast<Real>(-kLog2E * static_cast<const Real*>(parameters.slopes)[head]));
  }

  // Returns the score of a product; with a cap, sets `cap_derivative`.
  Vector score(Vector product, Vector distance, Vector& cap_derivative) const {
    Vector x = product * scale;
    if (has_cap) {
      const Vector t = L::tanh(x);
      cap_derivative = L::fma(-t, t, L::broadcast(1));
      x = t * cap;
    }
    return has_slope ? L::fma(slope, distance, x) : x;
  }
};

// Dropout factors of the probabilities of one vector of queries. Random bits come from Philox4x32-10 (Salmon et al., SC
// 2011), whose counter is the position, so they do not depend on blocks or ranks. The four words of a counter value
// serve four consecutive keys.
template <class L>
class DropoutFactors {
 public:
  using Vector = typename L::Vector;
  using Integers = typename L::Integers;

  DropoutFactors(const ScoreParameters& parameters, int64_t batch, int64_t head, const int32_t* q_indices)
      : parameters_(parameters),
        queries_(L::load_integers(q_indices)),
        head_(static_cast<uint32_t>(parameters.first_head + head)),
        batch_(static_cast<uint32_t>(batch)),
        keep_factor_(L::broadcast(static_cast<typename L::Real>(parameters.keep_factor))) {}

  // Returns keep_factor or 0 per query, for the key with this index.
  Vector factor(int32_t k_index) {
    if (k_index / 4 != cached_quarter_) generate(cached_quarter_ = k_index / 4);
    return L::select(L::at_least(words_[k_index % 4], parameters_.dropout_threshold), keep_factor_, L::zero());
  }

 private:
  void generate(int32_t quarter) {
    const Integers zero = queries_ ^ queries_;
    Integers c0 = zero + quarter, c1 = queries_, c2 = zero + to_lane(head_), c3 = zero + to_lane(batch_);
    uint32_t key0 = static_cast<uint32_t>(parameters_.seed), key1 = static_cast<uint32_t>(parameters_.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      Integers high0{}, low0{}, high2{}, low2{};
      L::multiply_wide(c0, 0xD2511F53u, high0, low0);
      L::multiply_wide(c2, 0xCD9E8D57u, high2, low2);
      c0 = high2 ^ c1 ^ to_lane(key0);
      c1 = low2;
      c2 = high0 ^ c3 ^ to_lane(key1);
      c3 = low0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    words_[0] = c0, words_[1] = c1, words_[2] = c2, words_[3] = c3;
  }
  // Zero-extends 32 bits to the width of a lane, which is 64 bits for fp64.
  static typename L::Integer to_lane(uint32_t x) { return static_cast<typename L::Integer>(x); }

  const ScoreParameters& parameters_;
  Integers queries_;
  uint32_t head_, batch_;
  Vector keep_factor_;
  Integers words_[4];
  int32_t cached_quarter_ = -1;
};

}  // namespace
}  // namespace fused_tp::attention

// One block of queries against all keys: S^T = K Q^T, P^T = exp2(S^T - highest), O^T = V^T P^T, block of keys by block.
//
// Each kernels_<isa>.cpp includes this after its Lanes and is compiled with that instruction set's flags, so everything
// here has internal linkage: a function shared between the files could be linked in with instructions that the CPU
// lacks.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/kernels.h"
#include "attention/lanes.h"
#include "attention/pack.h"
#include "attention/product.h"
#include "attention/scores.h"

namespace fused_tp::attention {
namespace {

// A maximum may grow by this, in units of ln 2, before the sums are rescaled to it: their relative precision does not
// depend on the reference, and they stay far from overflow.
constexpr int kSlack = 8;

template <class L>
struct ForwardKeys : Layout<L> {
  using Layout<L>::Layout;
  using typename Layout<L>::Operand;
  bool* finite = this->template take<bool>(1);       // V was finite before cleaning
  Operand* k = this->operands(kKeys * this->dim);    // rows
  Operand* v = this->operands(kKeys * this->v_dim);  // columns
};

template <class L>
struct ForwardScratch : Layout<L> {
  using Layout<L>::Layout;
  using typename Layout<L>::Real, typename Layout<L>::Operand;
  Operand* rows = this->operands(2 * kKeys * this->widest());  // room for packing: a block of keys or queries, twice
  Operand* q = this->operands(kQueries * this->dim);           // lanes
  Real* s = this->reals(kKeys * kQueries);                     // [key][query]
  Operand* p = this->in_place_of(s);                           // the same, as B of a product along keys
  Real* o = this->reals(this->v_dim * kQueries);               // [dim of v][query]
};

template <class L>
Sizes forward_sizes(const Shape& shape) {
  return {ForwardKeys<L>(shape, nullptr).end(), 0, ForwardScratch<L>(shape, nullptr).end()};
}

template <class L>
void pack_keys_forward(const Forward& step, int64_t batch, int64_t kv_head, int64_t block, char* key_block,
                       char* scratch) {
  const Shape& shape = step.shape;
  const ForwardKeys<L> keys(shape, key_block);
  const ForwardScratch<L> mine(shape, scratch);
  const int64_t at = block * kKeys, rows = shape.keys - at < kKeys ? shape.keys - at : kKeys;
  pack_rows<L>(step.k, step.dtype, batch, kv_head, at, rows, kKeys, shape.dim, keys.k);
  pack_rows<L>(step.v, step.dtype, batch, kv_head, at, rows, kKeys, shape.v_dim, mine.rows);
  *keys.finite = clean<L>(mine.rows, kKeys * padded(shape.v_dim));
  rows_to_columns<L>(mine.rows, kKeys, shape.v_dim, keys.v, mine.rows + kKeys * padded(shape.v_dim));
}

// Converts products to scores, and to -inf where a key is not seen.
template <class L, bool kPlain>
void score_block(const Problem& step, const Rule<L>& rule, const Rows& rows, const Part& part, typename L::Real* s) {
  using Vector = typename L::Vector;
  const Vector hidden = L::broadcast(-INFINITY);
  for (int v = 0; v < kQueries; v += L::kWidth) {
    const auto starts = L::load_integers(rows.starts + v), stops = L::load_integers(rows.stops + v);
    const auto places = L::load_integers(rows.places + v);
    for (int64_t r = part.low; r < part.high; ++r) {
      const int32_t key = static_cast<int32_t>(part.begin + r);
      typename L::Real* at = s + r * kQueries + v;
      Vector x = L::load(at);
      if constexpr (!kPlain) {
        Vector bend;
        const int32_t index = rule.sloped && key < step.shape.keys ? step.seen.k_indices[key] : 0;
        x = rule.score(x, rule.sloped ? L::distance(places, index) : L::zero(), bend);
      }
      if (part.masked) x = L::select(L::holds(starts, stops, key), x, hidden);
      L::store(at, x);
    }
  }
}

// Rescales O^T to higher maxima, lane by lane.
template <class L>
inline void rescale(typename L::Vector factor, int64_t v_dim, typename L::Real* o) {
  for (int64_t d = 0; d < padded(v_dim); ++d) L::store(o + d * kQueries, L::load(o + d * kQueries) * factor);
}

// P^T = exp2(factor S^T - highest); updates `highest` and `total`.
template <class L, bool kDropout>
void exponentials(const Forward& step, int64_t batch, int64_t head, const Rows& rows, const Part& part,
                  typename L::Vector factor, const ForwardScratch<L>& mine, typename L::Real* highest,
                  typename L::Real* total) {
  using Vector = typename L::Vector;
  const Vector nothing = L::broadcast(-INFINITY);
  for (int v = 0; v < kQueries; v += L::kWidth) {
    const typename L::Real* s = mine.s + v;
    Vector tops[2] = {nothing, nothing};
    for (int64_t r = part.low; r < part.high; r += 2)
      for (int i = 0; i < 2; ++i) tops[i] = L::max(L::load(s + (r + i) * kQueries), tops[i]);
    const Vector top = L::max(tops[0], tops[1]) * factor, before = L::load(highest + v);
    const auto grown = L::greater(top, before + L::broadcast(kSlack));
    Vector sums[2] = {L::load(total + v), L::zero()}, base = before;
    if (L::any(grown)) {
      base = L::select(grown, top, before);
      const Vector shrink = L::select(grown, L::exp2(before - base), L::broadcast(1));
      sums[0] = sums[0] * shrink;
      rescale<L>(shrink, step.shape.v_dim, mine.o + v);
      L::store(highest + v, base);
    }
    base = L::select(L::equal(base, nothing), L::zero(), base);
    Draw<L> draw(step.scores, batch, head, rows.indices + v);
    for (int64_t r = part.low; r < part.high; r += 2) {
      Vector p[2];
      for (int i = 0; i < 2; ++i) {
        p[i] = L::exp2(L::fma(L::load(s + (r + i) * kQueries), factor, -base));
        sums[i] = sums[i] + p[i];
        if constexpr (kDropout) {
          const int64_t key = part.begin + r + i;
          p[i] = p[i] * draw.factor(key < step.shape.keys ? step.seen.k_indices[key] : 0);
        }
      }
      L::store_pairs(mine.p + r * kQueries + v * L::kPair, kQueries, p[0], p[1]);
    }
    L::store(total + v, sums[0] + sums[1]);
  }
}

// O^T += V^T P^T for infinities and NaN, which cleaning removed from the block, for the queries that see them.
template <class L>
void add_special(const Forward& step, int64_t batch, int64_t kv_head, const Rows& rows, const Part& part,
                 const ForwardScratch<L>& mine) {
  for (int64_t r = part.low; r < part.high && part.begin + r < step.shape.keys; ++r) {
    const int64_t key = part.begin + r, in_pair = r % L::kPair;
    read_row<L>(step.v, step.dtype, batch, kv_head, key, step.shape.v_dim, mine.rows);
    for (int64_t d = 0; d < step.shape.v_dim; ++d)
      for (int i = 0; i < kQueries && !is_finite<L>(mine.rows[d]); ++i)
        if (rows.starts[i] <= key && key < rows.stops[i])
          mine.o[d * kQueries + i] +=
              L::value(mine.rows[d]) * L::value(mine.p[(r - in_pair) * kQueries + i * L::kPair + in_pair]);
  }
}

template <class L>
void forward_block(const Forward& step, int64_t batch, int64_t head, int64_t block, char* key_blocks, char* scratch) {
  using Real = typename L::Real;
  using Vector = typename L::Vector;
  const Shape& shape = step.shape;
  const Rows rows(step, block);
  if (rows.last <= rows.first) return;
  const ForwardScratch<L> mine(shape, scratch);
  const Rule<L> rule(step.scores, head);
  const size_t key_bytes = ForwardKeys<L>(shape, nullptr).end();
  const int64_t width = padded(shape.dim);
  pack_rows<L>(step.q, step.dtype, batch, head, rows.at, rows.count, kQueries, shape.dim, mine.rows);
  rows_to_lanes<L>(mine.rows, kQueries, shape.dim, mine.q);

  const auto at = [&](const Sum& sum) {
    return static_cast<Real*>(sum.data) + batch * sum.strides.batch + head * sum.strides.head +
           rows.at * sum.strides.row;
  };
  Real *const state_highest = at(step.highest), *const state_total = at(step.total);
  alignas(64) Real before[kQueries], highest[kQueries], total[kQueries] = {}, keep[kQueries];
  for (int i = 0; i < kQueries; ++i)
    before[i] = i < rows.count ? state_highest[i * step.highest.strides.row] * static_cast<Real>(kLog2E)
                               : static_cast<Real>(-INFINITY);
  std::memcpy(highest, before, sizeof highest);
  std::memset(mine.o, 0, padded(shape.v_dim) * kQueries * sizeof(Real));

  for (int64_t j = rows.first / kKeys; j * kKeys < rows.last; ++j) {
    const Part part(rows, j, shape.keys);
    if (!part.any) continue;
    const ForwardKeys<L> keys(shape, key_blocks + j * key_bytes);
    multiply<L, false>(keys.k + part.low * width, width, part.high - part.low, mine.q, kQueries * L::kPair, kQueries,
                       width / L::kPair, mine.s + part.low * kQueries, kQueries);
    if (!rule.plain) {
      score_block<L, false>(step, rule, rows, part, mine.s);
    } else if (part.masked) {
      score_block<L, true>(step, rule, rows, part, mine.s);
    }
    const Vector factor = rule.plain ? rule.factor : L::broadcast(1);
    if (step.scores.dropout) {
      exponentials<L, true>(step, batch, head, rows, part, factor, mine, highest, total);
    } else {
      exponentials<L, false>(step, batch, head, rows, part, factor, mine, highest, total);
    }
    multiply<L, true>(keys.v + part.low, kKeys, padded(shape.v_dim), mine.p + part.low * kQueries, kQueries * L::kPair,
                      kQueries, (part.high - part.low) / L::kPair, mine.o, kQueries);
    if (!*keys.finite) add_special<L>(step, batch, head / (shape.heads / shape.kv_heads), rows, part, mine);
  }

  for (int v = 0; v < kQueries; v += L::kWidth) {
    const Vector top = L::load(highest + v), nothing = L::broadcast(-INFINITY);
    const Vector base = L::select(L::equal(top, nothing), L::zero(), top);
    L::store(keep + v, L::exp2(L::load(before + v) - base));
  }
  Real* to[kQueries] = {};
  for (int i = 0; i < rows.count; ++i) {
    if (rows.starts[i] >= rows.stops[i]) continue;
    Real& sum = state_total[i * step.total.strides.row];
    sum = sum * keep[i] + total[i];
    // A maximum that has not grown keeps all its bits.
    if (highest[i] != before[i]) state_highest[i * step.highest.strides.row] = highest[i] * static_cast<Real>(kLn2);
    to[i] = at(step.weighted) + i * step.weighted.strides.row;
  }
  add_columns<L>(mine.o, shape.v_dim, keep, Real(1), to);
}

}  // namespace
}  // namespace fused_tp::attention

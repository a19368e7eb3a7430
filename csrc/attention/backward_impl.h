// A block of keys against a block of queries, all transposed like the forward:
//
//   S^T = K Q^T,  P^T = exp2(S^T - lse),  G^T = V g^T,  D^T = P^T (G^T - sums)
//   dv += P^T g,  dk += D^T Q,  dq^T += K^T D^T
//
// Everything here has internal linkage, for the reason in forward_impl.h.
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

template <class L>
struct BackwardKeys : Layout<L> {
  using Layout<L>::Layout;
  using typename Layout<L>::Operand;
  bool* finite = this->template take<bool>(1);  // K was finite; its columns are cleaned
  Operand* k_rows = this->operands(kKeys * this->dim);
  Operand* k_columns = this->operands(kKeys * this->dim);
  Operand* v_rows = this->operands(kKeys * this->v_dim);
};

template <class L>
struct BackwardQueries : Layout<L> {
  using Layout<L>::Layout;
  using typename Layout<L>::Real, typename Layout<L>::Operand;
  Rows* rows = this->template take<Rows>(1);
  bool* finite = this->template take<bool>(1);  // q and g were finite; their pairs are cleaned
  Real* lse = this->reals(kQueries);            // in units of ln 2
  Real* sums = this->reals(kQueries);
  Operand* q_lanes = this->operands(kQueries * this->dim);
  Operand* q_pairs = this->operands(kQueries * this->dim);
  Operand* g_lanes = this->operands(kQueries * this->v_dim);
  Operand* g_pairs = this->operands(kQueries * this->v_dim);
  Real* dq = this->reals(kQueries * this->dim);  // [dim][query], not yet scaled
};

template <class L>
struct BackwardScratch : Layout<L> {
  using Layout<L>::Layout;
  using typename Layout<L>::Real, typename Layout<L>::Operand;
  Operand* rows = this->operands(2 * kKeys * this->widest());  // room for packing: a block of keys or queries, twice
  Real* s = this->reals(kKeys * kQueries);                     // S^T [key][query]
  Real* g = this->reals(kKeys * kQueries);                     // G^T
  Operand* p = this->in_place_of(s);                           // P^T after dropout, rows
  Operand* d = this->in_place_of(g);                           // D^T, rows
  Operand* d_pairs = L::kPair == 1 ? d : this->operands(kKeys * kQueries);
  Real* dk = this->reals(kKeys * this->dim);    // [key][dim], not yet scaled
  Real* dv = this->reals(kKeys * this->v_dim);  // [key][dim]
  Real* slope = this->reals(L::kWidth);         // one vector
};

template <class L>
Sizes backward_sizes(const Shape& shape) {
  return {BackwardKeys<L>(shape, nullptr).end(), BackwardQueries<L>(shape, nullptr).end(),
          BackwardScratch<L>(shape, nullptr).end()};
}

template <class L>
void pack_keys_backward(const Backward& step, int64_t batch, int64_t kv_head, int64_t block, char* key_block,
                        char* scratch) {
  const Shape& shape = step.shape;
  const BackwardKeys<L> keys(shape, key_block);
  const BackwardScratch<L> mine(shape, scratch);
  const int64_t at = block * kKeys, rows = shape.keys - at < kKeys ? shape.keys - at : kKeys;
  pack_rows<L>(step.k, step.dtype, batch, kv_head, at, rows, kKeys, shape.dim, keys.k_rows);
  const int64_t count = kKeys * padded(shape.dim);
  std::memcpy(mine.rows, keys.k_rows, count * sizeof(*mine.rows));
  *keys.finite = clean<L>(mine.rows, count);
  rows_to_columns<L>(mine.rows, kKeys, shape.dim, keys.k_columns, mine.rows + count);
  pack_rows<L>(step.v, step.dtype, batch, kv_head, at, rows, kKeys, shape.v_dim, keys.v_rows);
}

template <class L>
void pack_queries(const Backward& step, int64_t batch, int64_t head, int64_t block, char* query_block, char* scratch) {
  using Real = typename L::Real;
  const Shape& shape = step.shape;
  const BackwardQueries<L> queries(shape, query_block);
  const BackwardScratch<L> mine(shape, scratch);
  Rows& rows = *queries.rows = Rows(step, block);
  const auto per_row = [&](const Source& source, int i) {
    const Strides& strides = source.strides;
    return static_cast<const Real*>(
        source.data)[batch * strides.batch + head * strides.head + (rows.at + i) * strides.row];
  };
  bool blinded = false;
  for (int i = 0; i < kQueries; ++i) {
    const Real lse = i < rows.count ? per_row(step.lse, i) : Real(0);
    const bool nothing = lse == static_cast<Real>(-INFINITY);
    if (nothing) rows.blind(i);
    blinded |= nothing;
    queries.lse[i] = nothing ? Real(0) : lse * static_cast<Real>(kLog2E);
    queries.sums[i] = i < rows.count && !nothing ? per_row(step.sums, i) : Real(0);
  }
  if (blinded) rows.measure();
  const auto pack = [&](const Source& source, int64_t dim, typename L::Operand* lanes, typename L::Operand* pairs) {
    pack_rows<L>(source, step.dtype, batch, head, rows.at, rows.count, kQueries, dim, mine.rows);
    rows_to_lanes<L>(mine.rows, kQueries, dim, lanes);
    const bool finite = clean<L>(mine.rows, kQueries * padded(dim));
    rows_to_pairs<L>(mine.rows, kQueries, dim, pairs);
    return finite;
  };
  const bool q_finite = pack(step.q, shape.dim, queries.q_lanes, queries.q_pairs);
  *queries.finite = pack(step.grad_out, shape.v_dim, queries.g_lanes, queries.g_pairs) && q_finite;
  std::memset(queries.dq, 0, kQueries * padded(shape.dim) * sizeof(Real));
}

template <class L>
void begin_keys(const Shape& shape, char* scratch) {
  const BackwardScratch<L> mine(shape, scratch);
  std::memset(mine.dk, 0, kKeys * padded(shape.dim) * sizeof(typename L::Real));
  std::memset(mine.dv, 0, kKeys * padded(shape.v_dim) * sizeof(typename L::Real));
  std::memset(mine.slope, 0, L::kWidth * sizeof(typename L::Real));
}

// P^T and D^T from S^T and G^T.
template <class L, bool kPlain, bool kMasked, bool kDropout>
void differentiate(const Backward& step, const Rule<L>& rule, int64_t batch, int64_t head,
                   const BackwardQueries<L>& queries, const Part& part, const BackwardScratch<L>& mine) {
  using Vector = typename L::Vector;
  const Rows& rows = *queries.rows;
  Vector slope_sum = L::load(mine.slope);
  for (int v = 0; v < kQueries; v += L::kWidth) {
    const auto starts = L::load_integers(rows.starts + v), stops = L::load_integers(rows.stops + v);
    const auto places = L::load_integers(rows.places + v);
    const Vector lse = L::load(queries.lse + v), sums = L::load(queries.sums + v);
    Draw<L> draw(step.scores, batch, head, rows.indices + v);
    for (int64_t r = part.low; r < part.high; r += 2) {
      Vector p[2], d[2];
      for (int i = 0; i < 2; ++i) {
        const int32_t key = static_cast<int32_t>(part.begin + r + i);
        const int64_t at = (r + i) * kQueries + v;
        Vector x = L::load(mine.s + at), bend = L::broadcast(1), distance = L::zero();
        const bool indexed = kDropout || (!kPlain && rule.sloped);
        const int32_t index = indexed && key < step.shape.keys ? step.seen.k_indices[key] : 0;
        if constexpr (kPlain) {
          x = L::fma(x, rule.factor, -lse);
        } else {
          if (rule.sloped) distance = L::distance(places, index);
          x = rule.score(x, distance, bend) - lse;
        }
        p[i] = L::exp2(x);
        if constexpr (kMasked) p[i] = L::select(L::holds(starts, stops, key), p[i], L::zero());
        if constexpr (kDropout) {
          const Vector factor = draw.factor(index);
          d[i] = p[i] * L::fma(factor, L::load(mine.g + at), -sums);
          p[i] = p[i] * factor;
        } else {
          d[i] = p[i] * (L::load(mine.g + at) - sums);
        }
        if constexpr (kMasked) d[i] = L::select(L::holds(starts, stops, key), d[i], L::zero());
        if constexpr (!kPlain) {
          slope_sum = slope_sum - d[i] * distance;
          d[i] = d[i] * bend;
          if constexpr (kMasked) d[i] = L::select(L::holds(starts, stops, key), d[i], L::zero());
        }
      }
      const int64_t at = r * kQueries + v;
      L::store_rows(mine.p + at, mine.p + at + kQueries, p[0], p[1]);
      L::store_rows(mine.d + at, mine.d + at + kQueries, d[0], d[1]);
      if constexpr (L::kPair == 2) L::store_pairs(mine.d_pairs + r * kQueries + v * 2, kQueries, d[0], d[1]);
    }
  }
  L::store(mine.slope, slope_sum);
}

template <class L, bool kPlain, bool kMasked>
void differentiate(const Backward& step, const Rule<L>& rule, int64_t batch, int64_t head,
                   const BackwardQueries<L>& queries, const Part& part, const BackwardScratch<L>& mine) {
  if (step.scores.dropout) {
    differentiate<L, kPlain, kMasked, true>(step, rule, batch, head, queries, part, mine);
  } else {
    differentiate<L, kPlain, kMasked, false>(step, rule, batch, head, queries, part, mine);
  }
}

// Adds the three products of infinities and NaN, which cleaning removed from the blocks, for the pairs that are seen.
template <class L>
void add_special(const Shape& shape, const Part& part, const BackwardKeys<L>& keys, const BackwardQueries<L>& queries,
                 const BackwardScratch<L>& mine) {
  using Real = typename L::Real;
  const Rows& rows = *queries.rows;
  const auto add = [](Real& sum, Real factor, typename L::Operand x) {
    if (!is_finite<L>(x)) sum += factor * L::value(x);
  };
  const auto lane = [](const typename L::Operand* lanes, int64_t d, int i) {
    return lanes[d / L::kPair * L::kPair * kQueries + i * L::kPair + d % L::kPair];
  };
  for (int64_t r = part.low; r < part.high; ++r)
    for (int i = 0; i < kQueries; ++i) {
      const int64_t key = part.begin + r;
      if (rows.starts[i] > key || key >= rows.stops[i]) continue;
      const Real p = L::value(mine.p[r * kQueries + i]), slope = L::value(mine.d[r * kQueries + i]);
      for (int64_t d = 0; d < shape.v_dim; ++d)
        add(mine.dv[r * padded(shape.v_dim) + d], p, lane(queries.g_lanes, d, i));
      for (int64_t d = 0; d < shape.dim; ++d) {
        add(mine.dk[r * padded(shape.dim) + d], slope, lane(queries.q_lanes, d, i));
        add(queries.dq[d * kQueries + i], slope, keys.k_rows[r * padded(shape.dim) + d]);
      }
    }
}

template <class L>
void backward_pair(const Backward& step, int64_t batch, int64_t head, int64_t block, const char* key_block,
                   char* query_block, char* scratch) {
  const Shape& shape = step.shape;
  const BackwardKeys<L> keys(shape, const_cast<char*>(key_block));
  const BackwardQueries<L> queries(shape, query_block);
  const BackwardScratch<L> mine(shape, scratch);
  const Part part(*queries.rows, block, shape.keys);
  if (!part.any) return;
  const int64_t width = padded(shape.dim), v_width = padded(shape.v_dim), count = part.high - part.low;
  const Rule<L> rule(step.scores, head);
  multiply<L, false>(keys.k_rows + part.low * width, width, count, queries.q_lanes, kQueries * L::kPair, kQueries,
                     width / L::kPair, mine.s + part.low * kQueries, kQueries);
  multiply<L, false>(keys.v_rows + part.low * v_width, v_width, count, queries.g_lanes, kQueries * L::kPair, kQueries,
                     v_width / L::kPair, mine.g + part.low * kQueries, kQueries);
  if (rule.plain) {
    // Padding queries must be masked too: a product may be 0 times an infinity of a key.
    if (part.masked || queries.rows->count < kQueries) {
      differentiate<L, true, true>(step, rule, batch, head, queries, part, mine);
    } else {
      differentiate<L, true, false>(step, rule, batch, head, queries, part, mine);
    }
  } else {
    differentiate<L, false, true>(step, rule, batch, head, queries, part, mine);
  }
  multiply<L, true>(mine.p + part.low * kQueries, kQueries, count, queries.g_pairs, v_width * L::kPair, v_width,
                    kQueries / L::kPair, mine.dv + part.low * v_width, v_width);
  multiply<L, true>(mine.d + part.low * kQueries, kQueries, count, queries.q_pairs, width * L::kPair, width,
                    kQueries / L::kPair, mine.dk + part.low * width, width);
  multiply<L, true>(keys.k_columns + part.low, kKeys, width, mine.d_pairs + part.low * kQueries, kQueries * L::kPair,
                    kQueries, count / L::kPair, queries.dq, kQueries);
  if (!*keys.finite || !*queries.finite) add_special<L>(shape, part, keys, queries, mine);
}

template <class L>
double add_keys(const Backward& step, int64_t batch, int64_t kv_head, int64_t block, char* scratch) {
  using Real = typename L::Real;
  const Shape& shape = step.shape;
  const BackwardScratch<L> mine(shape, scratch);
  const int64_t at = block * kKeys, rows = shape.keys - at < kKeys ? shape.keys - at : kKeys;
  const auto add = [&](const Sum& sum, const Real* terms, int64_t dim, Real factor) {
    Real* to = static_cast<Real*>(sum.data) + batch * sum.strides.batch + kv_head * sum.strides.head;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < dim; ++d) to[(at + r) * sum.strides.row + d] += terms[r * padded(dim) + d] * factor;
  };
  add(step.dk, mine.dk, shape.dim, static_cast<Real>(step.scores.scale));
  add(step.dv, mine.dv, shape.v_dim, Real(1));
  return static_cast<double>(L::sum(L::load(mine.slope)));
}

template <class L>
void add_queries(const Backward& step, int64_t batch, int64_t head, int64_t, char* query_block) {
  using Real = typename L::Real;
  const BackwardQueries<L> queries(step.shape, query_block);
  const Rows& rows = *queries.rows;
  const Strides& strides = step.dq.strides;
  Real* const first = static_cast<Real*>(step.dq.data) + batch * strides.batch + head * strides.head;
  Real *to[kQueries] = {}, ones[kQueries];
  for (int i = 0; i < kQueries; ++i) ones[i] = 1;
  for (int i = 0; i < rows.count; ++i) to[i] = first + (rows.at + i) * strides.row;
  add_columns<L>(queries.dq, step.shape.dim, ones, static_cast<Real>(step.scores.scale), to);
}

}  // namespace
}  // namespace fused_tp::attention

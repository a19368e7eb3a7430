// Backward of one block of queries with one block of keys. As in forward, matrices are transposed. g = grad_out:
//
//   S^T = K Q^T,  P^T = exp2(S^T - lse),  G^T = V g^T,  dS^T = P^T (G^T - delta)
//   dv += P^T g,  dk += dS^T Q,  dq^T += K^T dS^T
//
// Everything here has internal linkage; forward_impl.h gives the reason.
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
struct BackwardKeys : MemoryLayout<L> {
  using MemoryLayout<L>::MemoryLayout;
  using typename MemoryLayout<L>::Operand;
  // True if K had no infinity and no NaN; k_columns has 0 instead of each.
  bool* all_finite = this->template take<bool>(1);
  Operand* k_rows = this->take_operands(kKeys * this->dim);
  Operand* k_columns = this->take_operands(kKeys * this->dim);
  Operand* v_rows = this->take_operands(kKeys * this->v_dim);
};

template <class L>
struct BackwardQueries : MemoryLayout<L> {
  using MemoryLayout<L>::MemoryLayout;
  using typename MemoryLayout<L>::Real, typename MemoryLayout<L>::Operand;
  QueryBlock* rows = this->template take<QueryBlock>(1);
  // True if q and g had no infinity and no NaN; q_pairs and g_pairs have 0 instead of each.
  bool* all_finite = this->template take<bool>(1);
  Real* lse = this->take_reals(kQueries);  // times log2(e)
  Real* delta = this->take_reals(kQueries);
  Operand* q_lanes = this->take_operands(kQueries * this->dim);
  Operand* q_pairs = this->take_operands(kQueries * this->dim);
  Operand* g_lanes = this->take_operands(kQueries * this->v_dim);
  Operand* g_pairs = this->take_operands(kQueries * this->v_dim);
  Real* dq = this->take_reals(kQueries * this->dim);  // [dim][query], without the factor `scale`
};

template <class L>
struct BackwardScratch : MemoryLayout<L> {
  using MemoryLayout<L>::MemoryLayout;
  using typename MemoryLayout<L>::Real, typename MemoryLayout<L>::Operand;
  // Two blocks of rows: input and output of a conversion.
  Operand* rows = this->take_operands(2 * kKeys * this->widest());
  Real* s = this->take_reals(kKeys * kQueries);  // S^T [key][query]
  Real* g = this->take_reals(kKeys * kQueries);  // G^T [key][query]
  Operand* p = this->alias_or_take(s);           // P^T after dropout, in the layout `rows` of pack.h
  Operand* ds = this->alias_or_take(g);          // dS^T, in the layout `rows`
  Operand* ds_pairs = L::kPair == 1 ? ds : this->take_operands(kKeys * kQueries);
  Real* dk = this->take_reals(kKeys * this->dim);    // [key][dim], without the factor `scale`
  Real* dv = this->take_reals(kKeys * this->v_dim);  // [key][dim]
  Real* slope = this->take_reals(L::kWidth);  // terms of the slope gradient: one vector, summed over lanes at the end
};

template <class L>
BufferSizes backward_sizes(const Shape& shape) {
  return {BackwardKeys<L>(shape, nullptr).end(), BackwardQueries<L>(shape, nullptr).end(),
          BackwardScratch<L>(shape, nullptr).end()};
}

template <class L>
void pack_keys_backward(const BackwardProblem& problem, int64_t batch, int64_t kv_head, int64_t block, char* key_block,
                        char* scratch) {
  const Shape& shape = problem.shape;
  const BackwardKeys<L> keys(shape, key_block);
  const BackwardScratch<L> buffers(shape, scratch);
  const int64_t first_key = block * kKeys, rows = shape.keys - first_key < kKeys ? shape.keys - first_key : kKeys;
  pack_rows<L>(problem.k, problem.dtype, batch, kv_head, first_key, rows, kKeys, shape.dim, keys.k_rows);
  const int64_t count = kKeys * padded_dim(shape.dim);
  std::memcpy(buffers.rows, keys.k_rows, count * sizeof(*buffers.rows));
  *keys.all_finite = zero_nonfinite<L>(buffers.rows, count);
  rows_to_columns<L>(buffers.rows, kKeys, shape.dim, keys.k_columns, buffers.rows + count);
  pack_rows<L>(problem.v, problem.dtype, batch, kv_head, first_key, rows, kKeys, shape.v_dim, keys.v_rows);
}

template <class L>
void pack_queries(const BackwardProblem& problem, int64_t batch, int64_t head, int64_t block, char* query_block,
                  char* scratch) {
  using Real = typename L::Real;
  const Shape& shape = problem.shape;
  const BackwardQueries<L> queries(shape, query_block);
  const BackwardScratch<L> buffers(shape, scratch);
  QueryBlock& rows = *queries.rows = QueryBlock(problem, block);
  const auto per_row = [&](const InputView& source, int i) {
    const Strides& strides = source.strides;
    return static_cast<const Real*>(
        source.data)[batch * strides.batch + head * strides.head + (rows.first_row + i) * strides.row];
  };
  bool has_excluded = false;
  for (int i = 0; i < kQueries; ++i) {
    const Real lse = i < rows.count ? per_row(problem.lse, i) : Real(0);
    const bool is_empty = lse == static_cast<Real>(-INFINITY);  // no key in any ring step: no gradient
    if (is_empty) rows.exclude(i);
    has_excluded |= is_empty;
    queries.lse[i] = is_empty ? Real(0) : lse * static_cast<Real>(kLog2E);
    queries.delta[i] = i < rows.count && !is_empty ? per_row(problem.delta, i) : Real(0);
  }
  if (has_excluded) rows.update_bounds();
  const auto pack = [&](const InputView& source, int64_t dim, typename L::Operand* lanes, typename L::Operand* pairs) {
    pack_rows<L>(source, problem.dtype, batch, head, rows.first_row, rows.count, kQueries, dim, buffers.rows);
    rows_to_lanes<L>(buffers.rows, kQueries, dim, lanes);
    const bool is_all_finite = zero_nonfinite<L>(buffers.rows, kQueries * padded_dim(dim));
    interleave_row_pairs<L>(buffers.rows, kQueries, dim, pairs);
    return is_all_finite;
  };
  const bool is_q_finite = pack(problem.q, shape.dim, queries.q_lanes, queries.q_pairs);
  *queries.all_finite = pack(problem.grad_out, shape.v_dim, queries.g_lanes, queries.g_pairs) && is_q_finite;
  std::memset(queries.dq, 0, kQueries * padded_dim(shape.dim) * sizeof(Real));
}

template <class L>
void zero_dk_dv(const Shape& shape, char* scratch) {
  const BackwardScratch<L> buffers(shape, scratch);
  std::memset(buffers.dk, 0, kKeys * padded_dim(shape.dim) * sizeof(typename L::Real));
  std::memset(buffers.dv, 0, kKeys * padded_dim(shape.v_dim) * sizeof(typename L::Real));
  std::memset(buffers.slope, 0, L::kWidth * sizeof(typename L::Real));
}

// Computes P^T and dS^T from S^T and G^T.
template <class L, bool kLinear, bool kNeedsMask, bool kDropout>
void compute_p_and_ds(const BackwardProblem& problem, const ScoreFunction<L>& score_function, int64_t batch,
                      int64_t head, const BackwardQueries<L>& queries, const KeySpan& span,
                      const BackwardScratch<L>& buffers) {
  using Vector = typename L::Vector;
  const QueryBlock& rows = *queries.rows;
  Vector slope_sum = L::load(buffers.slope);
  for (int v = 0; v < kQueries; v += L::kWidth) {
    const auto starts = L::load_integers(rows.starts + v), stops = L::load_integers(rows.stops + v);
    const auto q_positions = L::load_integers(rows.positions + v);
    const Vector lse = L::load(queries.lse + v), delta = L::load(queries.delta + v);
    DropoutFactors<L> dropout(problem.score_parameters, batch, head, rows.indices + v);
    for (int64_t r = span.low; r < span.high; r += 2) {
      Vector p[2], ds[2];
      for (int i = 0; i < 2; ++i) {
        const int32_t key = static_cast<int32_t>(span.begin + r + i);
        const int64_t at = (r + i) * kQueries + v;
        Vector x = L::load(buffers.s + at), cap_derivative = L::broadcast(1), distance = L::zero();
        const bool needs_index = kDropout || (!kLinear && score_function.has_slope);
        const int32_t index = needs_index && key < problem.shape.keys ? problem.intervals.k_indices[key] : 0;
        if constexpr (kLinear) {
          x = L::fma(x, score_function.factor, -lse);
        } else {
          if (score_function.has_slope) distance = L::distance(q_positions, index);
          x = score_function.score(x, distance, cap_derivative) - lse;
        }
        p[i] = L::exp2(x);
        if constexpr (kNeedsMask) p[i] = L::select(L::in_interval(starts, stops, key), p[i], L::zero());
        if constexpr (kDropout) {
          const Vector factor = dropout.factor(index);
          ds[i] = p[i] * L::fma(factor, L::load(buffers.g + at), -delta);
          p[i] = p[i] * factor;
        } else {
          ds[i] = p[i] * (L::load(buffers.g + at) - delta);
        }
        if constexpr (kNeedsMask) ds[i] = L::select(L::in_interval(starts, stops, key), ds[i], L::zero());
        if constexpr (!kLinear) {
          slope_sum = slope_sum - ds[i] * distance;
          ds[i] = ds[i] * cap_derivative;
          if constexpr (kNeedsMask) ds[i] = L::select(L::in_interval(starts, stops, key), ds[i], L::zero());
        }
      }
      const int64_t at = r * kQueries + v;
      L::store_rows(buffers.p + at, buffers.p + at + kQueries, p[0], p[1]);
      L::store_rows(buffers.ds + at, buffers.ds + at + kQueries, ds[0], ds[1]);
      if constexpr (L::kPair == 2) L::store_pairs(buffers.ds_pairs + r * kQueries + v * 2, kQueries, ds[0], ds[1]);
    }
  }
  L::store(buffers.slope, slope_sum);
}

template <class L, bool kLinear, bool kNeedsMask>
void compute_p_and_ds(const BackwardProblem& problem, const ScoreFunction<L>& score_function, int64_t batch,
                      int64_t head, const BackwardQueries<L>& queries, const KeySpan& span,
                      const BackwardScratch<L>& buffers) {
  if (problem.score_parameters.has_dropout) {
    compute_p_and_ds<L, kLinear, kNeedsMask, true>(problem, score_function, batch, head, queries, span, buffers);
  } else {
    compute_p_and_ds<L, kLinear, kNeedsMask, false>(problem, score_function, batch, head, queries, span, buffers);
  }
}

// Adds the terms of dv, dk and dq that zero_nonfinite removed: those of infinities and NaN. Only for keys in a query's
// interval.
template <class L>
void add_nonfinite(const Shape& shape, const KeySpan& span, const BackwardKeys<L>& keys,
                   const BackwardQueries<L>& queries, const BackwardScratch<L>& buffers) {
  using Real = typename L::Real;
  const QueryBlock& rows = *queries.rows;
  const auto add = [](Real& sum, Real factor, typename L::Operand x) {
    if (!is_finite<L>(x)) sum += factor * L::value(x);
  };
  const auto lane = [](const typename L::Operand* lanes, int64_t d, int i) {
    return lanes[d / L::kPair * L::kPair * kQueries + i * L::kPair + d % L::kPair];
  };
  for (int64_t r = span.low; r < span.high; ++r)
    for (int i = 0; i < kQueries; ++i) {
      const int64_t key = span.begin + r;
      if (rows.starts[i] > key || key >= rows.stops[i]) continue;
      const Real p = L::value(buffers.p[r * kQueries + i]), ds = L::value(buffers.ds[r * kQueries + i]);
      for (int64_t d = 0; d < shape.v_dim; ++d)
        add(buffers.dv[r * padded_dim(shape.v_dim) + d], p, lane(queries.g_lanes, d, i));
      for (int64_t d = 0; d < shape.dim; ++d) {
        add(buffers.dk[r * padded_dim(shape.dim) + d], ds, lane(queries.q_lanes, d, i));
        add(queries.dq[d * kQueries + i], ds, keys.k_rows[r * padded_dim(shape.dim) + d]);
      }
    }
}

template <class L>
void backward_pair(const BackwardProblem& problem, int64_t batch, int64_t head, int64_t block, const char* key_block,
                   char* query_block, char* scratch) {
  const Shape& shape = problem.shape;
  const BackwardKeys<L> keys(shape, const_cast<char*>(key_block));
  const BackwardQueries<L> queries(shape, query_block);
  const BackwardScratch<L> buffers(shape, scratch);
  const KeySpan span(*queries.rows, block, shape.keys);
  if (!span.is_used) return;
  const int64_t width = padded_dim(shape.dim), v_width = padded_dim(shape.v_dim), count = span.high - span.low;
  const ScoreFunction<L> score_function(problem.score_parameters, head);
  multiply<L, false>(keys.k_rows + span.low * width, width, count, queries.q_lanes, kQueries * L::kPair, kQueries,
                     width / L::kPair, buffers.s + span.low * kQueries, kQueries);
  multiply<L, false>(keys.v_rows + span.low * v_width, v_width, count, queries.g_lanes, kQueries * L::kPair, kQueries,
                     v_width / L::kPair, buffers.g + span.low * kQueries, kQueries);
  if (score_function.is_linear) {
    // Padding queries are zeros. They need the mask too: 0 times an infinity in K is NaN, which would spread to dk and
    // dv.
    if (span.needs_mask || queries.rows->count < kQueries) {
      compute_p_and_ds<L, true, true>(problem, score_function, batch, head, queries, span, buffers);
    } else {
      compute_p_and_ds<L, true, false>(problem, score_function, batch, head, queries, span, buffers);
    }
  } else {
    compute_p_and_ds<L, false, true>(problem, score_function, batch, head, queries, span, buffers);
  }
  multiply<L, true>(buffers.p + span.low * kQueries, kQueries, count, queries.g_pairs, v_width * L::kPair, v_width,
                    kQueries / L::kPair, buffers.dv + span.low * v_width, v_width);
  multiply<L, true>(buffers.ds + span.low * kQueries, kQueries, count, queries.q_pairs, width * L::kPair, width,
                    kQueries / L::kPair, buffers.dk + span.low * width, width);
  multiply<L, true>(keys.k_columns + span.low, kKeys, width, buffers.ds_pairs + span.low * kQueries,
                    kQueries * L::kPair, kQueries, count / L::kPair, queries.dq, kQueries);
  if (!*keys.all_finite || !*queries.all_finite) add_nonfinite<L>(shape, span, keys, queries, buffers);
}

template <class L>
double add_dk_dv(const BackwardProblem& problem, int64_t batch, int64_t kv_head, int64_t block, char* scratch) {
  using Real = typename L::Real;
  const Shape& shape = problem.shape;
  const BackwardScratch<L> buffers(shape, scratch);
  const int64_t first_key = block * kKeys, rows = shape.keys - first_key < kKeys ? shape.keys - first_key : kKeys;
  const auto add = [&](const AccumulatorView& sum, const Real* terms, int64_t dim, Real factor) {
    Real* to = static_cast<Real*>(sum.data) + batch * sum.strides.batch + kv_head * sum.strides.head;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t d = 0; d < dim; ++d)
        to[(first_key + r) * sum.strides.row + d] += terms[r * padded_dim(dim) + d] * factor;
  };
  add(problem.dk, buffers.dk, shape.dim, static_cast<Real>(problem.score_parameters.scale));
  add(problem.dv, buffers.dv, shape.v_dim, Real(1));
  return static_cast<double>(L::sum(L::load(buffers.slope)));
}

template <class L>
void add_dq(const BackwardProblem& problem, int64_t batch, int64_t head, int64_t, char* query_block) {
  using Real = typename L::Real;
  const BackwardQueries<L> queries(problem.shape, query_block);
  const QueryBlock& rows = *queries.rows;
  const Strides& strides = problem.dq.strides;
  Real* const head_dq = static_cast<Real*>(problem.dq.data) + batch * strides.batch + head * strides.head;
  Real *output_rows[kQueries] = {}, ones[kQueries];
  for (int i = 0; i < kQueries; ++i) ones[i] = 1;
  for (int i = 0; i < rows.count; ++i) output_rows[i] = head_dq + (rows.first_row + i) * strides.row;
  add_columns<L>(queries.dq, problem.shape.dim, ones, static_cast<Real>(problem.score_parameters.scale), output_rows);
}

}  // namespace
}  // namespace fused_tp::attention

// Forward of one block of queries with all keys. For each block of keys:
//
//   S^T = K Q^T,  P^T = exp2(S^T - row_max),  O^T += V^T P^T
//
// Each kernels_<isa>.cpp includes this header and is compiled with the flags of its instruction set. Everything here
// has internal linkage. Otherwise the linker could keep the AVX-512 version of a function and call it on a CPU without
// AVX-512.
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

// The sums are rescaled only once the maximum score has grown by more than this (in log2 units) since the last
// rescaling. Probabilities are then at most 2^8, so fp32 sums neither overflow nor lose relative precision.
constexpr int kRescaleThreshold = 8;

template <class L>
struct ForwardKeys : MemoryLayout<L> {
  using MemoryLayout<L>::MemoryLayout;
  using typename MemoryLayout<L>::Operand;
  bool* all_finite = this->template take<bool>(1);  // true if V had no infinity and no NaN; `v` has 0 instead of each
  Operand* k = this->take_operands(kKeys * this->dim);    // layout `rows` of pack.h
  Operand* v = this->take_operands(kKeys * this->v_dim);  // layout `columns`
};

template <class L>
struct ForwardScratch : MemoryLayout<L> {
  using MemoryLayout<L>::MemoryLayout;
  using typename MemoryLayout<L>::Real, typename MemoryLayout<L>::Operand;
  // Two blocks of rows: input and output of a conversion.
  Operand* rows = this->take_operands(2 * kKeys * this->widest());
  Operand* q = this->take_operands(kQueries * this->dim);  // layout `lanes`
  Real* s = this->take_reals(kKeys * kQueries);            // S^T [key][query]
  Operand* p = this->alias_or_take(s);                     // P^T, in the format of B in product.h
  Real* o = this->take_reals(this->v_dim * kQueries);      // O^T [dim][query]
};

template <class L>
BufferSizes forward_sizes(const Shape& shape) {
  return {ForwardKeys<L>(shape, nullptr).end(), 0, ForwardScratch<L>(shape, nullptr).end()};
}

template <class L>
void pack_keys_forward(const ForwardProblem& problem, int64_t batch, int64_t kv_head, int64_t block, char* key_block,
                       char* scratch) {
  const Shape& shape = problem.shape;
  const ForwardKeys<L> keys(shape, key_block);
  const ForwardScratch<L> buffers(shape, scratch);
  const int64_t first_key = block * kKeys, rows = shape.keys - first_key < kKeys ? shape.keys - first_key : kKeys;
  pack_rows<L>(problem.k, problem.dtype, batch, kv_head, first_key, rows, kKeys, shape.dim, keys.k);
  pack_rows<L>(problem.v, problem.dtype, batch, kv_head, first_key, rows, kKeys, shape.v_dim, buffers.rows);
  *keys.all_finite = zero_nonfinite<L>(buffers.rows, kKeys * padded_dim(shape.v_dim));
  rows_to_columns<L>(buffers.rows, kKeys, shape.v_dim, keys.v, buffers.rows + kKeys * padded_dim(shape.v_dim));
}

// Converts the products S^T to scores in place, with -inf for keys outside a query's interval.
template <class L, bool kLinear>
void compute_scores(const Problem& problem, const ScoreFunction<L>& score_function, const QueryBlock& rows,
                    const KeySpan& span, typename L::Real* s) {
  using Vector = typename L::Vector;
  const Vector masked_score = L::broadcast(-INFINITY);
  for (int v = 0; v < kQueries; v += L::kWidth) {
    const auto starts = L::load_integers(rows.starts + v), stops = L::load_integers(rows.stops + v);
    const auto q_positions = L::load_integers(rows.positions + v);
    for (int64_t r = span.low; r < span.high; ++r) {
      const int32_t key = static_cast<int32_t>(span.begin + r);
      typename L::Real* at = s + r * kQueries + v;
      Vector x = L::load(at);
      if constexpr (!kLinear) {
        Vector cap_derivative;
        const int32_t index =
            score_function.has_slope && key < problem.shape.keys ? problem.intervals.k_indices[key] : 0;
        x = score_function.score(x, score_function.has_slope ? L::distance(q_positions, index) : L::zero(),
                                 cap_derivative);
      }
      if (span.needs_mask) x = L::select(L::in_interval(starts, stops, key), x, masked_score);
      L::store(at, x);
    }
  }
}

// Multiplies O^T by one factor per query.
template <class L>
inline void rescale_output(typename L::Vector factor, int64_t v_dim, typename L::Real* o) {
  for (int64_t d = 0; d < padded_dim(v_dim); ++d) L::store(o + d * kQueries, L::load(o + d * kQueries) * factor);
}

// Online softmax: P^T = exp2(factor S^T - row_max). Updates `row_max`, `row_sum` and, if rescaled, O^T.
template <class L, bool kDropout>
void update_softmax(const ForwardProblem& problem, int64_t batch, int64_t head, const QueryBlock& rows,
                    const KeySpan& span, typename L::Vector factor, const ForwardScratch<L>& buffers,
                    typename L::Real* row_max, typename L::Real* row_sum) {
  using Vector = typename L::Vector;
  const Vector minus_infinity = L::broadcast(-INFINITY);
  for (int v = 0; v < kQueries; v += L::kWidth) {
    const typename L::Real* s = buffers.s + v;
    Vector maxima[2] = {minus_infinity, minus_infinity};
    for (int64_t r = span.low; r < span.high; r += 2)
      for (int i = 0; i < 2; ++i) maxima[i] = L::max(L::load(s + (r + i) * kQueries), maxima[i]);
    const Vector block_max = L::max(maxima[0], maxima[1]) * factor, old_row_max = L::load(row_max + v);
    const auto needs_rescale = L::greater(block_max, old_row_max + L::broadcast(kRescaleThreshold));
    Vector sums[2] = {L::load(row_sum + v), L::zero()}, base = old_row_max;
    if (L::any(needs_rescale)) {
      base = L::select(needs_rescale, block_max, old_row_max);
      const Vector rescale_factor = L::select(needs_rescale, L::exp2(old_row_max - base), L::broadcast(1));
      sums[0] = sums[0] * rescale_factor;
      rescale_output<L>(rescale_factor, problem.shape.v_dim, buffers.o + v);
      L::store(row_max + v, base);
    }
    base = L::select(L::equal(base, minus_infinity), L::zero(), base);
    DropoutFactors<L> dropout(problem.score_parameters, batch, head, rows.indices + v);
    for (int64_t r = span.low; r < span.high; r += 2) {
      Vector p[2];
      for (int i = 0; i < 2; ++i) {
        p[i] = L::exp2(L::fma(L::load(s + (r + i) * kQueries), factor, -base));
        sums[i] = sums[i] + p[i];
        if constexpr (kDropout) {
          const int64_t key = span.begin + r + i;
          p[i] = p[i] * dropout.factor(key < problem.shape.keys ? problem.intervals.k_indices[key] : 0);
        }
      }
      L::store_pairs(buffers.p + r * kQueries + v * L::kPair, kQueries, p[0], p[1]);
    }
    L::store(row_sum + v, sums[0] + sums[1]);
  }
}

// Adds the terms of O^T += V^T P^T that zero_nonfinite removed: those of infinities and NaN in V. Only for queries
// whose interval contains the key.
template <class L>
void add_nonfinite(const ForwardProblem& problem, int64_t batch, int64_t kv_head, const QueryBlock& rows,
                   const KeySpan& span, const ForwardScratch<L>& buffers) {
  for (int64_t r = span.low; r < span.high && span.begin + r < problem.shape.keys; ++r) {
    const int64_t key = span.begin + r, in_pair = r % L::kPair;
    read_row<L>(problem.v, problem.dtype, batch, kv_head, key, problem.shape.v_dim, buffers.rows);
    for (int64_t d = 0; d < problem.shape.v_dim; ++d)
      for (int i = 0; i < kQueries && !is_finite<L>(buffers.rows[d]); ++i)
        if (rows.starts[i] <= key && key < rows.stops[i])
          buffers.o[d * kQueries + i] +=
              L::value(buffers.rows[d]) * L::value(buffers.p[(r - in_pair) * kQueries + i * L::kPair + in_pair]);
  }
}

template <class L>
void forward_block(const ForwardProblem& problem, int64_t batch, int64_t head, int64_t block, char* key_blocks,
                   char* scratch) {
  using Real = typename L::Real;
  using Vector = typename L::Vector;
  const Shape& shape = problem.shape;
  const QueryBlock rows(problem, block);
  if (rows.any_stop <= rows.any_start) return;
  const ForwardScratch<L> buffers(shape, scratch);
  const ScoreFunction<L> score_function(problem.score_parameters, head);
  const size_t key_bytes = ForwardKeys<L>(shape, nullptr).end();
  const int64_t width = padded_dim(shape.dim);
  pack_rows<L>(problem.q, problem.dtype, batch, head, rows.first_row, rows.count, kQueries, shape.dim, buffers.rows);
  rows_to_lanes<L>(buffers.rows, kQueries, shape.dim, buffers.q);

  const auto at = [&](const AccumulatorView& sum) {
    return static_cast<Real*>(sum.data) + batch * sum.strides.batch + head * sum.strides.head +
           rows.first_row * sum.strides.row;
  };
  Real *const state_row_max = at(problem.row_max), *const state_row_sum = at(problem.row_sum);
  alignas(64) Real old_row_max[kQueries], row_max[kQueries], row_sum[kQueries] = {}, row_factors[kQueries];
  for (int i = 0; i < kQueries; ++i)
    old_row_max[i] = i < rows.count ? state_row_max[i * problem.row_max.strides.row] * static_cast<Real>(kLog2E)
                                    : static_cast<Real>(-INFINITY);
  std::memcpy(row_max, old_row_max, sizeof row_max);
  std::memset(buffers.o, 0, padded_dim(shape.v_dim) * kQueries * sizeof(Real));

  for (int64_t j = rows.any_start / kKeys; j * kKeys < rows.any_stop; ++j) {
    const KeySpan span(rows, j, shape.keys);
    if (!span.is_used) continue;
    const ForwardKeys<L> keys(shape, key_blocks + j * key_bytes);
    multiply<L, false>(keys.k + span.low * width, width, span.high - span.low, buffers.q, kQueries * L::kPair, kQueries,
                       width / L::kPair, buffers.s + span.low * kQueries, kQueries);
    if (!score_function.is_linear) {
      compute_scores<L, false>(problem, score_function, rows, span, buffers.s);
    } else if (span.needs_mask) {
      compute_scores<L, true>(problem, score_function, rows, span, buffers.s);
    }
    const Vector factor = score_function.is_linear ? score_function.factor : L::broadcast(1);
    if (problem.score_parameters.has_dropout) {
      update_softmax<L, true>(problem, batch, head, rows, span, factor, buffers, row_max, row_sum);
    } else {
      update_softmax<L, false>(problem, batch, head, rows, span, factor, buffers, row_max, row_sum);
    }
    multiply<L, true>(keys.v + span.low, kKeys, padded_dim(shape.v_dim), buffers.p + span.low * kQueries,
                      kQueries * L::kPair, kQueries, (span.high - span.low) / L::kPair, buffers.o, kQueries);
    if (!*keys.all_finite) add_nonfinite<L>(problem, batch, head / (shape.heads / shape.kv_heads), rows, span, buffers);
  }

  for (int v = 0; v < kQueries; v += L::kWidth) {
    const Vector block_max = L::load(row_max + v), minus_infinity = L::broadcast(-INFINITY);
    const Vector base = L::select(L::equal(block_max, minus_infinity), L::zero(), block_max);
    L::store(row_factors + v, L::exp2(L::load(old_row_max + v) - base));
  }
  Real* output_rows[kQueries] = {};
  for (int i = 0; i < rows.count; ++i) {
    if (rows.starts[i] >= rows.stops[i]) continue;
    Real& sum = state_row_sum[i * problem.row_sum.strides.row];
    sum = sum * row_factors[i] + row_sum[i];
    // Write only maxima that have grown: multiplying by log2(e) and back by ln 2 would change the last bits of others.
    if (row_max[i] != old_row_max[i])
      state_row_max[i * problem.row_max.strides.row] = row_max[i] * static_cast<Real>(kLn2);
    output_rows[i] = at(problem.acc) + i * problem.acc.strides.row;
  }
  add_columns<L>(buffers.o, shape.v_dim, row_factors, Real(1), output_rows);
}

}  // namespace
}  // namespace fused_tp::attention

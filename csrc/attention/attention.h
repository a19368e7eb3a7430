// Flash attention on CPUs: one step of ring attention, accumulated into an online softmax state that the caller keeps
// between steps. Forward, with m = row_max, the running maximum of each query's scores:
//
//   score = cap(scale * q.k) - slope * |position of q - index of k|,   p = exp(score - m),
//   acc += p' v,   row_sum += p        (p' is p after dropout)
//
// Backward, with p = exp(score - lse) and g = grad_out:
//
//   dv += p'^T g,   dscore = p' (g v^T) - p delta,   dq += scale dcap dscore k,   dk += scale dcap dscore^T q
//   delta = rowsum(g * out) - grad_lse,   dcap = derivative of cap at scale * q.k
//
// The position of a query is on the axis of the key indices. (Dao et al., "FlashAttention", arXiv:2205.14135;
// "FlashAttention-2", arXiv:2307.08691.) Every query attends to one interval of keys, [start, stop). Both ends never
// decrease from one query to the next. Blocks of keys outside all intervals are skipped. Sums are fp64 for fp64 inputs,
// else fp32.
//
// The SIMD lanes of every vector are queries. So the maximum and the sum of a row need no shuffles, and the
// probabilities are never transposed between the two matrix products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace fused_tp::attention {

// Strides, in elements, of a [batch, rows, heads, dim] tensor. The first three dims may be stored in any order; the
// last is contiguous.
struct Strides {
  int64_t batch, row, head;
};

struct InputView {
  const void* data;
  Strides strides;
};

// A tensor that the kernels update or add results to.
struct AccumulatorView {
  void* data;
  Strides strides;
};

struct Shape {
  int64_t batch, heads, kv_heads, rows, keys, dim, v_dim;
};

// The interval of keys to which each query attends, and positions. The last three vectors may be null if there are
// neither slopes nor dropout.
struct Intervals {
  const int32_t* starts;       // [rows]: first key of each query's interval
  const int32_t* stops;        // [rows]: end of each query's interval, exclusive
  const int32_t* q_positions;  // [rows]: key-axis position of each query, for its distances from k_indices (ALiBi)
  const int32_t* q_indices;    // [rows]: index of each query in the whole sequence (dropout)
  const int32_t* k_indices;    // [keys]: index of each key in the whole sequence
};

struct ScoreParameters {
  double scale;
  double softcap;      // scores are capped to (-softcap, softcap); 0: no cap
  const void* slopes;  // [heads], ALiBi slopes, fp64 for fp64 inputs, else fp32; null: none
  bool has_dropout;
  uint32_t dropout_threshold;  // a probability whose 32 random bits are below it is dropped
  double keep_factor;          // kept probabilities are multiplied by it
  uint64_t seed;
  int32_t first_head;  // index of this rank's first head among all heads: random bits depend on it
};

struct Problem {
  Shape shape;
  Intervals intervals;
  ScoreParameters score_parameters;
  DType dtype;  // dtype of q, k, v and grad_out: fp32, bf16, fp16 or fp64
  InputView q, k, v;
};

struct ForwardProblem : Problem {
  AccumulatorView acc, row_max, row_sum;
};

struct BackwardProblem : Problem {
  InputView grad_out, lse, delta;
  AccumulatorView dq, dk, dv;
  void* d_slopes;  // [heads]; null if no gradient of the slopes is needed
};

// Results are bitwise identical for any number of threads. `isa`: see select_kernels.
void forward(const ForwardProblem& problem, int threads, const char* isa);
void backward(const BackwardProblem& problem, int threads, const char* isa);

}  // namespace fused_tp::attention

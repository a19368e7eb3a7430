// Flash attention on CPUs: one step of ring attention, accumulated into an online softmax state that the caller keeps
// between steps. Forward, with m = highest, the running maximum of each query's scores:
//
//   score = cap(scale * q.k) - slope * |place of q - index of k|,   p = exp(score - m),
//   weighted += p' v,   total += p        (p' is p after dropout)
//
// Backward, with p = exp(score - lse) and g = grad_out:
//
//   dv += p'^T g,   dscore = p' (g v^T) - p row_sums,   dq += scale dcap dscore k,   dk += scale dcap dscore^T q
//   row_sums = rowsum(g * out) - grad_lse,   dcap = derivative of cap at scale * q.k
//
// (Dao et al., "FlashAttention", arXiv:2205.14135; "FlashAttention-2", arXiv:2307.08691.) Every query attends to one
// interval of keys, [start, stop). Both ends never decrease from one query to the next. Blocks of keys outside all
// intervals are skipped. Sums are fp64 for fp64 inputs, else fp32.
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

// A tensor to which results are added.
struct AccumulatorView {
  void* data;
  Strides strides;
};

struct Shape {
  int64_t batch, heads, kv_heads, rows, keys, dim, v_dim;
};

// Intervals of keys to which queries attend, and positions. The last three vectors may be null if there are neither
// slopes nor dropout.
struct Intervals {
  const int32_t* starts;     // [rows]: first key of each query's interval
  const int32_t* stops;      // [rows]: end of each query's interval, exclusive
  const int32_t* places;     // [rows]: position of each query, comparable with k_indices (ALiBi distances)
  const int32_t* q_indices;  // [rows]: index of each query in the whole sequence (dropout)
  const int32_t* k_indices;  // [keys]: index of each key in the whole sequence
};

struct ScoreParameters {
  double scale;
  double softcap;      // scores are capped to (-softcap, softcap); 0: no cap
  const void* slopes;  // [heads], ALiBi slopes, fp64 for fp64 inputs, else fp32; null: none
  bool dropout;
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
  AccumulatorView weighted, highest, total;
};

struct BackwardProblem : Problem {
  InputView grad_out, lse, row_sums;
  AccumulatorView dq, dk, dv;
  void* d_slopes;  // [heads]; null if no gradient of the slopes is needed
};

// Results are bitwise identical for any number of threads. `isa`: see select_kernels.
void forward(const ForwardProblem& step, int threads, const char* isa);
void backward(const BackwardProblem& step, int threads, const char* isa);

}  // namespace fused_tp::attention

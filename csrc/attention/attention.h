// Flash attention on CPUs: one step of a ring, folded into sums that the caller keeps from step to step.
//
//   score = cap(scale * q.k) - slope * |place of q - index of k|,   p = exp(score - highest),
//   weighted += p' v,   total += p        (p' is p after dropout)
//
// and backward, with p = exp(score - lse):
//
//   dv += p'^T g,   dscore = p' (g v^T) - p sums,   dq += scale dcap dscore k,   dk += scale dcap dscore^T q.
//
// (Dao et al., "FlashAttention", arXiv:2205.14135; "FlashAttention-2", arXiv:2307.08691.) Every query sees one interval
// of keys, [start, stop), both ends ascending; blocks that no query sees are skipped. Sums are fp32, fp64 for fp64.
//
// The lanes of all vectors are queries: maxima and sums of a row need no shuffles, and no product with probabilities
// needs them transposed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace fused_tp::attention {

// Strides, in elements, of rows of `dim` dense elements: [batch, rows, heads, dim] in any order.
struct Strides {
  int64_t batch, row, head;
};

struct Source {
  const void* data;
  Strides strides;
};

struct Sum {
  void* data;
  Strides strides;
};

struct Shape {
  int64_t batch, heads, kv_heads, rows, keys, dim, v_dim;
};

// int32 vectors. Per query: start and stop of its interval of keys, its position on the axis of the keys, and its index
// in the whole sequence. Per key: its index in the whole sequence. The last three may be null if there are neither
// slopes nor dropout.
struct Seen {
  const int32_t* starts;
  const int32_t* stops;
  const int32_t* places;
  const int32_t* q_indices;
  const int32_t* k_indices;
};

struct Scores {
  double scale;
  double softcap;      // 0: none
  const void* slopes;  // [heads] in the type of the sums; null: none
  bool dropout;
  uint32_t threshold;  // elements with random bits below it are dropped
  double keep_factor;  // factor of kept elements
  uint64_t seed;
  int32_t first_head;
};

struct Problem {
  Shape shape;
  Seen seen;
  Scores scores;
  DType dtype;  // of q, k, v and grad_out: fp32, bf16, fp16 or fp64
  Source q, k, v;
};

struct Forward : Problem {
  Sum weighted, highest, total;
};

struct Backward : Problem {
  Source grad_out, lse, sums;
  Sum dq, dk, dv;
  void* d_slopes;  // [heads]; null: not wanted
};

// The result has the same bits for any number of threads. `isa` as in kernels_for.
void forward(const Forward& step, int threads, const char* isa);
void backward(const Backward& step, int threads, const char* isa);

}  // namespace fused_tp::attention

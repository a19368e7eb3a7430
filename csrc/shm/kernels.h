// Arithmetic of the collectives: one table of functions per instruction set, chosen once per process.
//
// Sums accumulate in fp32 (fp64 for fp64, the element type for integers), in the order of `sources`, and are rounded
// once. Callers pass `sources` in rank order, so all ranks compute the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace fused_tp {
enum class Isa;
}

namespace fused_tp::shm {

struct RmsNormRow {
  const void* const* partials;  // n_partials rows of `columns` elements, in rank order
  int n_partials;
  const void* residual;  // null: none
  const void* weight;
  void* new_residual;  // null if there are no residual and one partial: they would be equal
  void* normed;
  size_t columns;
  double eps;               // not float: fp64 rows need the full precision
  float weight_offset = 0;  // added to the weight: 1 in Gemma
};

// Weighted sums of rows, as in combining the expert outputs of each token: out[t] = sum of scale[i] * y[rows[i]] over
// starts[t] <= i < starts[t + 1]. Sums are fp32 and rounded once. An empty sum is 0.
struct RowSums {
  const void* y;
  const int64_t* rows;
  const int64_t* starts;  // [tokens + 1]
  const float* scale;     // one per element of `rows`; null: all 1
  void* out;              // [tokens, columns]
  size_t columns;
};

struct Kernels {
  const char* isa;
  // destination[i] = sum over s of sources[s][i]. `destination` may be one of the sources.
  void (*sum)(void* destination, const void* const* sources, int n_sources, size_t count, DType dtype);
  // new_residual = residual + sum(partials), rounded to dtype; normed = new_residual / rms(new_residual) * weight.
  void (*rms_norm_row)(const RmsNormRow& row, DType dtype);
  // Computes out[begin:end). dtype: fp32, bf16 or fp16.
  void (*sum_rows)(const RowSums& sums, size_t begin, size_t end, DType dtype);
};

// Returns the fastest table that this CPU supports; FUSED_TP_ISA limits the instruction set (see isa.h).
const Kernels& kernels();
const Kernels& select_kernels(Isa isa);

const Kernels& kernels_plain();
#if FUSED_TP_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512(bool has_bf16_conversion);
#endif

}  // namespace fused_tp::shm

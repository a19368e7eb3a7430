// Arithmetic of the collectives, one table of functions per instruction set, chosen once at run time.
//
// Sums over ranks accumulate in fp32 (fp64 for fp64, the type itself for integers) in the order of `sources`,
// which callers pass in rank order, and round once.
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
  const void* residual;  // may be null: nothing is added
  const void* weight;
  void* new_residual;
  void* normed;
  size_t columns;
  double eps;  // double, as float64 rows need its full precision
};

// Rows [tokens, columns] of sums of other rows: out[t] = sum over i in starts[t] <= i < starts[t + 1] of
// scale[i] * y[rows[i]], in fp32 and rounded once; zeros for an empty sum.
struct RowSums {
  const void* y;
  const int64_t* rows;
  const int64_t* starts;  // one more than tokens
  const float* scale;     // may be null: ones
  void* out;
  size_t columns;
};

struct Kernels {
  const char* isa;
  // destination[i] = sum over s of sources[s][i]. `destination` may be one of the sources.
  void (*sum)(void* destination, const void* const* sources, int n_sources, size_t count, DType dtype);
  // new_residual = residual + sum(partials), rounded to dtype; normed = new_residual / rms(new_residual) * weight.
  void (*rms_norm_row)(const RmsNormRow& row, DType dtype);
  // Computes tokens [begin, end); for floating types of up to 32 bits.
  void (*sum_rows)(const RowSums& sums, size_t begin, size_t end, DType dtype);
};

// The best table this CPU can run; FUSED_TP_ISA selects a lesser one (see isa.h).
const Kernels& kernels();
const Kernels& kernels_for(Isa isa);

const Kernels& kernels_plain();
#if FUSED_TP_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512(bool bf16_conversion);
#endif

}  // namespace fused_tp::shm

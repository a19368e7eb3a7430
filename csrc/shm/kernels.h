// Arithmetic of the collectives, one table of functions per instruction set, chosen once at run time.
//
// Sums over ranks accumulate in fp32 (fp64 for fp64, the type itself for integers) in the order of `sources`,
// which callers pass in rank order, and round once.
#pragma once

#include <cstddef>

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
  double eps;  // of the arithmetic's precision: float64 rows need all of it
};

struct Kernels {
  const char* isa;
  // destination[i] = sum over s of sources[s][i]. `destination` may be one of the sources.
  void (*sum)(void* destination, const void* const* sources, int n_sources, size_t count, DType dtype);
  // new_residual = residual + sum(partials), rounded to dtype; normed = new_residual / rms(new_residual) * weight.
  void (*rms_norm_row)(const RmsNormRow& row, DType dtype);
};

// The best table this CPU can run; FUSED_TP_ISA asks for a lesser one (see isa.h).
const Kernels& kernels();
const Kernels& kernels_for(Isa isa);

const Kernels& kernels_plain();
#if FUSED_TP_X86
const Kernels& kernels_avx2();
const Kernels& kernels_avx512(bool bf16_conversion);
#endif

}  // namespace fused_tp::shm

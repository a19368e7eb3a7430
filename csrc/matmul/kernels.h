// The arithmetic of few_rows.h: one table of functions per instruction set and dtype.
#pragma once

#include <cstddef>

#include "matmul/few_rows.h"

namespace fused_tp::matmul {

struct Kernels {
  const char* isa;
  size_t (*packed_bytes)(const FewRows& problem);
  // Packs x in the order of the products: step after step, with all rows in each step.
  void (*pack)(const FewRows& problem, char* packed);
  // Computes columns [first, last) of y.
  void (*multiply)(const FewRows& problem, const char* packed, int64_t first, int64_t last);
};

#if FUSED_TP_X86
const Kernels& kernels_avx2(DType dtype);
const Kernels& kernels_avx512(DType dtype, bool bf16_products);
#endif

}  // namespace fused_tp::matmul

// Kernels of few_rows.h: one table of functions per instruction set and dtype.
#pragma once

#include <cstddef>

#include "matmul/few_rows.h"

namespace fused_tp::matmul {

struct Kernels {
  const char* isa;
  size_t (*packed_bytes)(const FewRowsProblem& problem);
  // Packs x as [depth / kStep][rows][kStep], the order in which `multiply` reads it.
  void (*pack)(const FewRowsProblem& problem, char* packed);
  // Computes columns [first, last) of y.
  void (*multiply)(const FewRowsProblem& problem, const char* packed, int64_t first, int64_t last);
};

#if FUSED_TP_X86
const Kernels& kernels_avx2(DType dtype);
const Kernels& kernels_avx512(DType dtype, bool bf16_products);
#endif

}  // namespace fused_tp::matmul

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
  // Computes columns [begin, end) of y.
  void (*multiply)(const FewRowsProblem& problem, const char* packed, int64_t begin, int64_t end);
};

#if FUSED_TP_X86
const Kernels& kernels_avx2(DType dtype);
const Kernels& kernels_avx512(DType dtype, bool has_bf16_products);
#endif

}  // namespace fused_tp::matmul

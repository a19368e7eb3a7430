// y = x w^T + bias for few rows of x: the matmul of a decoding step.
//
//   y[m][n] = sum_k x[m][k] w[n][k] + bias[n],   sums and bias in fp32
//
// The time is that of reading w once from memory. w is read in place; a library that packs w first reads it twice and
// writes it once.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace fused_tp::matmul {

constexpr int64_t kMaxRows = 32;

struct FewRowsProblem {
  const void* x;     // [rows, depth]
  int64_t x_row;     // elements between consecutive rows of x
  const void* w;     // [columns, depth]
  int64_t w_row;     // elements between consecutive rows of w
  const void* bias;  // [columns]; null: none
  void* y;           // [rows, columns], contiguous
  int64_t rows, columns, depth;
  DType dtype;  // of x, w, bias and y: fp32 or bf16
};

// Returns the instruction set of the kernels for this dtype, at most `isa` (if empty: FUSED_TP_ISA). Returns an empty
// string if there are no kernels.
const char* few_rows_isa(DType dtype, const char* isa);

// `rows` is at most kMaxRows. Results are bitwise identical for any number of threads.
void few_rows(const FewRowsProblem& problem, int threads, const char* isa);

}  // namespace fused_tp::matmul

// y = x w^T + bias for few rows of x: the matmul of a decoding step.
//
//   y[m][n] = sum_k x[m][k] w[n][k] + bias[n],   sums and bias in fp32
//
// It takes as long as reading w once. w is read in place: libraries that first reorder it read it, write it and read it
// again.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace fused_tp::matmul {

constexpr int64_t kMostRows = 16;

struct FewRows {
  const void* x;  // [rows, depth], rows x_row elements apart
  int64_t x_row;
  const void* w;  // [columns, depth], rows w_row elements apart
  int64_t w_row;
  const void* bias;  // [columns]; null: none
  void* y;           // [rows, columns], dense
  int64_t rows, columns, depth;
  DType dtype;  // of all: fp32 or bf16
};

// The instruction set of the kernels for this dtype, at most `isa`, or FUSED_TP_ISA if that is empty; empty if there
// are no kernels.
const char* few_rows_isa(DType dtype, const char* isa);

// `rows` is at most kMostRows. The result has the same bits for any number of threads.
void few_rows(const FewRows& problem, int threads, const char* isa);

}  // namespace fused_tp::matmul

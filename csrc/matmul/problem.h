// The operands of one matmul:
//
//   y[m][n] = sum_k x[m][k] w[n][k] + bias[n],   sums and bias in fp32
#pragma once

#include <cstdint>

#include "dtype.h"

namespace fused_tp::matmul {

constexpr int64_t kMaxFewRows = 32;  // of few_rows.h

struct Problem {
  const void* x;     // [rows, depth]
  int64_t x_row;     // elements between consecutive rows of x
  const void* w;     // [columns, depth], or packed (packed.h)
  int64_t w_row;     // elements between consecutive rows, or panels, of w
  const void* bias;  // [columns]; null: none
  void* y;           // [rows, columns], contiguous
  int64_t rows, columns, depth;
  DType dtype;  // of x, w, bias and y: fp32 or bf16
};

}  // namespace fused_tp::matmul

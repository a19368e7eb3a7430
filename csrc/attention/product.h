// C = A B or C += A B: the matrix product for all steps of attention.
//
//   A  [rows][K]                     `rows` is a multiple of L::kRows
//   B  [K / kPair][lanes][kPair]     kPair consecutive rows are interleaved: one multiply-add consumes them per lane
//   C  [rows][lanes]                 in the type of the sums
//
// A tile of kRows x kVectors vectors of C stays in registers.
#pragma once

#include <cstdint>

#include "unroll.h"

namespace fused_tp::attention {
namespace {

template <class L, int kVectors, bool kAdd>
inline void multiply_tile(const typename L::Operand* a, int64_t a_row, const typename L::Operand* b, int64_t b_step,
                          int64_t steps, typename L::Real* c, int64_t c_row) {
  typename L::Vector sums[L::kRows][kVectors];
  FUSED_TP_UNROLL
  for (int r = 0; r < L::kRows; ++r) {
    FUSED_TP_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = kAdd ? L::load(c + r * c_row + v * L::kWidth) : L::zero();
  }
  int64_t s = 0;
  do {  // not `for`: if the loop could run zero times, GCC would copy all sums
    typename L::Operands b_vectors[kVectors];
    FUSED_TP_UNROLL
    for (int v = 0; v < kVectors; ++v) b_vectors[v] = L::load_operand(b + s * b_step + v * L::kWidth * L::kPair);
    FUSED_TP_UNROLL
    for (int r = 0; r < L::kRows; ++r) {
      const typename L::Operands a_value = L::broadcast_operand(a + r * a_row + s * L::kPair);
      FUSED_TP_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = L::multiply_add(a_value, b_vectors[v], sums[r][v]);
    }
  } while (++s < steps);
  FUSED_TP_UNROLL
  for (int r = 0; r < L::kRows; ++r) {
    FUSED_TP_UNROLL
    for (int v = 0; v < kVectors; ++v) L::store(c + r * c_row + v * L::kWidth, sums[r][v]);
  }
}

template <class L, int kVectors, bool kAdd>
inline void multiply_strip(const typename L::Operand* a, int64_t a_row, int64_t rows, const typename L::Operand* b,
                           int64_t b_step, int64_t steps, typename L::Real* c, int64_t c_row) {
  for (int64_t r = 0; r < rows; r += L::kRows)
    multiply_tile<L, kVectors, kAdd>(a + r * a_row, a_row, b, b_step, steps, c + r * c_row, c_row);
}

// `lanes` is a multiple of L::kWidth. b_step: elements between consecutive steps (kPair rows) of B.
template <class L, bool kAdd>
void multiply(const typename L::Operand* a, int64_t a_row, int64_t rows, const typename L::Operand* b, int64_t b_step,
              int64_t lanes, int64_t steps, typename L::Real* c, int64_t c_row) {
  for (int64_t remaining_vectors = lanes / L::kWidth; remaining_vectors > 0;) {
    const int64_t strip_vectors = remaining_vectors == 3 || remaining_vectors > 4 ? 3 : remaining_vectors == 1 ? 1 : 2;
    if (strip_vectors == 3) {
      multiply_strip<L, 3, kAdd>(a, a_row, rows, b, b_step, steps, c, c_row);
    } else if (strip_vectors == 2) {
      multiply_strip<L, 2, kAdd>(a, a_row, rows, b, b_step, steps, c, c_row);
    } else {
      multiply_strip<L, 1, kAdd>(a, a_row, rows, b, b_step, steps, c, c_row);
    }
    remaining_vectors -= strip_vectors;
    b += strip_vectors * L::kWidth * L::kPair;
    c += strip_vectors * L::kWidth;
  }
}

}  // namespace
}  // namespace fused_tp::attention

// C (+)= A B, the only matrix product of attention.
//
// A: `rows` x K, row by row. B: K x lanes, kPair rows interleaved, so that one step of the product reads kPair elements
// per lane: B[k / kPair][lane][k % kPair]. C: rows x lanes in the type of the sums. `rows` is a multiple of kRows.
// A tile of kRows x kVectors vectors stays in registers; another unit (matrix tiles) would replace `tile`.
#pragma once

#include <cstdint>

#include "unroll.h"

namespace fused_tp::attention {
namespace {

template <class L, int kVectors, bool kAdd>
inline void tile(const typename L::Operand* a, int64_t a_row, const typename L::Operand* b, int64_t b_step,
                 int64_t steps, typename L::Real* c, int64_t c_row) {
  typename L::Vector sums[L::kRows][kVectors];
  FUSED_TP_UNROLL
  for (int r = 0; r < L::kRows; ++r) {
    FUSED_TP_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = kAdd ? L::load(c + r * c_row + v * L::kWidth) : L::zero();
  }
  int64_t s = 0;
  do {  // a loop that may run zero times costs copies of all sums
    typename L::Operands of_b[kVectors];
    FUSED_TP_UNROLL
    for (int v = 0; v < kVectors; ++v) of_b[v] = L::load_operand(b + s * b_step + v * L::kWidth * L::kPair);
    FUSED_TP_UNROLL
    for (int r = 0; r < L::kRows; ++r) {
      const typename L::Operands of_a = L::broadcast_operand(a + r * a_row + s * L::kPair);
      FUSED_TP_UNROLL
      for (int v = 0; v < kVectors; ++v) sums[r][v] = L::product(of_a, of_b[v], sums[r][v]);
    }
  } while (++s < steps);
  FUSED_TP_UNROLL
  for (int r = 0; r < L::kRows; ++r) {
    FUSED_TP_UNROLL
    for (int v = 0; v < kVectors; ++v) L::store(c + r * c_row + v * L::kWidth, sums[r][v]);
  }
}

template <class L, int kVectors, bool kAdd>
inline void column(const typename L::Operand* a, int64_t a_row, int64_t rows, const typename L::Operand* b,
                   int64_t b_step, int64_t steps, typename L::Real* c, int64_t c_row) {
  for (int64_t r = 0; r < rows; r += L::kRows)
    tile<L, kVectors, kAdd>(a + r * a_row, a_row, b, b_step, steps, c + r * c_row, c_row);
}

// `lanes` is a multiple of L::kWidth, b_step the distance of B's steps in elements.
template <class L, bool kAdd>
void multiply(const typename L::Operand* a, int64_t a_row, int64_t rows, const typename L::Operand* b, int64_t b_step,
              int64_t lanes, int64_t steps, typename L::Real* c, int64_t c_row) {
  for (int64_t left = lanes / L::kWidth; left > 0;) {
    const int64_t now = left == 3 || left > 4 ? 3 : left == 1 ? 1 : 2;
    if (now == 3) {
      column<L, 3, kAdd>(a, a_row, rows, b, b_step, steps, c, c_row);
    } else if (now == 2) {
      column<L, 2, kAdd>(a, a_row, rows, b, b_step, steps, c, c_row);
    } else {
      column<L, 1, kAdd>(a, a_row, rows, b, b_step, steps, c, c_row);
    }
    left -= now;
    b += now * L::kWidth * L::kPair;
    c += now * L::kWidth;
  }
}

}  // namespace
}  // namespace fused_tp::attention

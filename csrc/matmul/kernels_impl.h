// A tile of kRows x kColumns sums stays in registers. One step multiplies kStep elements of each row of x and w. A
// block of w (kColumns rows, kBlockBytes of each) stays in the L1 cache for all rows of x; meanwhile the next block is
// prefetched into the L2 cache. Not into L1, because rows of w are often a multiple of 4 KiB apart: their lines map to
// the same set and would evict each other.
//
// A Lanes type L defines:
//   kRows, kColumns                     size of the register tile
//   Element                             element type of x, w and y; to_float and from_float convert it
//   kStep                               elements of a row per step
//   XStep, WStep                        registers with one step of x or w
//   kXBytes                             bytes of one step of packed x
//   pack(from, to)                      packs kStep elements of x
//   load_x(packed), load_w(w)           load one step
//   multiply_add(x, w, sums), sum(sums) accumulate in fp32 lanes; sum adds the lanes
#pragma once

#include <algorithm>
#include <cstring>

#include "half.h"
#include "matmul/kernels.h"
#include "unroll.h"

namespace fused_tp::matmul {
namespace {

constexpr int64_t kBlockBytes = 4096;  // bytes of each row of w in a block

template <class L>
constexpr int64_t kBlockSteps = kBlockBytes / (L::kStep * static_cast<int64_t>(sizeof(typename L::Element)));

template <class L>
int64_t count_steps(const FewRowsProblem& problem) {
  return (problem.depth + L::kStep - 1) / L::kStep;
}

template <class L>
size_t packed_bytes(const FewRowsProblem& problem) {
  return static_cast<size_t>(problem.rows * count_steps<L>(problem)) * L::kXBytes;
}

template <class L>
void pack(const FewRowsProblem& problem, char* packed) {
  using Element = typename L::Element;
  const auto* const x = static_cast<const Element*>(problem.x);
  const int64_t full_steps = problem.depth / L::kStep, remainder = problem.depth % L::kStep;
  for (int64_t step = 0; step < full_steps; ++step)
    for (int64_t m = 0; m < problem.rows; ++m)
      L::pack(x + m * problem.x_row + step * L::kStep, packed + (step * problem.rows + m) * L::kXBytes);
  for (int64_t m = 0; remainder > 0 && m < problem.rows; ++m) {
    Element tail[L::kStep] = {};
    std::memcpy(tail, x + m * problem.x_row + full_steps * L::kStep, remainder * sizeof(Element));
    L::pack(tail, packed + (full_steps * problem.rows + m) * L::kXBytes);
  }
}

// Steps [begin, end) of kColumns rows of w; `w` points to the first of these rows.
template <class L>
struct WeightBlock {
  const typename L::Element* w;
  int64_t w_row, begin, end;
};

template <class L, int kRows, int kColumns>
inline void multiply_tile(const char* packed, int64_t rows, const WeightBlock<L>& current, const WeightBlock<L>& next,
                          bool is_first, typename L::Sums (*sums_in_memory)[kColumns]) {
  typename L::Sums sums[kRows][kColumns];
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums[m][n] = is_first ? L::zero() : sums_in_memory[m][n];
  }
  int64_t prefetched = next.begin;
  for (int64_t step = current.begin; step < current.end; ++step) {
    typename L::WStep w[kColumns];
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) w[n] = L::load_w(current.w + n * current.w_row + step * L::kStep);
    if (prefetched < next.end) {
      FUSED_TP_UNROLL
      for (int n = 0; n < kColumns; ++n) __builtin_prefetch(next.w + n * next.w_row + prefetched * L::kStep, 0, 2);
      ++prefetched;
    }
    FUSED_TP_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const typename L::XStep x = L::load_x(packed + (step * rows + m) * L::kXBytes);
      FUSED_TP_UNROLL
      for (int n = 0; n < kColumns; ++n) sums[m][n] = L::multiply_add(x, w[n], sums[m][n]);
    }
  }
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums_in_memory[m][n] = sums[m][n];
  }
}

// Adds the products of one block of w and all rows of x to `sums`. Each tile prefetches an equal part of the next
// block.
template <class L, int kColumns>
void multiply_block(const char* packed, int64_t rows, const WeightBlock<L>& current, const WeightBlock<L>& next,
                    typename L::Sums (*sums)[kColumns], bool is_first) {
  const int64_t tiles = rows / L::kRows + rows % L::kRows;
  const int64_t steps_per_tile = (next.end - next.begin + tiles - 1) / tiles;
  int64_t m = 0;
  for (WeightBlock<L> prefetch{next.w, next.w_row, next.begin, 0}; m < rows; prefetch.begin = prefetch.end) {
    prefetch.end = std::min(prefetch.begin + steps_per_tile, next.end);
    if (m + L::kRows <= rows) {
      multiply_tile<L, L::kRows, kColumns>(packed + m * L::kXBytes, rows, current, prefetch, is_first, sums + m);
      m += L::kRows;
    } else {
      multiply_tile<L, 1, kColumns>(packed + m * L::kXBytes, rows, current, prefetch, is_first, sums + m);
      m += 1;
    }
  }
}

template <class L, int kColumns>
void multiply_columns(const FewRowsProblem& problem, const char* packed, int64_t begin, int64_t end) {
  using Element = typename L::Element;
  const auto* const w = static_cast<const Element*>(problem.w);
  const auto* const bias = static_cast<const Element*>(problem.bias);
  auto* const y = static_cast<Element*>(problem.y);
  const int64_t rows = problem.rows, w_row = problem.w_row;
  const int64_t full_steps = problem.depth / L::kStep, remainder = problem.depth % L::kStep;
  typename L::Sums sums[kMaxRows][kColumns];
  for (int64_t n = begin; n < end; n += kColumns) {
    const WeightBlock<L> next_rows{w + std::min(n + kColumns, end - kColumns) * w_row, w_row, 0,
                                   std::min(full_steps, kBlockSteps<L>)};
    for (int64_t step = 0; step < full_steps; step += kBlockSteps<L>) {
      const int64_t end_step = std::min(step + kBlockSteps<L>, full_steps);
      const WeightBlock<L> current{w + n * w_row, w_row, step, end_step};
      const WeightBlock<L> next_in_row{current.w, w_row, end_step, std::min(end_step + kBlockSteps<L>, full_steps)};
      multiply_block<L, kColumns>(packed, rows, current, end_step < full_steps ? next_in_row : next_rows, sums,
                                  step == 0);
    }
    if (remainder > 0) {  // fewer than kStep elements remain: multiply a copy padded with zeros
      Element tail[kColumns][L::kStep] = {};
      for (int i = 0; i < kColumns; ++i)
        std::memcpy(tail[i], w + (n + i) * w_row + full_steps * L::kStep, remainder * sizeof(Element));
      const char* const packed_tail = packed + full_steps * rows * L::kXBytes;
      multiply_block<L, kColumns>(packed_tail, rows, {tail[0], L::kStep, 0, 1}, {tail[0], L::kStep, 0, 0}, sums,
                                  full_steps == 0);
    }
    for (int64_t m = 0; m < rows; ++m)
      for (int i = 0; i < kColumns; ++i) {
        const float sum = L::sum(sums[m][i]);
        y[m * problem.columns + n + i] = L::from_float(bias == nullptr ? sum : sum + L::to_float(bias[n + i]));
      }
  }
}

template <class L>
void multiply(const FewRowsProblem& problem, const char* packed, int64_t begin, int64_t end) {
  const int64_t tiled_end = begin + (end - begin) / L::kColumns * L::kColumns;
  multiply_columns<L, L::kColumns>(problem, packed, begin, tiled_end);
  multiply_columns<L, 1>(problem, packed, tiled_end, end);
}

template <class L>
constexpr Kernels make_kernels(const char* isa) {
  return Kernels{isa, packed_bytes<L>, pack<L>, multiply<L>};
}

struct Fp32Elements {
  using Element = float;
  static float to_float(float x) { return x; }
  static float from_float(float x) { return x; }
};

struct Bf16Elements {
  using Element = uint16_t;
  static float to_float(uint16_t x) { return bf16_to_f32(x); }
  static uint16_t from_float(float x) { return f32_to_bf16(x); }
};

}  // namespace
}  // namespace fused_tp::matmul

// A tile of L::kRows x L::kColumns sums stays in registers while both operands are read: one step takes L::kStep
// elements of each row. Steps form blocks whose rows of w stay in the L1 cache for all rows of x; meanwhile the next
// block is prefetched into the L2 cache. (Not into L1: rows of w are often a multiple of 4 KiB apart, and would evict
// each other there.)
//
// A `Lanes` defines its products:
//   Element            of x, w and y
//   kStep              elements of a row in one step
//   XStep, WStep       these in registers; an XStep of packed x is kXBytes of memory
//   pack(from, to)     makes an XStep of kStep elements
//   load_x, load_w, product(x, w, sums), sum(sums)
//   to_float, from_float
#pragma once

#include <algorithm>
#include <cstring>

#include "half.h"
#include "matmul/kernels.h"
#include "unroll.h"

namespace fused_tp::matmul {
namespace {

constexpr int64_t kBlockBytes = 4096;  // of one row of w

template <class L>
constexpr int64_t kBlockSteps = kBlockBytes / (L::kStep * static_cast<int64_t>(sizeof(typename L::Element)));

template <class L>
int64_t steps_of(const FewRows& problem) {
  return (problem.depth + L::kStep - 1) / L::kStep;
}

template <class L>
size_t packed_bytes(const FewRows& problem) {
  return static_cast<size_t>(problem.rows * steps_of<L>(problem)) * L::kXBytes;
}

template <class L>
void pack(const FewRows& problem, char* packed) {
  using Element = typename L::Element;
  const auto* const x = static_cast<const Element*>(problem.x);
  const int64_t whole = problem.depth / L::kStep, rest = problem.depth % L::kStep;
  for (int64_t step = 0; step < whole; ++step)
    for (int64_t m = 0; m < problem.rows; ++m)
      L::pack(x + m * problem.x_row + step * L::kStep, packed + (step * problem.rows + m) * L::kXBytes);
  for (int64_t m = 0; rest > 0 && m < problem.rows; ++m) {
    Element last[L::kStep] = {};
    std::memcpy(last, x + m * problem.x_row + whole * L::kStep, rest * sizeof(Element));
    L::pack(last, packed + (whole * problem.rows + m) * L::kXBytes);
  }
}

// Steps of all rows of w that belong to a tile.
template <class L>
struct Steps {
  const typename L::Element* w;
  int64_t w_row, first, last;
};

template <class L, int kRows, int kColumns>
inline void tile(const char* packed, int64_t rows, const Steps<L>& now, const Steps<L>& next, bool begins,
                 typename L::Sums (*kept)[kColumns]) {
  typename L::Sums sums[kRows][kColumns];
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums[m][n] = begins ? L::zero() : kept[m][n];
  }
  int64_t fetched = next.first;
  for (int64_t step = now.first; step < now.last; ++step) {
    typename L::WStep w[kColumns];
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) w[n] = L::load_w(now.w + n * now.w_row + step * L::kStep);
    if (fetched < next.last) {
      FUSED_TP_UNROLL
      for (int n = 0; n < kColumns; ++n) __builtin_prefetch(next.w + n * next.w_row + fetched * L::kStep, 0, 2);
      ++fetched;
    }
    FUSED_TP_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const typename L::XStep x = L::load_x(packed + (step * rows + m) * L::kXBytes);
      FUSED_TP_UNROLL
      for (int n = 0; n < kColumns; ++n) sums[m][n] = L::product(x, w[n], sums[m][n]);
    }
  }
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) kept[m][n] = sums[m][n];
  }
}

// Computes one block of steps for all rows of x; each tile prefetches its part of the next block.
template <class L, int kColumns>
void block(const char* packed, int64_t rows, const Steps<L>& now, const Steps<L>& next,
           typename L::Sums (*sums)[kColumns], bool begins) {
  const int64_t tiles = rows / L::kRows + rows % L::kRows;
  const int64_t part = (next.last - next.first + tiles - 1) / tiles;
  int64_t m = 0;
  for (Steps<L> fetch{next.w, next.w_row, next.first, 0}; m < rows; fetch.first = fetch.last) {
    fetch.last = std::min(fetch.first + part, next.last);
    if (m + L::kRows <= rows) {
      tile<L, L::kRows, kColumns>(packed + m * L::kXBytes, rows, now, fetch, begins, sums + m);
      m += L::kRows;
    } else {
      tile<L, 1, kColumns>(packed + m * L::kXBytes, rows, now, fetch, begins, sums + m);
      m += 1;
    }
  }
}

template <class L, int kColumns>
void columns(const FewRows& problem, const char* packed, int64_t first, int64_t last) {
  using Element = typename L::Element;
  const auto* const w = static_cast<const Element*>(problem.w);
  const auto* const bias = static_cast<const Element*>(problem.bias);
  auto* const y = static_cast<Element*>(problem.y);
  const int64_t rows = problem.rows, w_row = problem.w_row;
  const int64_t whole = problem.depth / L::kStep, rest = problem.depth % L::kStep;
  typename L::Sums sums[kMostRows][kColumns];
  for (int64_t n = first; n < last; n += kColumns) {
    const Steps<L> following{w + std::min(n + kColumns, last - kColumns) * w_row, w_row, 0,
                             std::min(whole, kBlockSteps<L>)};
    for (int64_t step = 0; step < whole; step += kBlockSteps<L>) {
      const int64_t end = std::min(step + kBlockSteps<L>, whole);
      const Steps<L> now{w + n * w_row, w_row, step, end};
      const Steps<L> later{now.w, w_row, end, std::min(end + kBlockSteps<L>, whole)};
      block<L, kColumns>(packed, rows, now, end < whole ? later : following, sums, step == 0);
    }
    if (rest > 0) {  // a last step, padded with zeros
      Element end[kColumns][L::kStep] = {};
      for (int i = 0; i < kColumns; ++i)
        std::memcpy(end[i], w + (n + i) * w_row + whole * L::kStep, rest * sizeof(Element));
      const char* const packed_end = packed + whole * rows * L::kXBytes;
      block<L, kColumns>(packed_end, rows, {end[0], L::kStep, 0, 1}, {end[0], L::kStep, 0, 0}, sums, whole == 0);
    }
    for (int64_t m = 0; m < rows; ++m)
      for (int i = 0; i < kColumns; ++i) {
        const float sum = L::sum(sums[m][i]);
        y[m * problem.columns + n + i] = L::from_float(bias == nullptr ? sum : sum + L::to_float(bias[n + i]));
      }
  }
}

template <class L>
void multiply(const FewRows& problem, const char* packed, int64_t first, int64_t last) {
  const int64_t whole = first + (last - first) / L::kColumns * L::kColumns;
  columns<L, L::kColumns>(problem, packed, first, whole);
  columns<L, 1>(problem, packed, whole, last);
}

template <class L>
constexpr Kernels make_kernels(const char* isa) {
  return Kernels{isa, packed_bytes<L>, pack<L>, multiply<L>};
}

struct SingleElements {
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

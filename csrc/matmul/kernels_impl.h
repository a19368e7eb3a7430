// A tile of up to kRows x kColumns sums stays in registers. One step multiplies kStep elements of each row of x and w.
// A block of w (kColumns rows, kBlockBytes of each) stays in the L1 cache for all tiles of rows. The rows of x are
// divided evenly among tiles: 5 rows are 3 + 2, not 4 + 1, because a tile of one row loads seven vectors for six
// products.
//
// Meanwhile the next block is prefetched at an even rate, about one cache line per row of x and step: a core has few
// buffers for lines that are on their way (24 on Zen 4), and a burst of prefetches leaves none for the loads of the
// current block. Up to kMaxMemoryBoundRows rows, lines are prefetched into the L2 cache only: there the hardware's own
// prefetcher runs ahead, which is faster. With more rows, products take longer than memory, and lines are prefetched
// into the L1 cache.
//
// Each element of y is one chain of sums over depth, then one fixed tree over the lanes: its bits depend on neither the
// other rows and columns nor the tile that computes it.
//
// A Lanes type L defines:
//   kRows, kColumns                     largest register tile
//   Element                             element type of x, w and y; to_float and from_float convert it
//   kStep                               elements of a row per step
//   XStep, WStep                        registers with one step of x or w
//   kXBytes                             bytes of one step of packed x
//   pack(from, to)                      packs kStep elements of x
//   load_x(packed), load_w(w)           load one step
//   multiply_add(x, w, sums)            accumulates in fp32 lanes
//   kReduced, reduce(sums, to)          adds the lanes of each of kReduced sums
#pragma once

#include <algorithm>
#include <cstring>

#include "half.h"
#include "matmul/kernels.h"
#include "unroll.h"

namespace fused_tp::matmul {
namespace {

constexpr int64_t kBlockBytes = 8192;  // bytes of each row of w in a block
constexpr int64_t kMaxMemoryBoundRows = 12;

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

// Calls tile(first row, rows) for each tile of rows.
template <class L, class Tile>
inline void for_each_tile(int64_t rows, const Tile& tile) {
  const int64_t tiles = (rows + L::kRows - 1) / L::kRows;
  for (int64_t i = 0, m = 0; i < tiles; ++i) {
    const int64_t tile_rows = rows / tiles + (i < rows % tiles);
    tile(m, tile_rows);
    m += tile_rows;
  }
}

template <class L>
void pack(const FewRowsProblem& problem, char* packed) {
  using Element = typename L::Element;
  const auto* const x = static_cast<const Element*>(problem.x);
  const int64_t full_steps = problem.depth / L::kStep, remainder = problem.depth % L::kStep;
  for_each_tile<L>(problem.rows, [&](int64_t first, int64_t rows) {
    for (int64_t m = first; m < first + rows; ++m) {
      const Element* const row = x + m * problem.x_row;
      char* to = packed + (first * count_steps<L>(problem) + m - first) * L::kXBytes;
      for (int64_t step = 0; step < full_steps; ++step, to += rows * L::kXBytes) L::pack(row + step * L::kStep, to);
      if (remainder == 0) continue;
      Element tail[L::kStep] = {};
      std::memcpy(tail, row + full_steps * L::kStep, remainder * sizeof(Element));
      L::pack(tail, to);
    }
  });
}

// Steps [begin, end) of kColumns rows of w; `w` points to the first of these rows.
template <class L>
struct WeightBlock {
  const typename L::Element* w;
  int64_t w_row, begin, end;
};

// Prefetches a block of w: the same step of all rows of w, then the next step. Each call of prefetch adds
// kColumns / calls_per_step lines to those that are due.
template <class L, int kColumns, int kLocality>
class Prefetcher {
 public:
  Prefetcher(const WeightBlock<L>& block, int64_t calls_per_step)
      : at_(block.w + block.begin * L::kStep),
        w_row_(block.w_row),
        left_((block.end - block.begin) * kColumns),
        calls_per_step_(calls_per_step) {}

  void prefetch() {
    for (credit_ += kColumns; credit_ >= calls_per_step_; credit_ -= calls_per_step_) {
      if (left_ == 0) return;
      --left_;
      __builtin_prefetch(at_, 0, kLocality);
      at_ += w_row_;
      if (++column_ < kColumns) continue;
      column_ = 0;
      at_ += L::kStep - kColumns * w_row_;
    }
  }

 private:
  const typename L::Element* at_;
  int64_t w_row_, left_, calls_per_step_, credit_ = 0;
  int column_ = 0;
};

// `packed` points to the first step of these rows of x.
template <class L, int kRows, int kColumns, int kLocality>
inline void multiply_tile(const char* packed, const WeightBlock<L>& block, Prefetcher<L, kColumns, kLocality>& next,
                          bool is_first, typename L::Sums (*sums_in_memory)[kColumns]) {
  typename L::Sums sums[kRows][kColumns];
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums[m][n] = is_first ? L::zero() : sums_in_memory[m][n];
  }
  packed += block.begin * kRows * L::kXBytes;
  Prefetcher<L, kColumns, kLocality> prefetcher = next;
  for (int64_t step = block.begin; step < block.end; ++step, packed += kRows * L::kXBytes) {
    typename L::WStep w[kColumns];
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) w[n] = L::load_w(block.w + n * block.w_row + step * L::kStep);
    FUSED_TP_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const typename L::XStep x = L::load_x(packed + m * L::kXBytes);
      FUSED_TP_UNROLL
      for (int n = 0; n < kColumns; ++n) sums[m][n] = L::multiply_add(x, w[n], sums[m][n]);
      prefetcher.prefetch();
    }
  }
  next = prefetcher;
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums_in_memory[m][n] = sums[m][n];
  }
}

// Adds the products of one block of w and all rows of x to `sums`, and prefetches `next`. `packed` has `steps` steps of
// each row.
template <class L, int kColumns, int kLocality>
void multiply_block(const char* packed, int64_t rows, int64_t steps, const WeightBlock<L>& block,
                    const WeightBlock<L>& next, typename L::Sums (*sums)[kColumns], bool is_first) {
  static_assert(L::kRows == 2 || L::kRows == 4);
  Prefetcher<L, kColumns, kLocality> prefetcher(next, rows);
  for_each_tile<L>(rows, [&](int64_t m, int64_t tile_rows) {
    const char* const x = packed + m * steps * L::kXBytes;
    if (tile_rows == 1) multiply_tile<L, 1, kColumns, kLocality>(x, block, prefetcher, is_first, sums + m);
    if (tile_rows == 2) multiply_tile<L, 2, kColumns, kLocality>(x, block, prefetcher, is_first, sums + m);
    if constexpr (L::kRows == 4) {
      if (tile_rows == 3) multiply_tile<L, 3, kColumns, kLocality>(x, block, prefetcher, is_first, sums + m);
      if (tile_rows == 4) multiply_tile<L, 4, kColumns, kLocality>(x, block, prefetcher, is_first, sums + m);
    }
  });
}

template <class L, int kColumns, int kLocality>
void multiply_columns(const FewRowsProblem& problem, const char* packed, int64_t begin, int64_t end) {
  using Element = typename L::Element;
  const auto* const w = static_cast<const Element*>(problem.w);
  const auto* const bias = static_cast<const Element*>(problem.bias);
  auto* const y = static_cast<Element*>(problem.y);
  const int64_t rows = problem.rows, w_row = problem.w_row;
  const int64_t full_steps = problem.depth / L::kStep, remainder = problem.depth % L::kStep;
  constexpr int64_t kReducedRows = (kMaxRows * kColumns + L::kReduced - 1) / L::kReduced * L::kReduced;
  typename L::Sums sums[kReducedRows];
  alignas(64) float reduced[kReducedRows];
  auto* const tiles = reinterpret_cast<typename L::Sums(*)[kColumns]>(sums);
  const int64_t groups = (rows * kColumns + L::kReduced - 1) / L::kReduced;
  for (int64_t i = rows * kColumns; i < groups * L::kReduced; ++i) sums[i] = L::zero();
  for (int64_t n = begin; n < end; n += kColumns) {
    const WeightBlock<L> next_rows{w + std::min(n + kColumns, end - kColumns) * w_row, w_row, 0,
                                   std::min(full_steps, kBlockSteps<L>)};
    for (int64_t step = 0; step < full_steps; step += kBlockSteps<L>) {
      const int64_t end_step = std::min(step + kBlockSteps<L>, full_steps);
      const WeightBlock<L> current{w + n * w_row, w_row, step, end_step};
      const WeightBlock<L> next_in_row{current.w, w_row, end_step, std::min(end_step + kBlockSteps<L>, full_steps)};
      multiply_block<L, kColumns, kLocality>(packed, rows, count_steps<L>(problem), current,
                                             end_step < full_steps ? next_in_row : next_rows, tiles, step == 0);
    }
    if (remainder > 0) {  // fewer than kStep elements remain: multiply a copy padded with zeros
      Element tail[kColumns][L::kStep] = {};
      for (int i = 0; i < kColumns; ++i)
        std::memcpy(tail[i], w + (n + i) * w_row + full_steps * L::kStep, remainder * sizeof(Element));
      const WeightBlock<L> padded{tail[0] - full_steps * L::kStep, L::kStep, full_steps, full_steps + 1};
      multiply_block<L, kColumns, kLocality>(packed, rows, count_steps<L>(problem), padded, {tail[0], L::kStep, 0, 0},
                                             tiles, full_steps == 0);
    }
    for (int64_t i = 0; i < groups; ++i) L::reduce(sums + i * L::kReduced, reduced + i * L::kReduced);
    for (int64_t m = 0; m < rows; ++m)
      for (int i = 0; i < kColumns; ++i) {
        const float sum = reduced[m * kColumns + i];
        y[m * problem.columns + n + i] = L::from_float(bias == nullptr ? sum : sum + L::to_float(bias[n + i]));
      }
  }
}

template <class L>
void multiply(const FewRowsProblem& problem, const char* packed, int64_t begin, int64_t end) {
  constexpr int kL1 = 3, kL2 = 2;  // localities of __builtin_prefetch
  const int64_t tiled_end = begin + (end - begin) / L::kColumns * L::kColumns;
  if (problem.rows <= kMaxMemoryBoundRows)
    multiply_columns<L, L::kColumns, kL2>(problem, packed, begin, tiled_end);
  else
    multiply_columns<L, L::kColumns, kL1>(problem, packed, begin, tiled_end);
  multiply_columns<L, 1, kL2>(problem, packed, tiled_end, end);
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

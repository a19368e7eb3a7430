// The matmul kernels, over weights as they are and packed weights (packed.h).
//
// A tile of up to kRows x kColumns sums stays in registers. One step multiplies kDepth elements of each row of x by
// kColumns rows of w; a row of a packed weight is a panel of kWidth columns. A block of w (kColumns rows, kBlockBytes
// of each) is multiplied by all tiles of rows before the next. The rows of x are divided evenly among tiles: 5 rows are
// 3 + 2, not 4 + 1, because a tile of one row loads seven vectors for six products.
//
// Meanwhile the next block is prefetched, at an even rate: a core has few buffers for lines that are on their way (24
// on Zen 4), and a burst of prefetches leaves none for the loads of the current block. Up to kMemoryBoundRows rows of
// x, reading w takes longer than the products. Rows of w are then prefetched into the L2 cache only, because the
// hardware's own prefetcher does the rest. Panels are long runs of memory: each step prefetches what kStepsAhead steps
// later load.
//
// Each element of y is one chain of sums over depth, then (unless w is packed) one fixed tree over the lanes: its bits
// depend on neither the other rows and columns nor the tile that computes it.
//
// A Lanes type L defines:
//   kRows, kColumns                     largest register tile
//   kMaxRows                            rows of x for which sums are in memory at a time
//   kMemoryBoundRows                    rows of x up to which reading w takes longer than the products
//   Element                             element type of x, w and y
//   round(sums, bias, count, y)         y[i] = sums[i] + bias[i], rounded once; bias may be null
//   kDepth, kStep                       elements of a row of x and of w per step
//   kWidth                              columns of y per row of w: 1, or the width of a panel
//   kBlockBytes                         bytes of a row of w in a block
//   XStep, WStep                        registers with one step of x or w
//   kXBytes                             bytes of one step of packed x
//   pack(from, to)                      packs kDepth elements of x
//   load_x(packed), load_w(w)           load one step
//   multiply_add(x, w, sums)            accumulates in fp32 lanes
//   kReduced, reduce(sums, to)          if kWidth is 1: adds the lanes of each of kReduced sums
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "half.h"
#include "matmul/kernels.h"
#include "unroll.h"

namespace fused_tp::matmul {
namespace {

constexpr int64_t kStepsAhead = 48;

template <class L>
constexpr int64_t kBlockSteps = L::kBlockBytes / (L::kStep * static_cast<int64_t>(sizeof(typename L::Element)));

template <class L>
int64_t count_steps(const Problem& problem) {
  return (problem.depth + L::kDepth - 1) / L::kDepth;
}

// True if the kernels read x as it is.
template <class L>
constexpr bool kReadsX = L::kWidth > 1 && L::kXBytes == L::kDepth * sizeof(typename L::Element);

template <class L>
size_t packed_bytes(const Problem& problem) {
  return kReadsX<L> ? 0 : static_cast<size_t>(problem.rows * count_steps<L>(problem)) * L::kXBytes;
}

// x, packed or as it is. The steps of a tile of rows are consecutive if w is not packed: [tile][step][row of the tile].
// Otherwise those of a row are, because then only a few bytes of each row are read per step.
template <class L>
struct XView {
  const char* data;
  int64_t row_bytes;

  XView rows_from(int64_t m) const { return {data + m * row_bytes, row_bytes}; }
  static constexpr int64_t step_bytes(int64_t tile_rows) { return L::kWidth > 1 ? L::kXBytes : tile_rows * L::kXBytes; }
  int64_t bytes_between_rows() const { return L::kWidth > 1 ? row_bytes : L::kXBytes; }
};

template <class L>
XView<L> view_x(const Problem& problem, const char* packed) {
  if (kReadsX<L>)
    return {static_cast<const char*>(problem.x), problem.x_row * static_cast<int64_t>(sizeof(typename L::Element))};
  return {packed, count_steps<L>(problem) * L::kXBytes};
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
void pack(const Problem& problem, int64_t begin, char* packed) {
  using Element = typename L::Element;
  const auto* const x = static_cast<const Element*>(problem.x) + begin * problem.x_row;
  const int64_t full_steps = problem.depth / L::kDepth, remainder = problem.depth % L::kDepth;
  const XView<L> view = view_x<L>(problem, packed).rows_from(begin);
  for_each_tile<L>(std::min<int64_t>(problem.rows - begin, L::kMaxRows), [&](int64_t first, int64_t rows) {
    for (int64_t m = first; m < first + rows; ++m) {
      const Element* const row = x + m * problem.x_row;
      char* to = packed + (view.rows_from(first).data - packed) + (m - first) * view.bytes_between_rows();
      for (int64_t step = 0; step < full_steps; ++step, to += view.step_bytes(rows))
        L::pack(row + step * L::kDepth, to);
      if (remainder == 0) continue;
      Element tail[L::kDepth] = {};
      std::memcpy(tail, row + full_steps * L::kDepth, remainder * sizeof(Element));
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

// Prefetches rows of a block of w: a line of each row, then the next lines. Each row of a tile adds kColumns / rows
// lines to those that are due, for `rows` rows of x.
template <class L, int kColumns, bool kIsMemoryBound>
class RowPrefetcher {
 public:
  RowPrefetcher(const WeightBlock<L>& block, int64_t rows)
      : at_(block.w + block.begin * L::kStep),
        w_row_(block.w_row),
        left_((block.end - block.begin) * kColumns),
        rows_(rows) {}

  FUSED_TP_INLINE void begin_step(const typename L::Element*, int64_t) {}

  FUSED_TP_INLINE void add_row() {
    for (due_ += kColumns; due_ >= rows_; due_ -= rows_) {
      if (left_ == 0) return;
      --left_;
      __builtin_prefetch(at_, 0, kIsMemoryBound ? 2 : 3);
      at_ += w_row_;
      if (++column_ < kColumns) continue;
      column_ = 0;
      at_ += L::kStep - kColumns * w_row_;
    }
  }

 private:
  const typename L::Element* at_;
  int64_t w_row_, left_, rows_, due_ = 0;
  int column_ = 0;
};

// Prefetches panels: those that a tile reads, ahead, or of the next block a step for each step of all tiles.
template <class L, int kColumns, bool kIsMemoryBound>
class PanelPrefetcher {
 public:
  PanelPrefetcher(const WeightBlock<L>& block, int64_t rows)
      : at_(block.w + block.begin * L::kStep), end_(block.w + block.end * L::kStep), w_row_(block.w_row), rows_(rows) {}

  // Called before each step of a tile, which loads its part of w from `w` on.
  FUSED_TP_INLINE void begin_step(const typename L::Element* w, int64_t tile_rows) {
    if constexpr (kIsMemoryBound) {
      prefetch(w + kStepsAhead * L::kStep);
    } else {
      done_rows_ += tile_rows;
      if (done_rows_ < rows_) return;
      done_rows_ -= rows_;
      if (at_ == end_) return;
      prefetch(at_);
      at_ += L::kStep;
    }
  }

  FUSED_TP_INLINE void add_row() {}

 private:
  FUSED_TP_INLINE void prefetch(const typename L::Element* w) const {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) __builtin_prefetch(w + n * w_row_);
  }

  const typename L::Element *at_, *end_;
  int64_t w_row_, rows_, done_rows_ = 0;
};

template <class L, int kColumns, bool kIsMemoryBound>
using Prefetcher = std::conditional_t<(L::kWidth > 1), PanelPrefetcher<L, kColumns, kIsMemoryBound>,
                                      RowPrefetcher<L, kColumns, kIsMemoryBound>>;

template <class L, int kRows, int kColumns, bool kIsMemoryBound>
inline void multiply_tile(const XView<L>& x_rows, const WeightBlock<L>& block,
                          Prefetcher<L, kColumns, kIsMemoryBound>& next, bool is_first,
                          typename L::Sums (*sums_in_memory)[kColumns]) {
  typename L::Sums sums[kRows][kColumns];
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums[m][n] = is_first ? L::zero() : sums_in_memory[m][n];
  }
  constexpr int64_t kStepBytes = XView<L>::step_bytes(kRows);
  const int64_t bytes_between_rows = x_rows.bytes_between_rows();
  const char* from = x_rows.data + block.begin * kStepBytes;
  Prefetcher<L, kColumns, kIsMemoryBound> prefetcher = next;  // a copy in registers
  for (int64_t step = block.begin; step < block.end; ++step, from += kStepBytes) {
    typename L::WStep w[kColumns];
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) w[n] = L::load_w(block.w + n * block.w_row + step * L::kStep);
    prefetcher.begin_step(block.w + step * L::kStep, kRows);
    FUSED_TP_UNROLL
    for (int m = 0; m < kRows; ++m) {
      const typename L::XStep x = L::load_x(from + m * bytes_between_rows);
      FUSED_TP_UNROLL
      for (int n = 0; n < kColumns; ++n) sums[m][n] = L::multiply_add(x, w[n], sums[m][n]);
      prefetcher.add_row();
    }
  }
  next = prefetcher;
  FUSED_TP_UNROLL
  for (int m = 0; m < kRows; ++m) {
    FUSED_TP_UNROLL
    for (int n = 0; n < kColumns; ++n) sums_in_memory[m][n] = sums[m][n];
  }
}

// Calls multiply_tile for a tile of `rows` rows, at most kRows.
template <class L, int kRows, int kColumns, bool kIsMemoryBound>
inline void multiply_tile_of(int64_t rows, const XView<L>& x, const WeightBlock<L>& block,
                             Prefetcher<L, kColumns, kIsMemoryBound>& next, bool is_first,
                             typename L::Sums (*sums)[kColumns]) {
  if (rows == kRows) {
    multiply_tile<L, kRows, kColumns, kIsMemoryBound>(x, block, next, is_first, sums);
  } else if constexpr (kRows > 1) {
    multiply_tile_of<L, kRows - 1, kColumns, kIsMemoryBound>(rows, x, block, next, is_first, sums);
  }
}

// Adds the products of one block of w and `rows` rows of x to `sums`, and prefetches `next`.
template <class L, int kColumns, bool kIsMemoryBound>
void multiply_block(const XView<L>& x, int64_t rows, const WeightBlock<L>& block, const WeightBlock<L>& next,
                    typename L::Sums (*sums)[kColumns], bool is_first) {
  Prefetcher<L, kColumns, kIsMemoryBound> prefetcher(next, rows);
  for_each_tile<L>(rows, [&](int64_t m, int64_t tile_rows) {
    multiply_tile_of<L, L::kRows, kColumns, kIsMemoryBound>(tile_rows, x.rows_from(m), block, prefetcher, is_first,
                                                            sums + m);
  });
}

// Calls use(m, sums of all columns of row m) for each row.
template <class L, int kColumns, class Use>
inline void for_each_row_of_sums(const typename L::Sums (*sums)[kColumns], int64_t rows, const Use& use) {
  if constexpr (L::kWidth > 1) {
    for (int64_t m = 0; m < rows; ++m) use(m, reinterpret_cast<const float*>(sums[m]));
  } else {
    constexpr int64_t kFloats = (L::kMaxRows * kColumns + L::kReduced - 1) / L::kReduced * L::kReduced;
    alignas(64) float reduced[kFloats];
    const auto* const flat = sums[0];
    const int64_t count = rows * kColumns;
    int64_t i = 0;
    for (; i + L::kReduced <= count; i += L::kReduced) L::reduce(flat + i, reduced + i);
    if (i < count) {
      typename L::Sums last[L::kReduced];
      for (int64_t j = 0; j < L::kReduced; ++j) last[j] = i + j < count ? flat[i + j] : L::zero();
      L::reduce(last, reduced + i);
    }
    for (int64_t m = 0; m < rows; ++m) use(m, reduced + m * kColumns);
  }
}

// Computes rows [begin, end) of y, for the columns of kColumns rows of w from row n on; `end_n` ends the rows of w.
template <class L, int kColumns, bool kIsMemoryBound>
void multiply_rows(const Problem& problem, const char* packed, int64_t begin, int64_t end, int64_t n, int64_t end_n) {
  using Element = typename L::Element;
  const auto* const w = static_cast<const Element*>(problem.w);
  const int64_t rows = end - begin, w_row = problem.w_row, steps = count_steps<L>(problem);
  const int64_t full_steps = problem.depth / L::kDepth;
  const XView<L> x = view_x<L>(problem, packed).rows_from(begin);
  typename L::Sums sums[L::kMaxRows][kColumns];
  const WeightBlock<L> next_rows{w + std::min(n + kColumns, end_n - kColumns) * w_row, w_row, 0,
                                 std::min(full_steps, kBlockSteps<L>)};
  for (int64_t step = 0; step < full_steps; step += kBlockSteps<L>) {
    const int64_t end_step = std::min(step + kBlockSteps<L>, full_steps);
    const WeightBlock<L> current{w + n * w_row, w_row, step, end_step};
    const WeightBlock<L> next_in_row{current.w, w_row, end_step, std::min(end_step + kBlockSteps<L>, full_steps)};
    multiply_block<L, kColumns, kIsMemoryBound>(x, rows, current, end_step < full_steps ? next_in_row : next_rows, sums,
                                                step == 0);
  }
  if (full_steps < steps) {  // fewer than kDepth elements remain: multiply a copy padded with zeros
    Element tail[kColumns][L::kStep] = {};
    for (int i = 0; i < kColumns; ++i)
      std::memcpy(tail[i], w + (n + i) * w_row + full_steps * L::kStep, problem.depth % L::kDepth * sizeof(Element));
    const WeightBlock<L> padded{tail[0] - full_steps * L::kStep, L::kStep, full_steps, full_steps + 1};
    multiply_block<L, kColumns, kIsMemoryBound>(x, rows, padded, {tail[0], L::kStep, 0, 0}, sums, full_steps == 0);
  }
  const auto* const bias =
      problem.bias == nullptr ? nullptr : static_cast<const Element*>(problem.bias) + n * L::kWidth;
  auto* const y = static_cast<Element*>(problem.y) + begin * problem.columns + n * L::kWidth;
  constexpr int64_t columns = kColumns * L::kWidth;
  for_each_row_of_sums<L, kColumns>(
      sums, rows, [&](int64_t m, const float* row) { L::round(row, bias, columns, y + m * problem.columns); });
}

// Rows of x outside, because those of one turn stay in the L2 cache, and w is streamed.
template <class L, int kColumns, bool kIsMemoryBound>
void multiply_columns(const Problem& problem, const char* packed, int64_t begin, int64_t end) {
  for (int64_t m = 0; m < problem.rows; m += L::kMaxRows)
    for (int64_t n = begin; n < end; n += kColumns)
      multiply_rows<L, kColumns, kIsMemoryBound>(problem, packed, m, std::min<int64_t>(m + L::kMaxRows, problem.rows),
                                                 n, end);
}

// Computes the columns of rows [begin, end) of w.
template <class L>
void multiply(const Problem& problem, const char* packed, int64_t begin, int64_t end) {
  const int64_t tiled_end = begin + (end - begin) / L::kColumns * L::kColumns;
  if (problem.rows <= L::kMemoryBoundRows)
    multiply_columns<L, L::kColumns, true>(problem, packed, begin, tiled_end);
  else
    multiply_columns<L, L::kColumns, false>(problem, packed, begin, tiled_end);
  if constexpr (L::kColumns > 1) multiply_columns<L, 1, false>(problem, packed, tiled_end, end);
}

template <class L>
constexpr Kernels make_kernels(const char* isa) {
  return Kernels{isa, L::kMaxRows, L::kColumns, packed_bytes<L>, pack<L>, multiply<L>};
}

template <class Element, class ToFloat, class FromFloat>
void round_sums(const float* sums, const Element* bias, int64_t count, Element* y, const ToFloat& to_float,
                const FromFloat& from_float) {
  if (bias == nullptr)
    for (int64_t i = 0; i < count; ++i) y[i] = from_float(sums[i]);
  else
    for (int64_t i = 0; i < count; ++i) y[i] = from_float(sums[i] + to_float(bias[i]));
}

struct Fp32Elements {
  using Element = float;
  static void round(const float* sums, const float* bias, int64_t count, float* y) {
    const auto same = [](float x) { return x; };
    round_sums(sums, bias, count, y, same, same);
  }
};

struct Bf16Elements {
  using Element = uint16_t;
  static void round(const float* sums, const uint16_t* bias, int64_t count, uint16_t* y) {
    round_sums(sums, bias, count, y, bf16_to_f32, f32_to_bf16);
  }
};

}  // namespace
}  // namespace fused_tp::matmul

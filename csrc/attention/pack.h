// Packing of blocks of rows into the layouts that `multiply` (product.h) reads, converted to L::Operand.
//
//   rows     [row][dim]                    operand A; the product sums over dim
//   columns  [dim][row]                    operand A; the product sums over rows
//   lanes    [dim / kPair][row][kPair]     operand B; the product sums over dim, its lanes are rows
//   pairs    [row / kPair][dim][kPair]     operand B; the product sums over rows, its lanes are dims
//
// Zeros pad dim to a multiple of kPadding, and rows to the size of a block.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention/attention.h"
#include "attention/kernels.h"
#include "half.h"

namespace fused_tp::attention {
namespace {

constexpr int64_t kPadding = 16;

constexpr int64_t padded_dim(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }

template <class L>
inline void convert_row(const void* source, DType dtype, int64_t dim, typename L::Operand* row) {
  using Operand = typename L::Operand;
  if constexpr (L::kPair == 2) {  // bf16 operands are used for bf16 tensors only
    const auto* half = static_cast<const uint16_t*>(source);
    int64_t d = 0;
    for (; d + kPadding <= dim; d += kPadding)
      std::memcpy(row + d, half + d, kPadding * sizeof(*row));  // constant size: inlined
    if (d < dim) std::memcpy(row + d, half + d, (dim - d) * sizeof(*row));
  } else {
    const auto* half = static_cast<const uint16_t*>(source);
    if (dtype == DType::kBF16) {
      for (int64_t d = 0; d < dim; ++d) row[d] = static_cast<Operand>(bf16_to_f32(half[d]));
    } else if (dtype == DType::kF16) {
      for (int64_t d = 0; d < dim; ++d) row[d] = static_cast<Operand>(f16_to_f32(half[d]));
    } else {
      std::memcpy(row, source, dim * sizeof(Operand));
    }
  }
}

template <class L>
inline bool is_finite(typename L::Operand x) {
  if constexpr (L::kPair == 2) {
    return (x & 0x7f80) != 0x7f80;
  } else {
    return x - x == 0;
  }
}

// Replaces infinities and NaN by 0; returns true if there were none. A product that sums over rows includes rows
// outside a query's interval, with probability 0, and 0 times infinity would be NaN. add_nonfinite later adds the terms
// of infinities and NaN inside the interval.
template <class L>
inline bool zero_nonfinite(typename L::Operand* values, int64_t count) {
  // The flag is as wide as the values; otherwise compilers do not vectorize the loop.
  using Flag =
      std::conditional_t<sizeof(*values) == 2, uint16_t, std::conditional_t<sizeof(*values) == 4, uint32_t, uint64_t>>;
  Flag has_nonfinite = 0;
  for (int64_t i = 0; i < count; ++i) has_nonfinite |= static_cast<Flag>(!is_finite<L>(values[i]));
  for (int64_t i = 0; has_nonfinite != 0 && i < count; ++i)
    if (!is_finite<L>(values[i])) values[i] = 0;
  return has_nonfinite == 0;
}

inline const char* row_address(const InputView& source, DType dtype, int64_t batch, int64_t head, int64_t row) {
  const Strides& strides = source.strides;
  const int64_t at = batch * strides.batch + head * strides.head + row * strides.row;
  return static_cast<const char*>(source.data) + at * static_cast<int64_t>(element_size(dtype));
}

template <class L>
inline void read_row(const InputView& source, DType dtype, int64_t batch, int64_t head, int64_t row, int64_t dim,
                     typename L::Operand* packed) {
  convert_row<L>(row_address(source, dtype, batch, head, row), dtype, dim, packed);
}

// Prefetch explicitly: rows of one head are far apart in memory, so the hardware prefetcher does not fetch them.
constexpr int64_t kPrefetchRows = 12, kCacheLine = 64;

inline void prefetch(const void* memory, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(static_cast<const char*>(memory) + i);
}

// Packs rows [first, first + rows) of one head as [block_rows][padded_dim(dim)].
template <class L>
inline void pack_rows(const InputView& source, DType dtype, int64_t batch, int64_t head, int64_t first, int64_t rows,
                      int64_t block_rows, int64_t dim, typename L::Operand* packed) {
  const int64_t width = padded_dim(dim);
  for (int64_t r = 0; r < rows; ++r) {
    typename L::Operand* row = packed + r * width;
    if (r + kPrefetchRows < rows)
      prefetch(row_address(source, dtype, batch, head, first + r + kPrefetchRows),
               dim * static_cast<int64_t>(element_size(dtype)));
    read_row<L>(source, dtype, batch, head, first + r, dim, row);
    std::memset(row + dim, 0, (width - dim) * sizeof(*row));
  }
  std::memset(packed + rows * width, 0, (block_rows - rows) * width * sizeof(*packed));
}

constexpr int64_t kSquare = 16;  // side of a square that is transposed in registers

// to[j][i] = from[i][j] for i < kSquare and j < columns.
template <class L, typename T>
inline void transpose_rows(const T* from, int64_t from_stride, int64_t columns, T* to, int64_t to_stride) {
  int64_t j = 0;
  if constexpr (L::kTransposes && sizeof(T) == sizeof(uint32_t))
    for (; j + kSquare <= columns; j += kSquare)
      L::transpose(reinterpret_cast<const uint32_t*>(from + j), from_stride,
                   reinterpret_cast<uint32_t*>(to + j * to_stride), to_stride);
  for (; j < columns; ++j)
    for (int64_t i = 0; i < kSquare; ++i) to[j * to_stride + i] = from[i * from_stride + j];
}

// to[j][i] = from[i][j], square by square, so that each stays in registers or the L1 cache. `rows` is a multiple of
// kSquare.
template <class L, typename T>
inline void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
  for (int64_t i = 0; i < rows; i += kSquare) transpose_rows<L>(from + i * columns, columns, columns, to + i, rows);
}

// Adds columns [dim][kQueries] to rows of the caller's tensor: row[i] = row_factors[i] * row[i] + factor * column[i].
// Rows whose pointer is null are skipped.
template <class L>
inline void add_columns(const typename L::Real* columns, int64_t dim, const typename L::Real* row_factors,
                        typename L::Real factor, typename L::Real* const* rows) {
  using Real = typename L::Real;
  alignas(64) Real square[kSquare * kSquare];
  for (int64_t i = 0; i < kQueries; ++i)
    if (rows[i] != nullptr) prefetch(rows[i], dim * static_cast<int64_t>(sizeof(Real)));
  for (int64_t i = 0; i < kQueries; i += kSquare)
    for (int64_t d = 0; d < dim; d += kSquare) {
      transpose_rows<L>(columns + d * kQueries + i, kQueries, kSquare, square, kSquare);
      for (int64_t r = 0; r < kSquare; ++r) {
        if (rows[i + r] == nullptr) continue;
        const Real* terms = square + r * kSquare;
        Real* row = rows[i + r] + d;
        if (d + kSquare <= dim) {
          for (int64_t v = 0; v < kSquare; v += L::kWidth)
            L::store(row + v, L::fma(L::load(row + v), L::broadcast(row_factors[i + r]),
                                     L::load(terms + v) * L::broadcast(factor)));
        } else {
          for (int64_t e = 0; d + e < dim; ++e) row[e] = row[e] * row_factors[i + r] + terms[e] * factor;
        }
      }
    }
}

// The kPair operands that one multiply-add consumes per lane, as one integer or float, so that they stay together.
template <class L>
using LaneStep = std::conditional_t<L::kPair == 2, uint32_t, typename L::Operand>;

template <class L>
inline const LaneStep<L>* as_lane_steps(const typename L::Operand* p) {
  return reinterpret_cast<const LaneStep<L>*>(p);
}
template <class L>
inline LaneStep<L>* as_lane_steps(typename L::Operand* p) {
  return reinterpret_cast<LaneStep<L>*>(p);
}

template <class L>
inline void rows_to_lanes(const typename L::Operand* rows, int64_t block_rows, int64_t dim,
                          typename L::Operand* lanes) {
  transpose<L>(as_lane_steps<L>(rows), block_rows, padded_dim(dim) / L::kPair, as_lane_steps<L>(lanes));
}

template <class L>
inline void interleave_row_pairs(const typename L::Operand* rows, int64_t block_rows, int64_t dim,
                                 typename L::Operand* pairs) {
  const int64_t width = padded_dim(dim);
  if constexpr (L::kPair == 1) {
    std::memcpy(pairs, rows, block_rows * width * sizeof(*rows));
  } else {
    for (int64_t r = 0; r < block_rows; r += 2)
      for (int64_t d = 0; d < width; ++d) {
        pairs[r * width + 2 * d] = rows[r * width + d];
        pairs[r * width + 2 * d + 1] = rows[(r + 1) * width + d];
      }
  }
}

// Converts rows to columns, by way of pairs in `pairs`: [block_rows * padded_dim(dim)] operands.
template <class L>
inline void rows_to_columns(const typename L::Operand* rows, int64_t block_rows, int64_t dim,
                            typename L::Operand* columns, typename L::Operand* pairs) {
  interleave_row_pairs<L>(rows, block_rows, dim, pairs);
  transpose<L>(as_lane_steps<L>(pairs), block_rows / L::kPair, padded_dim(dim), as_lane_steps<L>(columns));
}

// Divides the memory of a block, or a thread's scratch memory, into arrays. Initializers of derived classes take
// consecutive 64-byte aligned parts, in order of declaration. With null memory, end() is the total size.
template <class L>
class MemoryLayout {
 public:
  using Real = typename L::Real;
  using Operand = typename L::Operand;
  MemoryLayout(const Shape& shape, char* memory)
      : dim(padded_dim(shape.dim)), v_dim(padded_dim(shape.v_dim)), next_(reinterpret_cast<uintptr_t>(memory)) {}
  uintptr_t end() const { return next_; }

 protected:
  template <typename T>
  T* take(int64_t count) {
    const uintptr_t at = next_;
    next_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  Real* take_reals(int64_t count) { return take<Real>(count); }
  Operand* take_operands(int64_t count) { return take<Operand>(count); }
  // Memory for operands that are computed elementwise from `reals` [kKeys][kQueries]: `reals` itself if the types are
  // equal.
  Operand* alias_or_take(Real* reals) {
    if constexpr (std::is_same_v<Operand, Real>) return reals;
    return take_operands(kKeys * kQueries);
  }
  int64_t widest() const { return dim > v_dim ? dim : v_dim; }

  const int64_t dim, v_dim;  // padded to a multiple of kPadding

 private:
  uintptr_t next_;
};

}  // namespace
}  // namespace fused_tp::attention

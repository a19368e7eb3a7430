// Blocks of rows in the layouts that products read, in the type of their operands.
//
//   rows     [row][dim]                    A of a product along dim
//   columns  [dim][row]                    A of a product along rows
//   lanes    [dim / kPair][row][kPair]     B of a product along dim; lanes are rows
//   pairs    [row / kPair][dim][kPair]     B of a product along rows; lanes are dims
//
// Dims are padded with zeros to a multiple of kPadding, rows to the size of a block.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/attention.h"
#include "attention/half.h"

namespace fused_tp::attention {
namespace {

constexpr int64_t kPadding = 16;

constexpr int64_t padded(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }

template <class L>
inline void convert_row(const void* source, DType dtype, int64_t dim, typename L::Operand* row) {
  using Operand = typename L::Operand;
  if constexpr (L::kPair == 2) {  // bf16 operands, of bf16 tensors only
    std::memcpy(row, source, dim * sizeof(uint16_t));
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

// Replaces infinities and NaN by 0; whether there were none. A product along rows takes cleaned ones, since 0 times
// what is not seen must be 0, and what is seen of the others is added on its own.
template <class L>
inline bool clean(typename L::Operand* values, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= !is_finite<L>(values[i]);
  for (int64_t i = 0; found && i < count; ++i)
    if (!is_finite<L>(values[i])) values[i] = 0;
  return !found;
}

// Row `row` of a tensor.
template <class L>
inline void read_row(const Source& source, DType dtype, int64_t batch, int64_t head, int64_t row, int64_t dim,
                     typename L::Operand* packed) {
  const Strides& strides = source.strides;
  const int64_t at = batch * strides.batch + head * strides.head + row * strides.row;
  convert_row<L>(static_cast<const char*>(source.data) + at * static_cast<int64_t>(element_size(dtype)), dtype, dim,
                 packed);
}

// [rows][dim] of a tensor, from row `first` on, as [block_rows][padded(dim)].
template <class L>
inline void pack_rows(const Source& source, DType dtype, int64_t batch, int64_t head, int64_t first, int64_t rows,
                      int64_t block_rows, int64_t dim, typename L::Operand* packed) {
  const int64_t width = padded(dim);
  for (int64_t r = 0; r < rows; ++r) {
    typename L::Operand* row = packed + r * width;
    read_row<L>(source, dtype, batch, head, first + r, dim, row);
    std::memset(row + dim, 0, (width - dim) * sizeof(*row));
  }
  std::memset(packed + rows * width, 0, (block_rows - rows) * width * sizeof(*packed));
}

// to[j][i] = from[i][j], in squares that stay in registers or the first cache.
template <typename T>
inline void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
  constexpr int64_t kSquare = 16;
  for (int64_t i = 0; i < rows; i += kSquare)
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t k = i; k < (i + kSquare < rows ? i + kSquare : rows); ++k) to[j * rows + k] = from[k * columns + j];
}

// What one step of a product takes from one lane, as one number.
template <class L>
using Step = std::conditional_t<L::kPair == 2, uint32_t, typename L::Operand>;

template <class L>
inline const Step<L>* steps(const typename L::Operand* p) {
  return reinterpret_cast<const Step<L>*>(p);
}
template <class L>
inline Step<L>* steps(typename L::Operand* p) {
  return reinterpret_cast<Step<L>*>(p);
}

template <class L>
inline void rows_to_lanes(const typename L::Operand* rows, int64_t block_rows, int64_t dim,
                          typename L::Operand* lanes) {
  transpose(steps<L>(rows), block_rows, padded(dim) / L::kPair, steps<L>(lanes));
}

template <class L>
inline void rows_to_pairs(const typename L::Operand* rows, int64_t block_rows, int64_t dim,
                          typename L::Operand* pairs) {
  const int64_t width = padded(dim);
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

// By way of pairs, for which `room` is.
template <class L>
inline void rows_to_columns(const typename L::Operand* rows, int64_t block_rows, int64_t dim,
                            typename L::Operand* columns, typename L::Operand* room) {
  rows_to_pairs<L>(rows, block_rows, dim, room);
  transpose(steps<L>(room), block_rows / L::kPair, padded(dim), steps<L>(columns));
}

// Memory that is given out piece by piece, all aligned.
class Pieces {
 public:
  explicit Pieces(char* memory) : next_(reinterpret_cast<uintptr_t>(memory)) {}
  template <typename T>
  T* take(int64_t count) {
    const uintptr_t at = next_;
    next_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  uintptr_t end() const { return next_; }

 private:
  uintptr_t next_;
};

}  // namespace
}  // namespace fused_tp::attention

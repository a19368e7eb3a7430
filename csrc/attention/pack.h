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
#include <type_traits>

#include "attention/attention.h"
#include "attention/kernels.h"
#include "half.h"

namespace fused_tp::attention {
namespace {

constexpr int64_t kPadding = 16;

constexpr int64_t padded(int64_t dim) { return (dim + kPadding - 1) / kPadding * kPadding; }

template <class L>
inline void convert_row(const void* source, DType dtype, int64_t dim, typename L::Operand* row) {
  using Operand = typename L::Operand;
  if constexpr (L::kPair == 2) {  // bf16 operands, of bf16 tensors only
    const auto* half = static_cast<const uint16_t*>(source);
    int64_t d = 0;
    for (; d + kPadding <= dim; d += kPadding) std::memcpy(row + d, half + d, kPadding * sizeof(*row));  // no call
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

// Replaces infinities and NaN by 0; true if there were none. Products along rows use cleaned values, since 0 times an
// unseen value must be 0; infinities and NaN that are seen are added separately.
template <class L>
inline bool clean(typename L::Operand* values, int64_t count) {
  // As wide as the values, else compilers do not vectorise the loop.
  using Flag =
      std::conditional_t<sizeof(*values) == 2, uint16_t, std::conditional_t<sizeof(*values) == 4, uint32_t, uint64_t>>;
  Flag found = 0;
  for (int64_t i = 0; i < count; ++i) found |= static_cast<Flag>(!is_finite<L>(values[i]));
  for (int64_t i = 0; found != 0 && i < count; ++i)
    if (!is_finite<L>(values[i])) values[i] = 0;
  return found == 0;
}

inline const char* row_of(const Source& source, DType dtype, int64_t batch, int64_t head, int64_t row) {
  const Strides& strides = source.strides;
  const int64_t at = batch * strides.batch + head * strides.head + row * strides.row;
  return static_cast<const char*>(source.data) + at * static_cast<int64_t>(element_size(dtype));
}

// Reads row `row` of a tensor.
template <class L>
inline void read_row(const Source& source, DType dtype, int64_t batch, int64_t head, int64_t row, int64_t dim,
                     typename L::Operand* packed) {
  convert_row<L>(row_of(source, dtype, batch, head, row), dtype, dim, packed);
}

// Rows of a head are far apart: the hardware does not predict the next one.
constexpr int64_t kRowsAhead = 12, kLine = 64;

inline void prefetch(const void* memory, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(memory) + i);
}

// Packs [rows][dim] of a tensor, from row `first` on, as [block_rows][padded(dim)].
template <class L>
inline void pack_rows(const Source& source, DType dtype, int64_t batch, int64_t head, int64_t first, int64_t rows,
                      int64_t block_rows, int64_t dim, typename L::Operand* packed) {
  const int64_t width = padded(dim);
  for (int64_t r = 0; r < rows; ++r) {
    typename L::Operand* row = packed + r * width;
    if (r + kRowsAhead < rows)
      prefetch(row_of(source, dtype, batch, head, first + r + kRowsAhead),
               dim * static_cast<int64_t>(element_size(dtype)));
    read_row<L>(source, dtype, batch, head, first + r, dim, row);
    std::memset(row + dim, 0, (width - dim) * sizeof(*row));
  }
  std::memset(packed + rows * width, 0, (block_rows - rows) * width * sizeof(*packed));
}

constexpr int64_t kSquare = 16;

// to[j][i] = from[i][j] for i < 16 and j < columns.
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

// to[j][i] = from[i][j], in squares that stay in registers or the first cache; `rows` is a multiple of their side.
template <class L, typename T>
inline void transpose(const T* from, int64_t rows, int64_t columns, T* to) {
  for (int64_t i = 0; i < rows; i += kSquare) transpose_rows<L>(from + i * columns, columns, columns, to + i, rows);
}

// Adds columns [dim][kQueries] to rows of the caller: row = keep row + factor column, for those with a pointer.
template <class L>
inline void add_columns(const typename L::Real* columns, int64_t dim, const typename L::Real* keep,
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
            L::store(row + v,
                     L::fma(L::load(row + v), L::broadcast(keep[i + r]), L::load(terms + v) * L::broadcast(factor)));
        } else {
          for (int64_t e = 0; d + e < dim; ++e) row[e] = row[e] * keep[i + r] + terms[e] * factor;
        }
      }
    }
}

// Elements of one lane in one step of a product, as one number.
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
  transpose<L>(steps<L>(rows), block_rows, padded(dim) / L::kPair, steps<L>(lanes));
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

// Converts rows to pairs in `room`, and these to columns.
template <class L>
inline void rows_to_columns(const typename L::Operand* rows, int64_t block_rows, int64_t dim,
                            typename L::Operand* columns, typename L::Operand* room) {
  rows_to_pairs<L>(rows, block_rows, dim, room);
  transpose<L>(steps<L>(room), block_rows / L::kPair, padded(dim), steps<L>(columns));
}

// Memory of a block or a thread: members of derived classes take aligned pieces of it in order of declaration.
template <class L>
class Layout {
 public:
  using Real = typename L::Real;
  using Operand = typename L::Operand;
  Layout(const Shape& shape, char* memory)
      : dim(padded(shape.dim)), v_dim(padded(shape.v_dim)), next_(reinterpret_cast<uintptr_t>(memory)) {}
  uintptr_t end() const { return next_; }

 protected:
  template <typename T>
  T* take(int64_t count) {
    const uintptr_t at = next_;
    next_ += (count * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  Real* reals(int64_t count) { return take<Real>(count); }
  Operand* operands(int64_t count) { return take<Operand>(count); }
  // Operands computed elementwise from `reals` [kKeys][kQueries]: in their place, if they have the same type.
  Operand* in_place_of(Real* reals) {
    if constexpr (std::is_same_v<Operand, Real>) return reals;
    return operands(kKeys * kQueries);
  }
  int64_t widest() const { return dim > v_dim ? dim : v_dim; }

  const int64_t dim, v_dim;  // padded

 private:
  uintptr_t next_;
};

}  // namespace
}  // namespace fused_tp::attention

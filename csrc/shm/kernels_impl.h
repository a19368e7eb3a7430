// The kernels as templates of a Lanes type: a vector of fp32 lanes, with loads and stores that convert from and to
// 16-bit types.
//
// Each kernels_<isa>.cpp includes this header and is compiled with the flags of its instruction set. Everything here
// has internal linkage. Otherwise the linker could keep the AVX-512 version of a function and call it on a CPU without
// AVX-512.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace fused_tp::shm {
namespace {

// Types that accumulate in the element type: fp64 and integers. The compiler vectorizes the inner loop.
template <typename T>
void sum_same_type(T* destination, const T* const* sources, int n_sources, size_t count) {
  constexpr size_t kBlock = 512;
  T accumulator[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    std::memcpy(accumulator, sources[0] + begin, n * sizeof(T));
    for (int s = 1; s < n_sources; ++s) {
      const T* source = sources[s] + begin;
      for (size_t i = 0; i < n; ++i) accumulator[i] = static_cast<T>(accumulator[i] + source[i]);
    }
    std::memcpy(destination + begin, accumulator, n * sizeof(T));
  }
}

// fp32, bf16 and fp16, in fp32 lanes. Four independent sums at a time hide the latency of the additions.
template <typename Lanes, DType kDType>
void sum_lanes(void* destination, const void* const* sources, int n_sources, size_t count) {
  constexpr size_t kWidth = Lanes::kWidth;
  constexpr size_t kSize = element_size(kDType);
  constexpr int kUnroll = 4;
  auto at = [](const void* base, size_t i) { return static_cast<const char*>(base) + i * kSize; };
  char* out = static_cast<char*>(destination);
  size_t i = 0;
  for (; i + kUnroll * kWidth <= count; i += kUnroll * kWidth) {
    typename Lanes::Vector accumulator[kUnroll];
    for (int u = 0; u < kUnroll; ++u)
      accumulator[u] = Lanes::template load<kDType>(at(sources[0], i + u * kWidth), kWidth);
    for (int s = 1; s < n_sources; ++s)
      for (int u = 0; u < kUnroll; ++u)
        accumulator[u] += Lanes::template load<kDType>(at(sources[s], i + u * kWidth), kWidth);
    for (int u = 0; u < kUnroll; ++u)
      Lanes::template store<kDType>(out + (i + u * kWidth) * kSize, accumulator[u], kWidth);
  }
  for (; i < count; i += kWidth) {
    const size_t n = std::min(kWidth, count - i);
    auto accumulator = Lanes::template load<kDType>(at(sources[0], i), n);
    for (int s = 1; s < n_sources; ++s) accumulator += Lanes::template load<kDType>(at(sources[s], i), n);
    Lanes::template store<kDType>(out + i * kSize, accumulator, n);
  }
}

template <typename Lanes>
void sum(void* destination, const void* const* sources, int n_sources, size_t count, DType dtype) {
  auto sum_without_conversion = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    sum_same_type<T>(typed, reinterpret_cast<const T* const*>(sources), n_sources, count);
  };
  switch (dtype) {
    case DType::kF32:
      return sum_lanes<Lanes, DType::kF32>(destination, sources, n_sources, count);
    case DType::kBF16:
      return sum_lanes<Lanes, DType::kBF16>(destination, sources, n_sources, count);
    case DType::kF16:
      return sum_lanes<Lanes, DType::kF16>(destination, sources, n_sources, count);
    case DType::kF64:
      return sum_without_conversion(static_cast<double*>(destination));
    case DType::kI8:
      return sum_without_conversion(static_cast<int8_t*>(destination));
    case DType::kU8:
      return sum_without_conversion(static_cast<uint8_t*>(destination));
    case DType::kI16:
      return sum_without_conversion(static_cast<int16_t*>(destination));
    case DType::kI32:
      return sum_without_conversion(static_cast<int32_t*>(destination));
    case DType::kI64:
      return sum_without_conversion(static_cast<int64_t*>(destination));
  }
}

template <typename Lanes, DType kDType>
void rms_norm_row_lanes(const RmsNormRow& row) {
  constexpr size_t kWidth = Lanes::kWidth;
  constexpr size_t kSize = element_size(kDType);
  auto load = [](const void* base, size_t i, size_t n) {
    return Lanes::template load<kDType>(static_cast<const char*>(base) + i * kSize, n);
  };
  auto store = [](void* base, size_t i, typename Lanes::Vector v, size_t n) {
    Lanes::template store<kDType>(static_cast<char*>(base) + i * kSize, v, n);
  };
  const void* const summed = row.new_residual != nullptr ? row.new_residual : row.partials[0];
  typename Lanes::Vector squares{};
  for (size_t i = 0; i < row.columns; i += kWidth) {
    const size_t n = std::min(kWidth, row.columns - i);
    auto sum = load(row.partials[0], i, n);
    for (int s = 1; s < row.n_partials; ++s) sum += load(row.partials[s], i, n);
    if (row.residual != nullptr) sum += load(row.residual, i, n);
    if (row.new_residual != nullptr) {
      store(row.new_residual, i, sum, n);
      sum = load(row.new_residual, i, n);  // the norm of the rounded values, which the caller receives
    }
    squares = Lanes::fma(sum, sum, squares);
  }
  const float mean = Lanes::sum(squares) / static_cast<float>(row.columns);
  const auto scale = Lanes::broadcast(1.0f / std::sqrt(mean + static_cast<float>(row.eps)));
  const auto offset = Lanes::broadcast(row.weight_offset);
  for (size_t i = 0; i < row.columns; i += kWidth) {
    const size_t n = std::min(kWidth, row.columns - i);
    store(row.normed, i, load(summed, i, n) * scale * (load(row.weight, i, n) + offset), n);
  }
}

inline void rms_norm_row_f64(const RmsNormRow& row) {
  auto* out = static_cast<double*>(row.new_residual != nullptr ? row.new_residual : row.normed);
  const auto* residual = static_cast<const double*>(row.residual);
  const auto* weight = static_cast<const double*>(row.weight);
  double squares = 0;
  for (size_t i = 0; i < row.columns; ++i) {
    double sum = static_cast<const double*>(row.partials[0])[i];
    for (int s = 1; s < row.n_partials; ++s) sum += static_cast<const double*>(row.partials[s])[i];
    if (residual != nullptr) sum += residual[i];
    out[i] = sum;
    squares += sum * sum;
  }
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(row.columns) + row.eps);
  for (size_t i = 0; i < row.columns; ++i)
    static_cast<double*>(row.normed)[i] = out[i] * scale * (weight[i] + row.weight_offset);
}

template <typename Lanes>
void rms_norm_row(const RmsNormRow& row, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return rms_norm_row_lanes<Lanes, DType::kF32>(row);
    case DType::kBF16:
      return rms_norm_row_lanes<Lanes, DType::kBF16>(row);
    case DType::kF16:
      return rms_norm_row_lanes<Lanes, DType::kF16>(row);
    case DType::kF64:
      return rms_norm_row_f64(row);
    default:
      return;  // callers have rejected other dtypes
  }
}

template <typename Lanes, DType kDType>
void sum_rows_lanes(const RowSums& sums, size_t begin, size_t end) {
  constexpr size_t kWidth = Lanes::kWidth;
  constexpr size_t kSize = element_size(kDType);
  for (size_t t = begin; t < end; ++t) {
    char* out = static_cast<char*>(sums.out) + t * sums.columns * kSize;
    for (size_t c = 0; c < sums.columns; c += kWidth) {
      const size_t n = std::min(kWidth, sums.columns - c);
      typename Lanes::Vector total{};
      for (int64_t i = sums.starts[t]; i < sums.starts[t + 1]; ++i) {
        const size_t at = (static_cast<size_t>(sums.rows[i]) * sums.columns + c) * kSize;
        const auto value = Lanes::template load<kDType>(static_cast<const char*>(sums.y) + at, n);
        total = sums.scale == nullptr ? total + value : Lanes::fma(value, Lanes::broadcast(sums.scale[i]), total);
      }
      Lanes::template store<kDType>(out + c * kSize, total, n);
    }
  }
}

template <typename Lanes>
void sum_rows(const RowSums& sums, size_t begin, size_t end, DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return sum_rows_lanes<Lanes, DType::kF32>(sums, begin, end);
    case DType::kBF16:
      return sum_rows_lanes<Lanes, DType::kBF16>(sums, begin, end);
    case DType::kF16:
      return sum_rows_lanes<Lanes, DType::kF16>(sums, begin, end);
    default:
      return;  // callers have rejected other dtypes
  }
}

template <typename Lanes>
constexpr Kernels make_kernels(const char* isa) {
  return Kernels{isa, sum<Lanes>, rms_norm_row<Lanes>, sum_rows<Lanes>};
}

}  // namespace
}  // namespace fused_tp::shm

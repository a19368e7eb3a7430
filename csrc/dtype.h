// Element types and reductions the native core knows. The numbers are shared with fused_tp/transport/shm.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fused_tp {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kI8 = 4, kU8 = 5, kI16 = 6, kI32 = 7, kI64 = 8 };
constexpr int kNumDTypes = 9;

enum class ReduceOp : int32_t { kSum = 0, kMax = 1, kMin = 2 };
constexpr int kNumReduceOps = 3;

constexpr size_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kI8:
    case DType::kU8:
      return 1;
    case DType::kBF16:
    case DType::kF16:
    case DType::kI16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
  }
  return 0;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF64:
      return "float64";
    case DType::kI8:
      return "int8";
    case DType::kU8:
      return "uint8";
    case DType::kI16:
      return "int16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
  }
  return "unknown";
}

}  // namespace fused_tp

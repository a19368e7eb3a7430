// Element types of the native core. The numbers are shared with fused_tp/backends/shared_memory/shm.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fused_tp {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kF64 = 3, kI8 = 4, kU8 = 5, kI16 = 6, kI32 = 7, kI64 = 8 };
constexpr int kNumDTypes = 9;

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
  constexpr const char* kNames[kNumDTypes] = {"float32", "bfloat16", "float16", "float64", "int8",
                                              "uint8",   "int16",    "int32",   "int64"};
  return kNames[static_cast<int>(dtype)];
}

}  // namespace fused_tp

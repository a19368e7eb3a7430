// Kernels of the collectives for any CPU: one element at a time.
#include "half.h"
#include "kernels_impl.h"

namespace fused_tp::shm {
namespace {

struct PlainLanes {
  using Vector = float;
  static constexpr size_t kWidth = 1;
  static float broadcast(float x) { return x; }
  static float fma(float a, float b, float c) { return a * b + c; }
  static float sum(float a) { return a; }
  template <DType kDType>
  static float load(const void* p, size_t) {
    if constexpr (kDType == DType::kF32) {
      float value;
      std::memcpy(&value, p, sizeof value);
      return value;
    } else {
      uint16_t bits;
      std::memcpy(&bits, p, sizeof bits);
      return kDType == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
  }
  template <DType kDType>
  static void store(void* p, float value, size_t) {
    if constexpr (kDType == DType::kF32) {
      std::memcpy(p, &value, sizeof value);
    } else {
      const uint16_t bits = kDType == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
      std::memcpy(p, &bits, sizeof bits);
    }
  }
};

}  // namespace

const Kernels& kernels_plain() {
  static constexpr Kernels table = make_kernels<PlainLanes>("plain");
  return table;
}

}  // namespace fused_tp::shm

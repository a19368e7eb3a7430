// Elements of 16 bits to fp32, one at a time; compilers make vectors of loops over these.
#pragma once

#include <cstdint>
#include <cstring>

namespace fused_tp::attention {
namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bf16_to_f32(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }

// The exponent is rebased by a product, which is exact for subnormals too; infinities and NaN get their exponent.
inline float f16_to_f32(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  const uint32_t rebased = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
  return float_of_bits(rebased | special | (static_cast<uint32_t>(bits & 0x8000u) << 16));
}

}  // namespace
}  // namespace fused_tp::attention

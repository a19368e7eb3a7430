// Scalar conversions between 16-bit floats and fp32; compilers vectorize loops that call them. The functions have
// internal linkage because files compiled for different instruction sets include this header and must not share the
// compiled code.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace fused_tp {
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

// Multiplying by 2^112 changes the exponent bias from fp16's 15 to fp32's 127. It is exact, also for subnormals.
// Infinities and NaN need the exponent field set to all ones afterwards.
inline float f16_to_f32(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  const uint32_t rebased = bits_of_float(float_of_bits(magnitude) * 0x1p112f);
  return float_of_bits(rebased | special | (static_cast<uint32_t>(bits & 0x8000u) << 16));
}

inline uint16_t f32_to_bf16(float value) {  // rounds to nearest even; NaN stays NaN
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline uint16_t f32_to_f16(float value) {  // rounds to nearest even; overflows to infinity; NaN stays NaN
  const auto sign = static_cast<uint16_t>((bits_of_float(value) >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (magnitude != magnitude) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 6.103515625e-05f)  // subnormal in fp16: nearbyint rounds to even
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24))));
  const uint32_t bits = bits_of_float(magnitude);
  const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13));
}

}  // namespace
}  // namespace fused_tp

// e4m3 as the kernels use it: rounding to nearest, ties to even, saturated.
#pragma once

#include <cmath>
#include <cstdint>

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
using __nv_fp8_storage_t = uint8_t;

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t, __nv_fp8_interpretation_t) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (value != value) return 0x7f;
  const float magnitude = std::fmin(std::fabs(value), 448.0f);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int unit = exponent < -5 || magnitude == 0 ? -9 : exponent - 4;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  return static_cast<uint8_t>(sign | (unit == -9 ? steps : ((unit + 10) << 3) + steps - 8));
}

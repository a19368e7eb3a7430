// float16 as the kernels use it: rounding to nearest, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct float2 {
  float x, y;
};
struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half value) {
  const int exponent = value.bits >> 10 & 31;
  const int mantissa = value.bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa ? NAN : INFINITY;
  } else {
    magnitude = std::ldexp(static_cast<float>(exponent ? mantissa | 1024 : mantissa), (exponent ? exponent : 1) - 25);
  }
  return value.bits >> 15 ? -magnitude : magnitude;
}

inline __half __float2half_rn(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (value != value) return {0x7fff};
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // In units of the last place, which nearbyint rounds to; a carry runs into the exponent, as it should.
  const int unit = exponent < -13 || magnitude == 0 ? -24 : exponent - 11;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));
  const int bits = unit == -24 ? steps : ((unit + 25) << 10) + steps - 1024;
  return {static_cast<uint16_t>(sign | bits)};
}

inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

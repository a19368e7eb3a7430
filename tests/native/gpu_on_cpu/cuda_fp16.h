// The part of CUDA's float16 that the kernels use.
#pragma once

#include "half.h"

struct float2 {
  float x, y;
};
struct __half {
  uint16_t bits;
};
struct __half2 {
  __half x, y;
};

inline float __half2float(__half value) { return fused_tp::f16_to_f32(value.bits); }
inline __half __float2half_rn(float value) { return {fused_tp::f32_to_f16(value)}; }
inline float2 __half22float2(__half2 pair) { return {__half2float(pair.x), __half2float(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

// Kernels of the collectives for AVX2 + FMA + F16C: vectors of eight fp32 lanes.
#include <immintrin.h>

#include "kernels_impl.h"

namespace fused_tp::shm {
namespace {

struct Avx2Lanes {
  using Vector = __m256;
  static constexpr size_t kWidth = 8;
  static Vector broadcast(float x) { return _mm256_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(Vector a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  template <DType kDType>
  static Vector load(const void* p, size_t n) {
    if constexpr (kDType == DType::kF32) {
      if (n < kWidth) return _mm256_maskload_ps(static_cast<const float*>(p), mask(n));
      return _mm256_loadu_ps(static_cast<const float*>(p));
    } else {
      __m128i bits;
      if (n < kWidth) {
        alignas(16) uint16_t tail[kWidth] = {};
        std::memcpy(tail, p, n * sizeof(uint16_t));
        bits = _mm_load_si128(reinterpret_cast<const __m128i*>(tail));
      } else {
        bits = _mm_loadu_si128(static_cast<const __m128i*>(p));
      }
      if constexpr (kDType == DType::kF16) return _mm256_cvtph_ps(bits);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }
  template <DType kDType>
  static void store(void* p, Vector value, size_t n) {
    if constexpr (kDType == DType::kF32) {
      if (n < kWidth) return _mm256_maskstore_ps(static_cast<float*>(p), mask(n), value);
      _mm256_storeu_ps(static_cast<float*>(p), value);
    } else {
      __m128i bits;
      if constexpr (kDType == DType::kF16) {
        bits = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      } else {
        bits = to_bf16(value);
      }
      if (n < kWidth) {
        alignas(16) uint16_t tail[kWidth];
        _mm_store_si128(reinterpret_cast<__m128i*>(tail), bits);
        std::memcpy(p, tail, n * sizeof(uint16_t));
      } else {
        _mm_storeu_si128(static_cast<__m128i*>(p), bits);
      }
    }
  }

 private:
  static __m256i mask(size_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
  }
  static __m128i to_bf16(Vector value) {  // round to nearest even in integer arithmetic; NaN stays NaN
    const __m256i wide = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(wide, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(wide, _mm256_set1_epi32(0x400000));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    return _mm256_castsi256_si128(packed);
  }
};

}  // namespace

const Kernels& kernels_avx2() {
  static constexpr Kernels table = make_kernels<Avx2Lanes>("avx2");
  return table;
}

}  // namespace fused_tp::shm

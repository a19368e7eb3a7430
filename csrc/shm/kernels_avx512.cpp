// Kernels of the collectives for AVX-512 F/BW/VL/DQ: vectors of sixteen fp32 lanes. With AVX512_BF16 one instruction
// converts to bf16.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about uninitialized vectors in its own AVX-512 header.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "kernels_impl.h"

namespace fused_tp::shm {
namespace {

struct Avx512Lanes {
  using Vector = __m512;
  static constexpr size_t kWidth = 16;
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(Vector a) { return _mm512_reduce_add_ps(a); }
  template <DType kDType>
  static Vector load(const void* p, size_t n) {
    const __mmask16 lanes = mask(n);
    if constexpr (kDType == DType::kF32) return _mm512_maskz_loadu_ps(lanes, p);
    const __m256i bits = _mm256_maskz_loadu_epi16(lanes, p);
    if constexpr (kDType == DType::kF16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  template <DType kDType>
  static void store(void* p, Vector value, size_t n) {
    const __mmask16 lanes = mask(n);
    if constexpr (kDType == DType::kF32) {
      _mm512_mask_storeu_ps(p, lanes, value);
    } else if constexpr (kDType == DType::kF16) {
      _mm256_mask_storeu_epi16(p, lanes, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      _mm256_mask_storeu_epi16(p, lanes, to_bf16(value));
    }
  }

 protected:
  static __mmask16 mask(size_t n) { return static_cast<__mmask16>(n >= kWidth ? 0xffffu : (1u << n) - 1u); }

 private:
  static __m256i to_bf16(Vector value) {  // round to nearest even in integer arithmetic; NaN stays NaN
    const __m512i wide = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(wide, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, wide, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
  }
};

struct Bf16Lanes : Avx512Lanes {
  template <DType kDType>
  static void store(void* p, Vector value, size_t n) {
    if constexpr (kDType == DType::kBF16) {
      // vcvtneps2bf16 flushes subnormals to zero. That is accepted: bf16 has the exponent range of fp32, so they are
      // below 2^-126.
      _mm256_mask_storeu_epi16(p, mask(n), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
    } else {
      Avx512Lanes::store<kDType>(p, value, n);
    }
  }
};

}  // namespace

const Kernels& kernels_avx512(bool has_bf16_conversion) {
  static constexpr Kernels table = make_kernels<Avx512Lanes>("avx512"), bf16 = make_kernels<Bf16Lanes>("avx512_bf16");
  return has_bf16_conversion ? bf16 : table;
}

}  // namespace fused_tp::shm

// Sixteen fp32 lanes, AVX-512 F/BW/VL/DQ with the bf16 conversion.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's own AVX-512 header initialises its "undefined" vectors with themselves and then warns about it.
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
      // The instruction flushes subnormals to zero, which bf16's range (that of fp32) makes immaterial.
      _mm256_mask_storeu_epi16(p, lanes, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
    }
  }

 private:
  static __mmask16 mask(size_t n) { return static_cast<__mmask16>(n >= kWidth ? 0xffffu : (1u << n) - 1u); }
};

}  // namespace

const Kernels& kernels_avx512() {
  static constexpr Kernels table = make_kernels<Avx512Lanes>("avx512_bf16");
  return table;
}

}  // namespace fused_tp::shm

// Attention kernels for AVX2 + FMA: vectors of eight fp32 or four fp64 lanes.
#include <immintrin.h>

#include "attention/kernels_impl.h"

namespace fused_tp::attention {
namespace {

struct Avx2Lanes : GenericLanes<float, 32> {
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return fma(a, b, c); }
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
  static bool any(Mask mask) { return _mm256_movemask_epi8((__m256i)mask) != 0; }
  static Integers load_integers(const int32_t* p) {
    return (Integers)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Vector exp2(Vector x) {
    // _mm256_max_ps and _mm256_min_ps return their second operand if either is NaN. So NaN must be second here.
    const Vector y = _mm256_min_ps(_mm256_set1_ps(127), _mm256_max_ps(_mm256_set1_ps(-126), x));
    const Vector whole = _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    const Vector result = exp2_fraction<Avx2Lanes>(y - whole) * (Vector)power;
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(-126), _CMP_LT_OQ), result);
  }
  static Vector tanh(Vector x) { return tanh_single<Avx2Lanes>(x); }
  static void multiply_wide(Integers a, uint32_t b, Integers& high, Integers& low) {
    const __m256i factor = _mm256_set1_epi32(static_cast<int>(b));
    const __m256i even = _mm256_mul_epu32((__m256i)a, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
    low = (Integers)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    high = (Integers)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  }
  static Mask at_least(Integers bits, uint32_t threshold) {
    const __m256i bound = _mm256_set1_epi32(static_cast<int>(threshold));
    return (Mask)_mm256_cmpeq_epi32(_mm256_max_epu32((__m256i)bits, bound), (__m256i)bits);
  }
};

}  // namespace

const Kernels& kernels_avx2(DType dtype) {
  static constexpr Kernels fp32 = make_kernels<Avx2Lanes>("avx2");
  static constexpr Kernels fp64 = make_kernels<GenericLanes<double, 32>>("avx2");
  return dtype == DType::kF64 ? fp64 : fp32;
}

}  // namespace fused_tp::attention

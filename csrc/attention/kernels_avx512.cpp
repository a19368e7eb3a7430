// Attention kernels for AVX-512 F/BW/VL/DQ: vectors of sixteen fp32 or eight fp64 lanes. With AVX512_BF16, bf16 inputs
// are multiplied without conversion to fp32.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about uninitialized vectors in its own AVX-512 header.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "attention/kernels_impl.h"

namespace fused_tp::attention {
namespace {

struct Avx512Lanes : GenericLanes<float, 64> {
  using Mask = __mmask16;
  static constexpr int kRows = 8;
  static Vector broadcast(float x) { return _mm512_set1_ps(x); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return fma(a, b, c); }
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
  static Vector select(Mask mask, Vector a, Vector b) { return _mm512_mask_mov_ps(b, mask, a); }
  static Mask greater(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static Mask equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static bool any(Mask mask) { return mask != 0; }
  static Integers load_integers(const int32_t* p) { return (Integers)_mm512_loadu_si512(p); }
  static Mask in_interval(Integers starts, Integers stops, int32_t k) {
    const __m512i at = _mm512_set1_epi32(k);
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask((__m512i)starts, at), (__m512i)stops, at);
  }
  static Vector distance(Integers q_positions, int32_t k) {
    return _mm512_cvtepi32_ps(_mm512_abs_epi32(_mm512_sub_epi32((__m512i)q_positions, _mm512_set1_epi32(k))));
  }
  static float sum(Vector v) { return _mm512_reduce_add_ps(v); }
  static Vector exp2(Vector x) {
    const Vector y = _mm512_max_ps(_mm512_set1_ps(-200), x);  // returns x if x is NaN: the second operand
    const Vector whole = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_fraction<Avx512Lanes>(y - whole), whole);
  }
  static Vector tanh(Vector x) { return tanh_single<Avx512Lanes>(x); }
  static void multiply_wide(Integers a, uint32_t b, Integers& high, Integers& low) {
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(b));
    const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
    low = (Integers)_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
    high = (Integers)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
  }
  // Transposes 16 x 16: interleaves 32-bit elements, then 64-bit elements, then 128-bit lanes.
  static constexpr bool kTransposes = true;
  static void transpose(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
    __m512i pairs[16], quads[16];
    for (int i = 0; i < 16; i += 2) {
      const __m512i a = _mm512_loadu_si512(from + i * from_stride),
                    b = _mm512_loadu_si512(from + (i + 1) * from_stride);
      pairs[i] = _mm512_unpacklo_epi32(a, b);
      pairs[i + 1] = _mm512_unpackhi_epi32(a, b);
    }
    for (int i = 0; i < 16; i += 4)
      for (int half = 0; half < 2; ++half) {
        quads[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
        quads[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
      }
    for (int j = 0; j < 4; ++j) {
      const __m512i a = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x88);
      const __m512i b = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xdd);
      const __m512i c = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x88);
      const __m512i d = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xdd);
      _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(a, c, 0x88));
      _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(b, d, 0x88));
      _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(a, c, 0xdd));
      _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
  }
  static Mask at_least(Integers bits, uint32_t threshold) {
    return _mm512_cmpge_epu32_mask((__m512i)bits, _mm512_set1_epi32(static_cast<int>(threshold)));
  }
};

// bf16 operands: each dpbf16 multiplies two pairs per lane and adds both products to an fp32 lane.
struct Bf16Lanes : Avx512Lanes {
  using Operand = uint16_t;
  using Operands = __m512i;
  static constexpr int kPair = 2;
  static Operands load_operand(const Operand* p) { return _mm512_loadu_si512(p); }
  static Operands broadcast_operand(const Operand* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static Vector multiply_add(Operands a, Operands b, Vector c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  static float value(Operand x) { return bf16_to_f32(x); }
  static void store_rows(Operand* row0, Operand* row1, Vector a, Vector b) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row0), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row1), _mm512_extracti64x4_epi64(both, 1));
  }
  static void store_pairs(Operand* rows, int64_t, Vector a, Vector b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(rows, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a)));
  }
};

}  // namespace

const Kernels& kernels_avx512(DType dtype, bool has_bf16_products) {
  static constexpr Kernels fp32 = make_kernels<Avx512Lanes>("avx512");
  static constexpr Kernels fp64 = make_kernels<GenericLanes<double, 64>>("avx512");
  static constexpr Kernels bf16 = make_kernels<Bf16Lanes>("avx512_bf16");
  if (dtype == DType::kBF16 && has_bf16_products) return bf16;
  return dtype == DType::kF64 ? fp64 : fp32;
}

}  // namespace fused_tp::attention

// Matmul kernels for AVX-512 F: vectors of sixteen fp32 lanes. With AVX512_BF16, bf16 inputs are multiplied without
// conversion to fp32.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about uninitialized vectors in its own AVX-512 header.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "matmul/kernels_impl.h"

namespace fused_tp::matmul {
namespace {

struct Avx512Sums {
  using Sums = __m512;
  static Sums zero() { return _mm512_setzero_ps(); }
};

struct RowLanes : Avx512Sums {
  static constexpr int kRows = 4, kColumns = 6;  // with x and w 31 of the 32 registers
  static constexpr int kMaxRows = kMaxFewRows, kMemoryBoundRows = 12, kWidth = 1, kBlockBytes = 8192;
  // Halves of vectors are added pairwise, so that four levels of 8, 4, 2 and 1 additions add the lanes of all sixteen.
  static constexpr int kReduced = 16;
  static void reduce(const Sums* sums, float* to) {
    __m512 pairs[8], fours[4], eights[2];
    FUSED_TP_UNROLL
    for (int i = 0; i < 8; ++i)
      pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(sums[2 * i], sums[2 * i + 1]),
                               _mm512_unpackhi_ps(sums[2 * i], sums[2 * i + 1]));
    FUSED_TP_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
      fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    FUSED_TP_UNROLL
    for (int i = 0; i < 2; ++i) eights[i] = add_even_and_odd_quarters(fours[2 * i], fours[2 * i + 1]);
    _mm512_storeu_ps(to, add_even_and_odd_quarters(eights[0], eights[1]));
  }
  static __m512 add_even_and_odd_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
};

struct PanelLanes : Avx512Sums {
  static constexpr int kRows = 6, kColumns = 4;
  static constexpr int kMaxRows = 192, kMemoryBoundRows = kRows, kWidth = kPanelColumns, kBlockBytes = 16384;
};

struct Fp32Rows : RowLanes, Fp32Elements {
  static constexpr int kStep = 16, kDepth = kStep, kXBytes = 64;
  using XStep = __m512;
  using WStep = __m512;
  static void pack(const float* from, char* to) { std::memcpy(to, from, kXBytes); }
  static XStep load_x(const char* p) { return _mm512_load_ps(p); }
  static WStep load_w(const float* p) { return _mm512_loadu_ps(p); }
  static Sums multiply_add(XStep x, WStep w, Sums sums) { return _mm512_fmadd_ps(x, w, sums); }
};

struct Fp32Panels : PanelLanes, Fp32Elements {
  static constexpr int kStep = 16, kDepth = 1, kXBytes = 4;
  using XStep = __m512;
  using WStep = __m512;
  static void pack(const float* from, char* to) { std::memcpy(to, from, kXBytes); }
  static XStep load_x(const char* p) { return _mm512_set1_ps(*reinterpret_cast<const float*>(p)); }
  static WStep load_w(const float* p) { return _mm512_loadu_ps(p); }
  static Sums multiply_add(XStep x, WStep w, Sums sums) { return _mm512_fmadd_ps(x, w, sums); }
};

// bf16 with AVX512_BF16: each dpbf16 multiplies two pairs per lane and adds both products to an fp32 lane. Its
// instructions take subnormal numbers for zero.
struct Bf16Native : Bf16Elements {
  static void round(const float* sums, const uint16_t* bias, int64_t count, uint16_t* y) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      __m512 sum = _mm512_loadu_ps(sums + i);
      if (bias != nullptr) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bias + i)));
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(y + i), (__m256i)_mm512_cvtneps_pbh(sum));
    }
    Bf16Elements::round(sums + i, bias == nullptr ? nullptr : bias + i, count - i, y + i);
  }
  static constexpr int kStep = 32;
  using XStep = __m512i;
  using WStep = __m512i;
  static WStep load_w(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static __m512 multiply_add(XStep x, WStep w, __m512 sums) { return _mm512_dpbf16_ps(sums, (__m512bh)x, (__m512bh)w); }
};

struct Bf16NativeRows : RowLanes, Bf16Native {
  static constexpr int kDepth = kStep, kXBytes = 64;
  static void pack(const uint16_t* from, char* to) { std::memcpy(to, from, kXBytes); }
  static XStep load_x(const char* p) { return _mm512_load_si512(p); }
};

struct Bf16NativePanels : PanelLanes, Bf16Native {
  static constexpr int kDepth = 2, kXBytes = 4;
  static void pack(const uint16_t* from, char* to) { std::memcpy(to, from, kXBytes); }
  static XStep load_x(const char* p) {
    int32_t pair;  // copied, because rows of x may begin at any element
    std::memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
};

// bf16 without AVX512_BF16: even and odd elements are converted to separate fp32 vectors, one by a shift, one by a
// mask.
struct Bf16Emulated : Bf16Elements {
  static constexpr int kStep = 32;
  struct XStep {
    __m512 even, odd;
  };
  using WStep = XStep;
  static WStep load_w(const uint16_t* p) {
    const __m512i both = _mm512_loadu_si512(p);
    const __m512i odd = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(odd)};
  }
  static __m512 multiply_add(const XStep& x, const WStep& w, __m512 sums) {
    return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, sums));
  }
};

struct Bf16EmulatedRows : RowLanes, Bf16Emulated {
  static constexpr int kColumns = 4;
  static constexpr int kDepth = kStep, kXBytes = 128;
  static void pack(const uint16_t* from, char* to) {
    const WStep step = load_w(from);
    _mm512_store_ps(to, step.even);
    _mm512_store_ps(to + 64, step.odd);
  }
  static XStep load_x(const char* p) { return {_mm512_load_ps(p), _mm512_load_ps(p + 64)}; }
};

struct Bf16EmulatedPanels : PanelLanes, Bf16Emulated {
  static constexpr int kColumns = 3;
  static constexpr int kDepth = 2, kXBytes = 8;
  static void pack(const uint16_t* from, char* to) {
    const float pair[2] = {bf16_to_f32(from[0]), bf16_to_f32(from[1])};
    std::memcpy(to, pair, sizeof(pair));
  }
  static XStep load_x(const char* p) {
    const auto* const pair = reinterpret_cast<const float*>(p);
    return {_mm512_set1_ps(pair[0]), _mm512_set1_ps(pair[1])};
  }
};

}  // namespace

const Kernels& kernels_avx512(DType dtype, bool is_packed, bool has_bf16_products) {
  static constexpr Kernels fp32_rows = make_kernels<Fp32Rows>("avx512"),
                           fp32_panels = make_kernels<Fp32Panels>("avx512"),
                           bf16_emulated_rows = make_kernels<Bf16EmulatedRows>("avx512"),
                           bf16_emulated_panels = make_kernels<Bf16EmulatedPanels>("avx512"),
                           bf16_native_rows = make_kernels<Bf16NativeRows>("avx512_bf16"),
                           bf16_native_panels = make_kernels<Bf16NativePanels>("avx512_bf16");
  if (dtype == DType::kF32) return is_packed ? fp32_panels : fp32_rows;
  if (has_bf16_products) return is_packed ? bf16_native_panels : bf16_native_rows;
  return is_packed ? bf16_emulated_panels : bf16_emulated_rows;
}

}  // namespace fused_tp::matmul

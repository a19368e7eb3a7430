// few_rows kernels for AVX2 + FMA: vectors of eight fp32 lanes.
#include <immintrin.h>

#include "matmul/kernels_impl.h"

namespace fused_tp::matmul {
namespace {

struct Avx2Sums {
  using Sums = __m256;
  static constexpr int kRows = 2, kColumns = 4;
  static Sums zero() { return _mm256_setzero_ps(); }
  // Neighbours are added pairwise, so that three levels of additions add the lanes of all eight.
  static constexpr int kReduced = 8;
  static void reduce(const Sums* sums, float* to) {
    const __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    const __m256 last = _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
    _mm256_storeu_ps(
        to, _mm256_add_ps(_mm256_permute2f128_ps(first, last, 0x20), _mm256_permute2f128_ps(first, last, 0x31)));
  }
};

struct Fp32Lanes : Avx2Sums, Fp32Elements {
  static constexpr int kStep = 8, kXBytes = 32;
  using XStep = __m256;
  using WStep = __m256;
  static void pack(const float* from, char* to) { std::memcpy(to, from, kXBytes); }
  static XStep load_x(const char* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
  static WStep load_w(const float* p) { return _mm256_loadu_ps(p); }
  static Sums multiply_add(XStep x, WStep w, Sums sums) { return _mm256_fmadd_ps(x, w, sums); }
};

// bf16 without AVX512_BF16: even and odd elements are converted to separate fp32 vectors, one by a shift, one by a
// mask.
struct Bf16EmulatedLanes : Avx2Sums, Bf16Elements {
  static constexpr int kRows = 4, kColumns = 2;
  static constexpr int kStep = 16, kXBytes = 64;
  struct XStep {
    __m256 even, odd;
  };
  using WStep = XStep;
  static WStep load_w(const uint16_t* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
  }
  static void pack(const uint16_t* from, char* to) {
    const WStep step = load_w(from);
    _mm256_store_ps(reinterpret_cast<float*>(to), step.even);
    _mm256_store_ps(reinterpret_cast<float*>(to) + 8, step.odd);
  }
  static XStep load_x(const char* p) {
    const auto* const lanes = reinterpret_cast<const float*>(p);
    return {_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8)};
  }
  static Sums multiply_add(const XStep& x, const WStep& w, Sums sums) {
    return _mm256_fmadd_ps(x.odd, w.odd, _mm256_fmadd_ps(x.even, w.even, sums));
  }
};

}  // namespace

const Kernels& kernels_avx2(DType dtype) {
  static constexpr Kernels fp32 = make_kernels<Fp32Lanes>("avx2"),
                           bf16_emulated = make_kernels<Bf16EmulatedLanes>("avx2");
  return dtype == DType::kF32 ? fp32 : bf16_emulated;
}

}  // namespace fused_tp::matmul

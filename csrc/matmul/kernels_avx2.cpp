// Matmul kernels for AVX2 + FMA: vectors of eight fp32 lanes.
#include <immintrin.h>

#include "matmul/kernels_impl.h"

namespace fused_tp::matmul {
namespace {

struct RowLanes {
  using Sums = __m256;
  static constexpr int kRows = 2, kColumns = 4;
  static constexpr int kMaxRows = kMaxFewRows, kMemoryBoundRows = 12, kWidth = 1, kBlockBytes = 8192;
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

// Sums of a panel: two vectors.
struct PanelLanes {
  struct Sums {
    __m256 first, last;
  };
  static constexpr int kRows = 4, kColumns = 1;
  static constexpr int kMaxRows = 192, kMemoryBoundRows = kRows, kWidth = kPanelColumns, kBlockBytes = 16384;
  static Sums zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
};

struct Fp32Rows : RowLanes, Fp32Elements {
  static constexpr int kStep = 8, kDepth = kStep, kXBytes = 32;
  using XStep = __m256;
  using WStep = __m256;
  static void pack(const float* from, char* to) { std::memcpy(to, from, kXBytes); }
  static XStep load_x(const char* p) { return _mm256_load_ps(reinterpret_cast<const float*>(p)); }
  static WStep load_w(const float* p) { return _mm256_loadu_ps(p); }
  static Sums multiply_add(XStep x, WStep w, Sums sums) { return _mm256_fmadd_ps(x, w, sums); }
};

struct Fp32Panels : PanelLanes, Fp32Elements {
  static constexpr int kStep = 16, kDepth = 1, kXBytes = 4;
  using XStep = __m256;
  using WStep = Sums;
  static void pack(const float* from, char* to) { std::memcpy(to, from, kXBytes); }
  static XStep load_x(const char* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
  static WStep load_w(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Sums multiply_add(XStep x, const WStep& w, const Sums& sums) {
    return {_mm256_fmadd_ps(x, w.first, sums.first), _mm256_fmadd_ps(x, w.last, sums.last)};
  }
};

// bf16 without AVX512_BF16: even and odd elements are converted to separate fp32 vectors, one by a shift, one by a
// mask.
struct EvenAndOdd {
  __m256 even, odd;
};

EvenAndOdd load_bf16(const uint16_t* p) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i odd = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(odd)};
}

__m256 multiply_add_bf16(const EvenAndOdd& x, const EvenAndOdd& w, __m256 sums) {
  return _mm256_fmadd_ps(x.odd, w.odd, _mm256_fmadd_ps(x.even, w.even, sums));
}

struct Bf16Rows : RowLanes, Bf16Elements {
  static constexpr int kRows = 4, kColumns = 2;
  static constexpr int kStep = 16, kDepth = kStep, kXBytes = 64;
  using XStep = EvenAndOdd;
  using WStep = EvenAndOdd;
  static WStep load_w(const uint16_t* p) { return load_bf16(p); }
  static void pack(const uint16_t* from, char* to) {
    const EvenAndOdd step = load_bf16(from);
    _mm256_store_ps(reinterpret_cast<float*>(to), step.even);
    _mm256_store_ps(reinterpret_cast<float*>(to) + 8, step.odd);
  }
  static XStep load_x(const char* p) {
    const auto* const lanes = reinterpret_cast<const float*>(p);
    return {_mm256_load_ps(lanes), _mm256_load_ps(lanes + 8)};
  }
  static Sums multiply_add(const XStep& x, const WStep& w, Sums sums) { return multiply_add_bf16(x, w, sums); }
};

struct Bf16Panels : PanelLanes, Bf16Elements {
  static constexpr int kStep = 32, kDepth = 2, kXBytes = 8;
  using XStep = EvenAndOdd;
  struct WStep {
    EvenAndOdd first, last;
  };
  static void pack(const uint16_t* from, char* to) {
    const float pair[2] = {bf16_to_f32(from[0]), bf16_to_f32(from[1])};
    std::memcpy(to, pair, sizeof(pair));
  }
  static XStep load_x(const char* p) {
    const auto* const pair = reinterpret_cast<const float*>(p);
    return {_mm256_broadcast_ss(pair), _mm256_broadcast_ss(pair + 1)};
  }
  static WStep load_w(const uint16_t* p) { return {load_bf16(p), load_bf16(p + 16)}; }
  static Sums multiply_add(const XStep& x, const WStep& w, const Sums& sums) {
    return {multiply_add_bf16(x, w.first, sums.first), multiply_add_bf16(x, w.last, sums.last)};
  }
};

}  // namespace

const Kernels& kernels_avx2(DType dtype, bool is_packed) {
  static constexpr Kernels fp32_rows = make_kernels<Fp32Rows>("avx2"), fp32_panels = make_kernels<Fp32Panels>("avx2"),
                           bf16_rows = make_kernels<Bf16Rows>("avx2"), bf16_panels = make_kernels<Bf16Panels>("avx2");
  if (dtype == DType::kF32) return is_packed ? fp32_panels : fp32_rows;
  return is_packed ? bf16_panels : bf16_rows;
}

}  // namespace fused_tp::matmul

#include "attention/kernels.h"

#include <cstdlib>
#include <cstring>
#include <string>

#if FUSED_TP_X86
#include <cpuid.h>
#endif

namespace fused_tp::attention {

#if FUSED_TP_X86

const Kernels& kernels_for(DType dtype, const char* isa) {
  static const std::string environment = [] {
    const char* asked = std::getenv("FUSED_TP_ISA");
    return std::string(asked == nullptr ? "" : asked);
  }();
  const std::string asked = isa == nullptr || *isa == '\0' ? environment : isa;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && asked != "plain" && asked != "avx2")
    return kernels_avx512(dtype, __builtin_cpu_supports("avx512bf16") != 0);
  if (avx2 && asked != "plain") return kernels_avx2(dtype);
  return kernels_plain(dtype);
}

bool has_matrix_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1u << 22;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0;
}

#else

const Kernels& kernels_for(DType dtype, const char*) { return kernels_plain(dtype); }

bool has_matrix_tiles() { return false; }

#endif

}  // namespace fused_tp::attention

#include "attention/kernels.h"

#include "isa.h"

#if FUSED_TP_X86
#include <cpuid.h>
#endif

namespace fused_tp::attention {

#if FUSED_TP_X86

const Kernels& kernels_for(DType dtype, const char* isa) {
  static const Isa usual = isa_here();
  const Isa asked = isa == nullptr || *isa == '\0' ? usual : isa_here(isa);
  if (asked >= Isa::kAvx512) return kernels_avx512(dtype, asked == Isa::kAvx512Bf16);
  return asked == Isa::kAvx2 ? kernels_avx2(dtype) : kernels_plain(dtype);
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

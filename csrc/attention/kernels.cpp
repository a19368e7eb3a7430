#include "attention/kernels.h"

#include "isa.h"

#if FUSED_TP_X86
#include <cpuid.h>
#endif

namespace fused_tp::attention {

#if FUSED_TP_X86

const Kernels& select_kernels(DType dtype, const char* isa) {
  static const Isa default_isa = detect_isa();
  const Isa selected = isa == nullptr || *isa == '\0' ? default_isa : detect_isa(isa);
  if (selected >= Isa::kAvx512) return kernels_avx512(dtype, selected == Isa::kAvx512Bf16);
  return selected == Isa::kAvx2 ? kernels_avx2(dtype) : kernels_plain(dtype);
}

bool has_matrix_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1u << 22;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kAmxBf16) != 0;
}

#else

const Kernels& select_kernels(DType dtype, const char*) { return kernels_plain(dtype); }

bool has_matrix_tiles() { return false; }

#endif

}  // namespace fused_tp::attention

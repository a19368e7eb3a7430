#include "kernels.h"

#include "isa.h"

namespace fused_tp::shm {

const Kernels& select_kernels([[maybe_unused]] Isa isa) {
#if FUSED_TP_X86
  if (isa >= Isa::kAvx512) return kernels_avx512(isa == Isa::kAvx512Bf16);
  if (isa == Isa::kAvx2) return kernels_avx2();
#endif
  return kernels_plain();
}

const Kernels& kernels() {
  static const Kernels& table = select_kernels(detect_isa());
  return table;
}

}  // namespace fused_tp::shm

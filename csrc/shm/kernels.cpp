#include "kernels.h"

#include "isa.h"

namespace fused_tp::shm {

const Kernels& kernels_for([[maybe_unused]] Isa isa) {
#if FUSED_TP_X86
  if (isa >= Isa::kAvx512) return kernels_avx512(isa == Isa::kAvx512Bf16);
  if (isa == Isa::kAvx2) return kernels_avx2();
#endif
  return kernels_plain();
}

const Kernels& kernels() {
  static const Kernels& chosen = kernels_for(isa_here());
  return chosen;
}

}  // namespace fused_tp::shm

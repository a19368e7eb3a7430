#include "kernels.h"

#include <cstdlib>
#include <cstring>

namespace fused_tp::shm {
namespace {

const Kernels& choose() {
#if FUSED_TP_X86
  const char* asked = std::getenv("FUSED_TP_ISA");
  const bool plain = asked != nullptr && std::strcmp(asked, "plain") == 0;
  const bool at_most_avx2 = asked != nullptr && std::strcmp(asked, "avx2") == 0;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bf16");
  if (avx512 && !plain && !at_most_avx2) return kernels_avx512();
  if (avx2 && !plain) return kernels_avx2();
#endif
  return kernels_plain();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace fused_tp::shm

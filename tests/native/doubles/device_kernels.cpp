// A library of device kernels that launches nothing; a launch on stream -1 fails. Compiled with -DABI=... and, for the
// GPUs that it claims to support, -DBUILT_FOR=...
#include <tuple>

#include "cuda/launchers.h"
using namespace fused_tp::cuda;

namespace {
template <typename... T>
int32_t launch(T... arguments) {
  const auto stream = std::get<sizeof...(T) - 1>(std::make_tuple(arguments...));
  return (int64_t)stream == -1 ? 700 : 0;
}
const char* error_string(int32_t) { return "an illegal memory access"; }

const Launchers launchers{ABI, launch, launch, launch, launch, launch, launch, launch, error_string, nullptr};
}  // namespace

#ifdef BUILT_FOR
[[gnu::used]] extern const char built_for[] = "fused_tp device kernels: " BUILT_FOR;
#endif

extern "C" [[gnu::visibility("default")]] const Launchers* fused_tp_launchers() { return &launchers; }

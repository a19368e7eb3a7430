#include "launch.cuh"
#include "ops.h"
#include "reduce_scatter.cuh"

namespace fused_tp::cuda {

int32_t launch_reduce_scatter(const Workspace* workspace, const void* in, void* out, int64_t count, int64_t chunk,
                              int32_t dtype, Bias bias, int32_t blocks, void* stream) {
  if (!is_valid(workspace, blocks) || count < 0 || chunk < 0) return cudaErrorInvalidValue;
  const int world = workspace->world;
  // What no rank would get.
  if (chunk < ceil_div(count, world)) return cudaErrorInvalidValue;
  if (world == 1) return launch_sum_terms(in, 1, count, out, count, dtype, bias, stream);
  return for_dtype(dtype, [&](auto type) -> int32_t {
    using T = typename decltype(type)::type;
    constexpr int64_t kBytes = sizeof(T);
    const int64_t longest = std::min(chunk, count);
    const int64_t own = std::clamp<int64_t>(count - workspace->rank * chunk, 0, chunk);
    const Plan plan = exchange_plan(longest * kBytes, world, blocks);
    if (!has_room(*workspace, plan) || !is_array(in, count, kBytes) || !is_array(out, own, kBytes) ||
        !is_valid(bias, kBytes)) {
      return cudaErrorInvalidValue;
    }
    const ReduceScatter job{in, out, count, chunk, ceil_div(ceil_div(longest, kPacketElements<T>), blocks), bias};
    return for_world(world, [&](auto constant) -> int32_t {
      return launch(reduce_scatter_kernel<T, decltype(constant)::value>, blocks, kThreads, stream, *workspace, plan,
                    job);
    });
  });
}

int32_t preload_reduce_scatter() {
  return load_all([](auto type, auto constant) -> int32_t {
    using T = typename decltype(type)::type;
    constexpr int kWorld = decltype(constant)::value;
    return load(reduce_scatter_kernel<T, kWorld>);
  });
}

}  // namespace fused_tp::cuda

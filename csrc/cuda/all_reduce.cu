#include "all_reduce_multimem.cuh"
#include "all_reduce_one_shot.cuh"
#include "all_reduce_two_shot.cuh"
#include "launch.cuh"

namespace fused_tp::cuda {

int32_t launch_all_reduce(const Workspace* workspace, Algorithm algorithm, const void* in, void* out, int64_t count,
                          int32_t dtype, Bias bias, int32_t blocks, void* stream) {
  const int world = workspace->world;
  // One rank has no peers: only the bias and the rounding remain.
  if (world == 1) return launch_sum_terms(in, 1, count, out, count, dtype, bias, stream);
  if (algorithm == Algorithm::kMultimem && !workspace->multicast) return cudaErrorNotSupported;
  return for_dtype(dtype, [&](auto type) -> int32_t {
    using T = typename decltype(type)::type;
    constexpr int64_t kBytes = sizeof(T);
    const Plan plan = all_reduce_plan(algorithm, count, kBytes, world, blocks);
    if (!has_room(*workspace, plan)) return cudaErrorInvalidValue;
    const int64_t elements = algorithm == Algorithm::kOneShot ? count : owned_elements(count, kBytes, world);
    const AllReduce job{in, out, count, ceil_div(ceil_div(elements, kPacketElements<T>), blocks), bias};
    if (algorithm == Algorithm::kMultimem) {
      // A kernel that the driver compiled from PTX for an earlier GPU contains no multimem instructions.
      cudaFuncAttributes attributes = {};
      if (const int32_t error = load_kernel(Kernel<all_reduce_multimem<T>>::address(), &attributes)) return error;
      if (attributes.ptxVersion < 90) return cudaErrorNotSupported;
      return launch(Kernel<all_reduce_multimem<T>>{}, blocks, kThreads, stream, *workspace, plan, job);
    }
    return for_world(world, [&](auto constant) -> int32_t {
      constexpr int kWorld = decltype(constant)::value;
      auto launch_kernel = [&](auto kernel) { return launch(kernel, blocks, kThreads, stream, *workspace, plan, job); };
      return algorithm == Algorithm::kOneShot ? launch_kernel(Kernel<all_reduce_one_shot<T, kWorld>>{})
                                              : launch_kernel(Kernel<all_reduce_two_shot<T, kWorld>>{});
    });
  });
}

}  // namespace fused_tp::cuda

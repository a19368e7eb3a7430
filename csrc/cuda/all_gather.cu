#include "all_gather.cuh"
#include "launch.cuh"
#include "ops.h"

namespace fused_tp::cuda {

int32_t launch_all_gather(const Workspace* workspace, const void* in, void* out, int64_t count, int64_t chunk,
                          int32_t blocks, void* stream) {
  if (!is_valid(workspace, blocks) || count < 0 || chunk < 0) return cudaErrorInvalidValue;
  const int world = workspace->world;
  // What no rank would give.
  if (chunk < ceil_div(count, world)) return cudaErrorInvalidValue;
  const int64_t longest = std::min(chunk, count);
  const int64_t own = std::clamp<int64_t>(count - workspace->rank * chunk, 0, chunk);
  const Plan plan = exchange_plan(longest, world, blocks);
  if (!has_room(*workspace, plan) || !is_array(in, own, 1) || !is_array(out, count, 1)) return cudaErrorInvalidValue;
  const AllGather job{in, out, count, chunk, ceil_div(ceil_div(longest, 16), blocks)};
  return launch(all_gather_kernel, blocks, kThreads, stream, *workspace, plan, job);
}

int32_t preload_all_gather() { return load(all_gather_kernel); }

}  // namespace fused_tp::cuda

// Ends once all ranks have launched it.
#include "launch.cuh"
#include "signals.cuh"

namespace fused_tp::cuda {

static __global__ void __launch_bounds__(kThreads, 1) barrier_kernel(const __grid_constant__ Workspace workspace) {
  end(begin(workspace, Op::kBarrier));
}

int32_t launch_barrier(const Workspace* workspace, void* stream) {
  if (!has_room(*workspace, Plan{workspace->world, 1})) return cudaErrorInvalidValue;
  // A warp would be enough, with one flag per rank, but threads step by kThreads.
  return launch(Kernel<barrier_kernel>{}, 1, kThreads, stream, *workspace);
}

}  // namespace fused_tp::cuda

// Barrier: the kernel ends once all ranks have begun it.
#include "launch.cuh"
#include "signals.cuh"

namespace fused_tp::cuda {

static __global__ void __launch_bounds__(kThreads, 1) barrier_kernel(const __grid_constant__ Workspace workspace) {
  end(begin(workspace, Op::kBarrier));
}

int32_t launch_barrier(const Workspace* workspace, void* stream) {
  if (!has_room(*workspace, Plan{workspace->world, 1})) return cudaErrorInvalidValue;
  // One flag per rank needs at most 63 threads, but the loops of begin and end assume kThreads.
  return launch(Kernel<barrier_kernel>{}, 1, kThreads, stream, *workspace);
}

}  // namespace fused_tp::cuda

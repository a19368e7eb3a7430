// Ends once all ranks have launched it.
#pragma once

#include "signals.cuh"

namespace fused_tp::cuda {

static __global__ void __launch_bounds__(kThreads, 1) barrier_kernel(const __grid_constant__ Workspace workspace) {
  end(begin(workspace, Op::kBarrier));
}

}  // namespace fused_tp::cuda

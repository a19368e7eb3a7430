// word += 1, for the host to see. One writer, so no atomic: not every host takes those of a GPU in its own memory.
#pragma once

#include "memory.cuh"

namespace fused_tp::cuda {

static __global__ void count_up_kernel(int64_t* word) { store_release_system(word, load_relaxed_system(word) + 1); }

}  // namespace fused_tp::cuda

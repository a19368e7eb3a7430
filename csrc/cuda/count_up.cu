#include "count_up.cuh"
#include "launch.cuh"
#include "ops.h"

namespace fused_tp::cuda {

int32_t launch_count_up(int64_t* word, void* stream) {
  if (!word || !is_array(word, 1, 8)) return cudaErrorInvalidValue;
  return launch(count_up_kernel, 1, 1, stream, word);
}

int32_t preload_count_up() { return load(count_up_kernel); }

}  // namespace fused_tp::cuda

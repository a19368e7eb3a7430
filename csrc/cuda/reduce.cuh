// Sums over groups of a block's threads, in a fixed order: the same bits on every rank, run after run.
#pragma once

#include "signals.cuh"

namespace fused_tp::cuda {

// Threads [first, first + threads) of the block: a power of two, and at least a warp, of them.
struct Group {
  int threads;
  __device__ int index() const { return threadIdx.x / threads; }
  __device__ int lane() const { return threadIdx.x % threads; }
  __device__ int count() const { return kThreads / threads; }
};

// The sum of all the group's values, for each of its threads. All threads of the block come here together.
__device__ __forceinline__ float sum_over(const Group& group, float value) {
  __shared__ float of_warp[kThreads / kWarpSize];
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  __syncthreads();  // the last one's values have been read
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  const int warps = group.threads / kWarpSize;
  const float* mine = of_warp + group.index() * warps;
  value = mine[0];
  for (int warp = 1; warp < warps; ++warp) value += mine[warp];
  return value;
}

}  // namespace fused_tp::cuda

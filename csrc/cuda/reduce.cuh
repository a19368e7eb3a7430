// Sums and maxima over groups of a block's threads, in a fixed order: the same bits on every rank, run after run.
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

// combine(...) of all the group's values, for each of its threads. All threads of the block come here together.
template <class Combine>
__device__ __forceinline__ float reduce(const Group& group, float value, Combine&& combine) {
  __shared__ float of_warp[kThreads / kWarpSize];
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  __syncthreads();  // the last one's values have been read
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  const int warps = group.threads / kWarpSize;
  const float* mine = of_warp + group.index() * warps;
  value = mine[0];
  for (int warp = 1; warp < warps; ++warp) value = combine(value, mine[warp]);
  return value;
}

__device__ __forceinline__ float sum_over(const Group& group, float value) {
  return reduce(group, value, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ float max_over(const Group& group, float value) {
  return reduce(group, value, [](float a, float b) { return fmaxf(a, b); });
}

}  // namespace fused_tp::cuda

// The part of CUDA's runtime that the kernels in csrc/cuda use, for a C++ compiler: blocks run one after the other on
// the launching thread, their threads as fibers (fibers.h). The include path finds it instead of CUDA's header.
//
// Launches are synchronous, whatever their stream.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
// Fibers of a block share an OS thread, ranks do not: thread_local memory is shared by exactly one block's threads.
#define __shared__ static thread_local
#define __launch_bounds__(...)

using gpu_on_cpu::blockIdx;
using gpu_on_cpu::dim3;
using gpu_on_cpu::gridDim;
#define threadIdx (gpu_on_cpu::thread_index())

inline void __syncthreads() { gpu_on_cpu::synchronize(true); }
inline int __syncthreads_and(int predicate) { return gpu_on_cpu::synchronize(predicate != 0); }

inline int cudaGetLastError() { return 0; }
#define __grid_constant__

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorNotSupported = 801 };
using cudaStream_t = struct Stream*;

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "operation not supported";
}

// Kernels are always loaded and support all features of the latest GPU.
struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  gpu_on_cpu::run_grid(config->gridDim, config->blockDim, [&] { kernel(static_cast<Parameters>(arguments)...); });
  return cudaSuccess;
}

// Warps have one thread, so there is no other lane to exchange with; loops over lanes never call this.
inline float __shfl_xor_sync(unsigned, float value, int) { return value; }

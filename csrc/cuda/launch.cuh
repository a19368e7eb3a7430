// Helpers of the launchers: choice of a kernel, and its launch. The native core has checked the arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>
#include <vector>

#include "../dtype.h"
#include "launchers.h"
#include "signals.cuh"

namespace fused_tp::cuda {

// The launchers; library.cu builds their table. launchers.h describes them and their arguments.
template <class Pointer>
using Function = std::remove_pointer_t<Pointer>;

Function<decltype(Launchers::barrier)> launch_barrier;
Function<decltype(Launchers::all_reduce)> launch_all_reduce;
Function<decltype(Launchers::reduce_scatter)> launch_reduce_scatter;
Function<decltype(Launchers::all_gather)> launch_all_gather;
Function<decltype(Launchers::all_to_all)> launch_all_to_all;
Function<decltype(Launchers::all_reduce_rms_norm)> launch_all_reduce_rms_norm;
Function<decltype(Launchers::sum_terms)> launch_sum_terms;

inline bool has_room(const Workspace& workspace, const Plan& plan) {
  return plan.workspace_bytes() <= 2 * workspace.half_bytes;
}

// Calls choose(type) with the type of numbers of `dtype`: std::common_type<T>, used as a name only.
template <class Choose>
int32_t for_dtype(int32_t dtype, Choose&& choose) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF32:
      return choose(std::common_type<float>{});
    case DType::kBF16:
      return choose(std::common_type<__nv_bfloat16>{});
    case DType::kF16:
      return choose(std::common_type<__half>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// Calls choose(world) with a constant: the number of ranks if loops over them are unrolled, else 0. On a CPU, where
// kernels are only tested, two numbers represent all.
template <class Choose>
int32_t for_world(int32_t world, Choose&& choose) {
  switch (world) {
    case 2:
      return choose(std::integral_constant<int, 2>{});
#ifdef __CUDACC__
    case 4:
      return choose(std::integral_constant<int, 4>{});
    case 8:
      return choose(std::integral_constant<int, 8>{});
#endif
    default:
      return choose(std::integral_constant<int, 0>{});
  }
}

// All kernels that a launcher of this library can choose; see Kernel.
inline std::vector<const void*>& all_kernels() {
  static std::vector<const void*> found;
  return found;
}

// A kernel as a type. A launch of it anywhere in the source lists it for `preload`, so that none can be forgotten.
template <auto kFunction>
struct Kernel {
  static const void* address() { return reinterpret_cast<const void*>(kFunction); }
  static inline const bool listed = (all_kernels().push_back(address()), true);
};

// Loads a kernel on the current device, by a query of its attributes.
inline int32_t load(const void* kernel, cudaFuncAttributes* attributes) {
  const cudaError_t error = cudaFuncGetAttributes(attributes, kernel);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
}

template <auto kFunction, class... Arguments>
int32_t launch(Kernel<kFunction>, int32_t blocks, int threads, void* stream, Arguments... arguments) {
  static_cast<void>(Kernel<kFunction>::listed);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kFunction, arguments...);
  // The error is returned here, so the runtime must not report it to the next caller.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
}

}  // namespace fused_tp::cuda

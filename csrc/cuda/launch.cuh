// Helpers of the launchers: choice of a template instance, and its launch. The native core has checked the arguments.
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

// The launchers, with the signatures of launchers.h, which describes them. library.cu puts them into a table.
template <class Pointer>
using LauncherFunction = std::remove_pointer_t<Pointer>;

LauncherFunction<decltype(Launchers::barrier)> launch_barrier;
LauncherFunction<decltype(Launchers::all_reduce)> launch_all_reduce;
LauncherFunction<decltype(Launchers::reduce_scatter)> launch_reduce_scatter;
LauncherFunction<decltype(Launchers::all_gather)> launch_all_gather;
LauncherFunction<decltype(Launchers::all_to_all)> launch_all_to_all;
LauncherFunction<decltype(Launchers::all_reduce_rms_norm)> launch_all_reduce_rms_norm;
LauncherFunction<decltype(Launchers::sum_terms)> launch_sum_terms;

inline bool has_room(const Workspace& workspace, const Plan& plan) {
  return plan.workspace_bytes() <= 2 * workspace.half_bytes;
}

// Calls choose(std::common_type<T>{}) with the element type T of `dtype`. std::common_type only carries the type.
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

// Calls choose(std::integral_constant) with the number of ranks if the kernel unrolls its loops over them, else with 0.
// The CPU build, which is for tests only, has the instances 2 and 0, to save compile time.
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

// All kernels of this library. Each Kernel<...> that is launched somewhere adds itself.
inline std::vector<const void*>& all_kernels() {
  static std::vector<const void*> kernels;
  return kernels;
}

// A kernel function as a type. Instantiating launch() for it registers it in all_kernels() before main, so `preload`
// loads every kernel that can be launched.
template <auto kFunction>
struct Kernel {
  static const void* address() { return reinterpret_cast<const void*>(kFunction); }
  static inline const bool is_registered = (all_kernels().push_back(address()), true);
};

// Loads a kernel on the current device, which a query of its attributes does.
inline int32_t load_kernel(const void* kernel, cudaFuncAttributes* attributes) {
  const cudaError_t error = cudaFuncGetAttributes(attributes, kernel);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
}

template <auto kFunction, class... Arguments>
int32_t launch(Kernel<kFunction>, int32_t blocks, int threads, void* stream, Arguments... arguments) {
  static_cast<void>(Kernel<kFunction>::is_registered);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kFunction, arguments...);
  // Clear the runtime's last error: the caller receives it here, and a later cudaGetLastError must not return it again.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
}

}  // namespace fused_tp::cuda

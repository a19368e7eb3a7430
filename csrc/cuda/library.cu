#include "launch.cuh"

namespace fused_tp::cuda {

namespace {

const char* error_string(int32_t error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

int32_t preload() {
  for (const void* kernel : all_kernels()) {
    cudaFuncAttributes attributes = {};
    if (const int32_t error = load_kernel(kernel, &attributes)) return error;
  }
  return cudaSuccess;
}

constexpr Launchers kLaunchers = {
    kAbiVersion,       launch_barrier,    launch_all_reduce,          launch_reduce_scatter,
    launch_all_gather, launch_all_to_all, launch_all_reduce_rms_norm, launch_sum_terms,
    error_string,      preload,
};

}  // namespace

}  // namespace fused_tp::cuda

extern "C" __attribute__((visibility("default"))) const fused_tp::cuda::Launchers* fused_tp_launchers() {
  return &fused_tp::cuda::kLaunchers;
}

// The launchers, one file each; library.cu makes the table of them. What they do and take is in launchers.h.
#pragma once

#include "launchers.h"

namespace fused_tp::cuda {

int32_t launch_barrier(const Workspace*, void* stream);
int32_t launch_all_reduce(const Workspace*, Algorithm, const void* in, void* out, int64_t count, int32_t dtype, Bias,
                          int32_t blocks, void* stream);
int32_t launch_reduce_scatter(const Workspace*, const void* in, void* out, int64_t count, int64_t chunk, int32_t dtype,
                              Bias, int32_t blocks, void* stream);
int32_t launch_all_gather(const Workspace*, const void* in, void* out, int64_t count, int64_t chunk, int32_t blocks,
                          void* stream);
int32_t launch_all_to_all(const Workspace*, const void* in, void* out, const AllToAllLayout*, int32_t blocks,
                          void* stream);
int32_t launch_all_reduce_rms_norm(const Workspace*, Algorithm, const void* partial, const RmsNorm*, int32_t dtype,
                                   int32_t blocks, void* stream);
int32_t launch_sum_terms(const void* terms, int32_t count_of_terms, int64_t stride, void* out, int64_t count,
                         int32_t dtype, Bias, void* stream);

// Load the kernels that the launcher of that name chooses from, on the current device.
int32_t preload_barrier();
int32_t preload_all_reduce();
int32_t preload_reduce_scatter();
int32_t preload_all_gather();
int32_t preload_all_to_all();
int32_t preload_all_reduce_rms_norm();
int32_t preload_sum_terms();

}  // namespace fused_tp::cuda

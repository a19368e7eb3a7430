// The C interface of the library of device kernels: the native core loads that library only if there is a GPU.
//
// All pointers but those to structs are device memory. Every function launches on `stream` and returns a cudaError_t, 0
// for success. Ranks of a group make the same calls, with equal sizes and numbers of blocks; blocks wait for those of
// the same number on other ranks, so all blocks of all ranks that share a GPU must fit on it at once.
#pragma once

#include <cstdint>

namespace fused_tp::cuda {

// Grows when a signature or a struct below changes: a library of another version is refused.
constexpr int32_t kAbiVersion = 4;

// One rank's workspace, created by triton_kernels/comm/signals.py.
struct Workspace {
  const uint64_t* addresses;  // [world]: the ranks' workspaces
  int64_t* state;
  int64_t* error;  // pinned host memory
  int64_t half_bytes;
  int64_t timeout_ns;
  uint64_t multicast;  // address that reaches all ranks' workspaces at once; 0: none
  int32_t rank;
  int32_t world;
};

// Added to a sum before it is rounded: element i gets data[i % columns]. data may be null.
struct Bias {
  const void* data;
  int64_t columns;
};

// An all-to-all of equal parts, in bytes. Part p of `in` is sent to rank p; part p of `out` is received from rank p. A
// part is [batches, rows] runs of row_bytes, with strides, so that a change of layout costs no separate pass.
struct AllToAllLayout {
  int64_t batches, rows, row_bytes;
  int64_t in_part_stride, in_batch_stride, in_row_stride;
  int64_t out_part_stride, out_batch_stride, out_row_stride;
};

struct RmsNorm {
  const void* residual;  // [rows, columns]
  const void* weight;    // [columns]
  void* normed;          // [rows, columns]
  void* new_residual;    // [rows, columns]
  int64_t rows, columns;
  double eps;
};

enum class Algorithm : int32_t { kOneShot = 0, kTwoShot = 1, kMultimem = 2 };

// dtype: numbers of csrc/dtype.h; sums take f32, bf16, f16.
struct Launchers {
  int32_t abi_version;
  int32_t (*barrier)(const Workspace*, void* stream);
  // out[i] = sum over ranks of in[i] (+ bias), in rank order (multimem: the switch's), the same bits on all ranks. out
  // may be in.
  int32_t (*all_reduce)(const Workspace*, Algorithm, const void* in, void* out, int64_t count, int32_t dtype, Bias,
                        int32_t blocks, void* stream);
  // Rank r gets elements [r * chunk, min((r + 1) * chunk, count)) of the sum.
  int32_t (*reduce_scatter)(const Workspace*, const void* in, void* out, int64_t count, int64_t chunk, int32_t dtype,
                            Bias, int32_t blocks, void* stream);
  // Rank r provides bytes [r * chunk, min((r + 1) * chunk, count)) of the whole.
  int32_t (*all_gather)(const Workspace*, const void* in, void* out, int64_t count, int64_t chunk, int32_t blocks,
                        void* stream);
  int32_t (*all_to_all)(const Workspace*, const void* in, void* out, const AllToAllLayout*, int32_t blocks,
                        void* stream);
  // new_residual = residual + sum over ranks of partial; normed = rms_norm(new_residual) * weight.
  int32_t (*all_reduce_rms_norm)(const Workspace*, Algorithm, const void* partial, const RmsNorm*, int32_t dtype,
                                 int32_t blocks, void* stream);
  // On this rank alone: out[i] = sum of terms[t * stride + i] (+ bias) in the order of t, in elements.
  int32_t (*sum_terms)(const void* terms, int32_t count_of_terms, int64_t stride, void* out, int64_t count,
                       int32_t dtype, Bias, void* stream);
  const char* (*error_string)(int32_t error);
  // Loads all kernels on the current device. A kernel that is loaded at its first launch may wait there for running
  // kernels, and so, if ranks share a process, for one that waits in turn for this launch.
  int32_t (*preload)();
};

}  // namespace fused_tp::cuda

// The library's only symbol.
extern "C" const fused_tp::cuda::Launchers* fused_tp_launchers();

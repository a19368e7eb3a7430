// The C interface of the library of device kernels, which the native core loads only if there is a GPU.
//
// Pointers to structs are host memory, all others device memory. Every function launches a kernel in `stream` and
// returns a cudaError_t, 0 for success. All ranks of a group make the same calls with the same sizes and numbers of
// blocks. A block waits for the block of the same index on other ranks, so all blocks of all ranks that share a GPU
// must be resident on it at once.
#pragma once

#include <cstdint>

namespace fused_tp::cuda {

// Increment it when a signature or struct below changes. The native core rejects a library of another version.
constexpr int32_t kAbiVersion = 4;

// One rank's workspace, created by triton_kernels/comm/signals.py.
struct Workspace {
  const uint64_t* addresses;  // [world]: addresses of the ranks' workspaces
  int64_t* state;             // words of protocol.h, in this rank's private memory
  int64_t* error;             // error record of protocol.h, in pinned host memory
  int64_t half_bytes;         // the halves of a workspace alternate between calls
  int64_t timeout_ns;
  uint64_t multicast;  // multicast address of all ranks' workspaces; 0: none
  int32_t rank;
  int32_t world;
};

// A bias: data[i % columns] is added to element i of a sum. data is null if there is none.
struct Bias {
  const void* data;
  int64_t columns;
};

// Layout of an all-to-all of equal parts; sizes and strides in bytes. Part p of `in` is sent to rank p, and part p of
// `out` is received from rank p. A part consists of [batches, rows] runs of row_bytes contiguous bytes.
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

// `dtype` is a number of csrc/dtype.h; sums support fp32, bf16 and fp16.
struct Launchers {
  int32_t abi_version;
  int32_t (*barrier)(const Workspace*, void* stream);
  // out[i] = sum over ranks of in[i] (+ bias), added in rank order (multimem: in the order of the switch). Results are
  // bitwise identical on all ranks. `out` may be `in`.
  int32_t (*all_reduce)(const Workspace*, Algorithm, const void* in, void* out, int64_t count, int32_t dtype, Bias,
                        int32_t blocks, void* stream);
  // Rank r receives elements [r * chunk, min((r + 1) * chunk, count)) of the sum.
  int32_t (*reduce_scatter)(const Workspace*, const void* in, void* out, int64_t count, int64_t chunk, int32_t dtype,
                            Bias, int32_t blocks, void* stream);
  // Rank r provides bytes [r * chunk, min((r + 1) * chunk, count)) of `out`.
  int32_t (*all_gather)(const Workspace*, const void* in, void* out, int64_t count, int64_t chunk, int32_t blocks,
                        void* stream);
  int32_t (*all_to_all)(const Workspace*, const void* in, void* out, const AllToAllLayout*, int32_t blocks,
                        void* stream);
  // new_residual = residual + sum over ranks of partial; normed = rms_norm(new_residual) * weight.
  int32_t (*all_reduce_rms_norm)(const Workspace*, Algorithm, const void* partial, const RmsNorm*, int32_t dtype,
                                 int32_t blocks, void* stream);
  // Local: out[i] = sum over t of terms[t * stride + i] (+ bias), in order of t. `stride` is in elements.
  int32_t (*sum_terms)(const void* terms, int32_t term_count, int64_t stride, void* out, int64_t count, int32_t dtype,
                       Bias, void* stream);
  const char* (*error_string)(int32_t error);
  // Loads all kernels on the current device. Otherwise CUDA loads a kernel at its first launch, which may wait for
  // running kernels. If ranks share a process, such a kernel may in turn wait for this launch: a deadlock.
  int32_t (*preload)();
};

}  // namespace fused_tp::cuda

// The only exported symbol of the library.
extern "C" const fused_tp::cuda::Launchers* fused_tp_launchers();

// Blocking collectives over shared memory. `in` and `out` are ordinary memory of this rank, not shared memory. `out`
// may equal `in` if both have the same size. All ranks of the group make the same call with the same signature.
//
// Large data passes through a small workspace in chunks, so that a peer reads each chunk while it is still in cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "group.h"

namespace fused_tp::shm {

// out = sum over ranks of in, `count` elements of signature.dtype.
void all_reduce(Group& group, const void* in, void* out, size_t count, const Signature& signature);

// All-reduce in place, in the workspaces of a call that is already in progress: every rank has written `count` elements
// to the start of its workspace, and every workspace receives the sum over ranks. Once the function returns, no peer
// accesses this rank's workspace any more. It uses all stages of the call.
void sum_workspaces(Group& group, Call& call, size_t count, DType dtype);

// `in` holds counts[r] elements for each rank r, contiguous in rank order. out = sum over ranks of this rank's
// elements.
void reduce_scatter(Group& group, const void* in, void* out, const std::vector<size_t>& counts,
                    const Signature& signature);

// `in` holds send_counts[r] elements for each rank r, in rank order; `out` receives receive_counts[r] elements from
// each rank r, in rank order.
void all_to_all(Group& group, const void* in, void* out, const std::vector<size_t>& send_counts,
                const std::vector<size_t>& receive_counts, DType dtype);

// Returns once all ranks have called it.
void barrier(Group& group);

struct NormArguments {
  const void* partial;   // [rows, columns]
  const void* residual;  // [rows, columns]
  const void* weight;    // [columns]
  void* normed;          // [rows, columns]
  void* new_residual;    // [rows, columns]
  size_t rows;
  size_t columns;
  double eps;
};

// new_residual = residual + sum over ranks of partial; normed = new_residual / rms(new_residual) * weight.
void all_reduce_rms_norm(Group& group, const NormArguments& arguments, DType dtype);

}  // namespace fused_tp::shm

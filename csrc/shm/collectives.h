// Blocking collectives over shared memory. Pointers are to ordinary memory of this rank; `out` may equal `in` if both
// have the same size. Every rank of the group makes the same call; `called` must agree between ranks.
//
// Large calls use small workspaces chunk by chunk, so that data written by one rank is still in cache for the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "group.h"

namespace fused_tp::shm {

// out = sum over ranks of in, in the dtype of `called`.
void all_reduce(Group& group, const void* in, void* out, size_t count, const Signature& called);

// The part of a larger call that sums the workspaces: each rank has written `count` elements to the start of its
// workspace of `call`, and each workspace gets the sum over ranks. Once it returns, no peer accesses this rank's
// workspace any more. Uses all stages of the call.
void sum_workspaces(Group& group, Call& call, size_t count, DType dtype);

// `counts[r]` elements belong to rank r; in holds all of them one after the other, out gets this rank's, summed.
void reduce_scatter(Group& group, const void* in, void* out, const std::vector<size_t>& counts,
                    const Signature& called);

// in holds send_counts[r] elements for each rank r, out gets receive_counts[r] from each.
void all_to_all(Group& group, const void* in, void* out, const std::vector<size_t>& send_counts,
                const std::vector<size_t>& receive_counts, DType dtype);

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

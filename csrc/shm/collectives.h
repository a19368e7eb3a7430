// Blocking collectives over shared memory. Pointers are to ordinary memory of this rank; `out` may equal `in` where
// both have one size. Every rank of the group makes the same call.
//
// Large calls go through small workspaces chunk by chunk, so that what one rank writes the next still finds in cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "group.h"

namespace fused_tp::shm {

// out = op over ranks of in. `called` is what must agree between ranks; null: the count and `op`.
void all_reduce(Group& group, const void* in, void* out, size_t count, DType dtype, ReduceOp op,
                const Signature* called = nullptr);

// The part of a larger call that sums what is in the workspaces: each rank has written `count` elements to the start of
// its workspace of `call`, and all of them get the sum over ranks. Once it returns no peer touches this rank's any
// more. Uses all stages of the call.
void sum_workspaces(Group& group, Call& call, size_t count, DType dtype);

// `counts[r]` elements belong to rank r; in holds all of them one after the other, out gets this rank's, reduced.
// `called` as above; null: the counts and `op`.
void reduce_scatter(Group& group, const void* in, void* out, const std::vector<size_t>& counts, DType dtype,
                    ReduceOp op, const Signature* called = nullptr);

// in holds this rank's counts[rank] elements, out gets all of them one after the other.
void all_gather(Group& group, const void* in, void* out, const std::vector<size_t>& counts, DType dtype);

// in holds send_counts[r] elements for each rank r, out gets receive_counts[r] from each.
void all_to_all(Group& group, const void* in, void* out, const std::vector<size_t>& send_counts,
                const std::vector<size_t>& receive_counts, DType dtype);

// data of rank `root` is copied to data of all others.
void broadcast(Group& group, void* data, size_t count, DType dtype, int root);

// in goes to rank + shift, out comes from rank - shift (modulo the group's size).
void ring_shift(Group& group, const void* in, void* out, size_t count, DType dtype, int shift);

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

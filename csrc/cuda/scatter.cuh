// First exchange of reduce-scatter and of two-shot all-reduce: every rank sends part o of its data to rank o, the
// owner, which adds all ranks' terms.
//
//   in, part o ──push──> slot [r] of rank o ──flag (0, block, r)──> at o: slots 0 .. W-1, own term from `in` ──sum──>
//
// A block handles its share of every part, so it waits only for the same block of other ranks. Memory order: a block
// sets its flags after its stores to the slots, and sums after it has seen the flags of the same block on all ranks.
#pragma once

#include "sum.cuh"

namespace fused_tp::cuda {

// An array of `count` elements in parts of `chunk` elements, one per rank. The last parts may be shorter or empty.
template <class T>
struct ChunkedArray {
  const void* data;
  int64_t count, chunk;

  __device__ PacketArray<T> operator[](int owner) const {
    const int64_t begin = owner * chunk < count ? owner * chunk : count;
    return PacketArray<T>(static_cast<const T*>(data) + begin, count - begin < chunk ? count - begin : chunk);
  }
};

// Sends this block's share of every part to the part's owner. This rank's own part is copied to its own slot only if it
// has unaligned or incomplete packets; otherwise arrived_terms reads it in place.
template <class T>
__device__ __forceinline__ void push_parts(const Call& call, const Plan& plan, const ChunkedArray<T>& in,
                                           int64_t per_block) {
  for (int step = in [call.rank()].is_whole() ? 1 : 0; step < call.world(); ++step) {
    const int owner = (call.rank() + step) % call.world();
    const PacketArray<T> part = in[owner];
    copy_to_slot<kCopyUnroll>(data_at(call, owner) + plan.term_offset(call.rank()), part,
                              block_share(part.packets(), per_block));
  }
}

// Returns the terms of this rank's part. Call it after the wait for phase 0.
template <int kWorld, class T>
__device__ __forceinline__ SlotTerms<kWorld> arrived_terms(const Call& call, const Plan& plan,
                                                           const PacketArray<T>& own_part) {
  char* slots = data_at(call, call.rank());
  return {slots, plan.term_bytes, own_part.is_whole() ? own_part.data : slots + plan.term_offset(call.rank()),
          call.rank(), call.world()};
}

}  // namespace fused_tp::cuda

// First half of a reduction in parts, each by its owner: part o of every rank's data is sent to rank o, which adds.
//
//   in, part o ──push──> slot [r] of rank o ──flag (0, block, r)──> at o: slots 0 .. W-1, own term from `in` ──sum──>
//
// Each block handles its own share of every part, so it depends only on the same block of other ranks.
#pragma once

#include "sum.cuh"

namespace fused_tp::cuda {

// `count` numbers in parts of `chunk`; the last parts may be short or empty.
template <class T>
struct Parts {
  const void* data;
  int64_t count, chunk;

  __device__ Vector<T> operator[](int owner) const {
    const int64_t first = owner * chunk < count ? owner * chunk : count;
    return Vector<T>(static_cast<const T*>(data) + first, count - first < chunk ? count - first : chunk);
  }
};

// Sends this block's share of all parts to their owners; that of this rank only if it cannot be read in place.
template <class T>
__device__ __forceinline__ void push_parts(const Call& call, const Plan& plan, const Parts<T>& in, int64_t per_block) {
  for (int step = in [call.rank()].is_whole() ? 1 : 0; step < call.world(); ++step) {
    const int owner = (call.rank() + step) % call.world();
    const Vector<T> part = in[owner];
    copy_to_slot<kCopyUnroll>(data_at(call, owner) + plan.term(call.rank()), part,
                              block_share(part.packets(), per_block));
  }
}

// The terms of this rank's part, once they have arrived.
template <int kWorld, class T>
__device__ __forceinline__ SlotTerms<kWorld> arrived_terms(const Call& call, const Plan& plan, const Vector<T>& own) {
  char* slots = data_at(call, call.rank());
  return {slots, plan.term_bytes, own.is_whole() ? own.data : slots + plan.term(call.rank()), call.rank(),
          call.world()};
}

}  // namespace fused_tp::cuda

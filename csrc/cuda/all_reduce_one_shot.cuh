// out_i = round(in_0,i + ... + in_(W-1),i [+ bias]), computed by every rank for itself.
//
// Each rank writes its data to its slot at every peer and adds all slots in rank order: one exchange, W - 1 times the
// data. For small data.
//
//   in ──push──> slot [r] of all peers ──flag (0, block, r)──> slots 0 .. W-1, own term from `in` ──sum──> out
//
// Order: a block's flag follows its stores to the slots, and its sum follows the flags of the same block on all ranks.
// A block sums only the packets that it pushed, so out may be in: it has read them for all peers before (the barrier in
// `wait`). A slot is written once per call, and next in the call after the next one, when all ranks have ended this
// call (signals.cuh).
#pragma once

#include "sum.cuh"

namespace fused_tp::cuda {

struct AllReduce {
  const void* in;
  void* out;
  int64_t count;
  int64_t per_block;  // packets; two-shot and multimem: of each rank's own part
  Bias bias;
};

template <class T, int kWorld>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_one_shot(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                        const __grid_constant__ AllReduce job) {
  const Call call = begin(workspace, Op::kAllReduce);
  const Vector<T> in(job.in, job.count), out(job.out, job.count);
  const Share share = block_share(in.packets(), job.per_block);
  bool good = call.alive();
  if (good) {
    const Peers<kWorld> slot(call, plan.term(call.rank()));
    const bool whole = in.is_whole();
    for_packets<4>(share, [&](auto unroll, int64_t i) {
      Packet packets[decltype(unroll)::value];
      in.load(packets, i);
#pragma unroll
      for (int step = 1; step < slot.world(); ++step) store_slot(slot[step], packets, i);
      if (!whole) store_slot(slot[0], packets, i);
    });
    put(call, plan, 0, true);
    good = wait(call, plan, 0);
    if (good) {
      char* slots = data_at(call, call.rank());
      const SlotTerms<kWorld> terms{slots, plan.term_bytes, whole ? in.data : slots + plan.term(call.rank()),
                                    call.rank(), call.world()};
      for_packets<kSumUnroll<kWorld>>(share, [&](auto unroll, int64_t i) {
        Packet total[decltype(unroll)::value];
        sum<T>(terms, job.bias, 0, i, total);
        out.store(total, i);
      });
    }
  }
  if (!good) fill_missing(out, share);
  end(call);
}

}  // namespace fused_tp::cuda

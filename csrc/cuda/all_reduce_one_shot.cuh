// One-shot all-reduce: out_i = round(in_0,i + ... + in_(W-1),i [+ bias]), computed by every rank.
//
// Each rank writes its data to its slot at every peer and adds all slots in rank order. This takes one exchange and
// sends W - 1 times the data, so it is for small data.
//
//   in ──push──> slot [r] of all peers ──flag (0, block, r)──> slots 0 .. W-1, own term from `in` ──sum──> out
//
// Memory order: a block sets its flag after its stores to the slots, and sums after it has seen the flags of the same
// block on all ranks. `out` may be `in`: a block sums only the packets that it has pushed, and the barrier in `wait`
// follows all its reads of `in`. A slot is written again two calls later at the earliest, when all ranks have ended
// this call (signals.cuh).
#pragma once

#include "sum.cuh"

namespace fused_tp::cuda {

struct AllReduce {
  const void* in;
  void* out;
  int64_t count;
  int64_t per_block;  // packets per block; two-shot and multimem: packets of each owner's part
  Bias bias;
};

template <class T, int kWorld>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_one_shot(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                        const __grid_constant__ AllReduce job) {
  const Call call = begin(workspace, Op::kAllReduce);
  const PacketArray<T> in(job.in, job.count), out(job.out, job.count);
  const Share share = block_share(in.packets(), job.per_block);
  bool is_valid = call.is_alive();
  if (is_valid) {
    const PeerSlots<kWorld> slot(call, plan.term_offset(call.rank()));
    const bool reads_in_place = in.is_whole();
    for_packets<4>(share, [&](auto unroll, int64_t i) {
      Packet packets[decltype(unroll)::value];
      in.load(packets, i);
#pragma unroll
      for (int step = 1; step < slot.world(); ++step) store_slot(slot[step], packets, i);
      if (!reads_in_place) store_slot(slot[0], packets, i);
    });
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
    if (is_valid) {
      char* slots = data_at(call, call.rank());
      const SlotTerms<kWorld> terms{slots, plan.term_bytes,
                                    reads_in_place ? in.data : slots + plan.term_offset(call.rank()), call.rank(),
                                    call.world()};
      for_packets<kSumUnroll<kWorld>>(share, [&](auto unroll, int64_t i) {
        Packet total[decltype(unroll)::value];
        sum<T>(terms, job.bias, 0, i, total);
        out.store(total, i);
      });
    }
  }
  if (!is_valid) fill_nan(out, share);
  end(call);
}

}  // namespace fused_tp::cuda

// out_i = round(in_0,i + ... + in_(W-1),i [+ bias]), each part computed by its owner.
//
// Rank o adds part o and writes the sum to all ranks: two exchanges, 2 (W - 1) / W times the data. For large data.
//
//   in ──scatter.cuh──> terms at the owner ──sum──> out, and result slot [r] of all peers ──flag (1, block, r)──> out
//
// Order: as in scatter.cuh, then the owner's flag of phase 1 follows its stores of results. Terms and results have
// separate slots, since a result may arrive at a rank that has not added its terms yet. out may be in: a block writes
// only its share of each part, which it has pushed before (the barrier in `wait`). The sum is rounded once, by its
// owner, so all ranks get the same bits.
#pragma once

#include "all_reduce_one_shot.cuh"
#include "scatter.cuh"

namespace fused_tp::cuda {

template <class T, int kWorld>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_two_shot(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                        const __grid_constant__ AllReduce job) {
  const Call call = begin(workspace, Op::kAllReduce);
  const int64_t chunk = owned_elements(job.count, sizeof(T), call.world());
  const Parts<T> in{job.in, job.count, chunk}, out{job.out, job.count, chunk};
  bool good = call.alive();
  if (good) {
    push_parts(call, plan, in, job.per_block);
    put(call, plan, 0, true);
    good = wait(call, plan, 0);
    if (good) {
      const Vector<T> own = out[call.rank()];
      const SlotTerms<kWorld> terms = arrived_terms<kWorld>(call, plan, in[call.rank()]);
      const Peers<kWorld> result(call, plan.result(call.rank()));
      for_packets<kSumUnroll<kWorld>>(block_share(own.packets(), job.per_block), [&](auto unroll, int64_t i) {
        Packet total[decltype(unroll)::value];
        sum<T>(terms, job.bias, call.rank() * chunk, i, total);
        own.store(total, i);
#pragma unroll
        for (int step = 1; step < result.world(); ++step) store_slot(result[step], total, i);
      });
    }
    put(call, plan, 1, good);
    good = good && wait(call, plan, 1);
  }
  for (int owner = 0; owner < call.world(); ++owner) {
    const Vector<T> part = out[owner];
    const Share share = block_share(part.packets(), job.per_block);
    if (!good) {
      fill_missing(part, share);
    } else if (owner != call.rank()) {
      copy_from_slot<kCopyUnroll>(part, data_at(call, call.rank()) + plan.result(owner), share);
    }
  }
  end(call);
}

}  // namespace fused_tp::cuda

// Two-shot all-reduce: out_i = round(in_0,i + ... + in_(W-1),i [+ bias]), each part computed by one rank, its owner.
//
// Rank o adds part o and writes the sum to all ranks. This takes two exchanges and sends 2 (W - 1) / W times the data,
// so it is for large data.
//
//   in ──scatter.cuh──> terms at the owner ──sum──> out, and result slot [r] of all peers ──flag (1, block, r)──> out
//
// Memory order: first as in scatter.cuh; then the owner sets its flag of phase 1 after its stores of results. Terms and
// results have separate slots, because a result may arrive at a rank that has not added its terms yet. `out` may be
// `in`: a block writes only its share of each part, and the barrier in `wait` follows all its reads of that share. The
// owner rounds the sum once, so results are bitwise identical on all ranks.
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
  const ChunkedArray<T> in{job.in, job.count, chunk}, out{job.out, job.count, chunk};
  bool is_valid = call.is_alive();
  if (is_valid) {
    push_parts(call, plan, in, job.per_block);
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
    if (is_valid) {
      const PacketArray<T> own_part = out[call.rank()];
      const SlotTerms<kWorld> terms = arrived_terms<kWorld>(call, plan, in[call.rank()]);
      const PeerSlots<kWorld> result(call, plan.result_offset(call.rank()));
      for_packets<kSumUnroll<kWorld>>(block_share(own_part.packets(), job.per_block), [&](auto unroll, int64_t i) {
        Packet total[decltype(unroll)::value];
        sum<T>(terms, job.bias, call.rank() * chunk, i, total);
        own_part.store(total, i);
#pragma unroll
        for (int step = 1; step < result.world(); ++step) store_slot(result[step], total, i);
      });
    }
    signal(call, plan, 1, is_valid);
    is_valid = is_valid && wait(call, plan, 1);
  }
  for (int owner = 0; owner < call.world(); ++owner) {
    const PacketArray<T> part = out[owner];
    const Share share = block_share(part.packets(), job.per_block);
    if (!is_valid) {
      fill_nan(part, share);
    } else if (owner != call.rank()) {
      copy_from_slot<kCopyUnroll>(part, data_at(call, call.rank()) + plan.result_offset(owner), share);
    }
  }
  end(call);
}

}  // namespace fused_tp::cuda

// All-reduce by the NVLink switch (NVLink SHARP): out_i = round(in_0,i + ... + in_(W-1),i); with a bias, it is added to
// the rounded sum, which is rounded again. A region is a rank's slot in its workspace; rank o owns part o of all
// regions.
//
//   in ──copy──> own region ──flag (0, block, r)──> owner: multimem.ld_reduce of its part, multimem.st of the sum to
//   all regions ──flag (1, block, r)──> own region ──copy──> out
//
// Each rank moves its data twice, for any W. Memory order: the owner reads its part of all regions after the flags of
// phase 0, which show that the same block on all ranks has filled its share. Until the flags of phase 1 nobody else
// accesses that part. A region has two addresses, its own and the multicast address, so fence.proxy.alias separates
// accesses by one address from accesses by the other. The switch adds in fp32 in an unspecified order, but once for all
// ranks, so results are bitwise identical on all ranks.
#pragma once

#include "all_reduce_one_shot.cuh"
#include "scatter.cuh"

namespace fused_tp::cuda {

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_multimem(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                        const __grid_constant__ AllReduce job) {
  const Call call = begin(workspace, Op::kAllReduce);
  const int64_t chunk = owned_elements(job.count, sizeof(T), call.world());
  const int64_t chunk_bytes = chunk * static_cast<int64_t>(sizeof(T));
  const ChunkedArray<T> in{job.in, job.count, chunk}, out{job.out, job.count, chunk};
  bool is_valid = call.is_alive();
  if (is_valid) {
    char* region = data_at(call, call.rank());
    for (int owner = 0; owner < call.world(); ++owner) {
      const PacketArray<T> part = in[owner];
      copy_to_slot<4>(region + owner * chunk_bytes, part, block_share(part.packets(), job.per_block));
    }
    fence_aliases();
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
    if (is_valid) {
      fence_aliases();
      const Multicast ranks{workspace.multicast, workspace.addresses, call.world()};
      const int64_t data_offset = (call.epoch & 1) * workspace.half_bytes + flag_bytes(workspace.half_bytes);
      const int64_t offset = data_offset + call.rank() * chunk_bytes;
      const Share share = block_share(out[call.rank()].packets(), job.per_block);
      for_packets<4>(share, [&](auto unroll, int64_t i) {
        constexpr int kUnroll = decltype(unroll)::value;
        Packet total[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) total[u] = multimem_sum<T>(ranks, offset + (i + u * kThreads) * 16);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int64_t at = i + u * kThreads;
          if (job.bias.data) {
            float values[kPacketElements<T>];
            unpack<T>(total[u], values);
            add_bias<T>(job.bias, values, call.rank() * chunk + at * kPacketElements<T>);
            total[u] = pack<T>(values);
          }
          multimem_store(ranks, offset + at * 16, total[u]);
        }
      });
      fence_aliases();
    }
    signal(call, plan, 1, is_valid);
    is_valid = is_valid && wait(call, plan, 1);
    fence_aliases();
  }
  for (int owner = 0; owner < call.world(); ++owner) {
    const PacketArray<T> part = out[owner];
    const Share share = block_share(part.packets(), job.per_block);
    if (!is_valid) {
      fill_nan(part, share);
    } else {
      copy_from_slot<4>(part, data_at(call, call.rank()) + owner * chunk_bytes, share);
    }
  }
  end(call);
}

}  // namespace fused_tp::cuda

// All-gather of bytes: out = concatenation of the ranks' `in`, each of `chunk` bytes. The last parts may be shorter or
// empty.
//
//   in ──push──> slot [r] of all peers ──flag (0, block, r)──> slots ──copy──> out
//
// Memory order: a block sets its flag after its stores to the slots, and copies the slots to `out` after it has seen
// the flags of the same block on all ranks. The data passes through slots because peers can write only to the
// workspace, not to `out`. `in` may be this rank's part of `out`.
#include "copy.cuh"
#include "launch.cuh"

namespace fused_tp::cuda {

struct AllGather {
  const void* in;
  void* out;
  int64_t count, chunk;
  int64_t per_block;  // packets of each rank's part per block
};

static __global__ void __launch_bounds__(kThreads, 1)
    all_gather_kernel(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                      const __grid_constant__ AllGather job) {
  const Call call = begin(workspace, Op::kAllGather);
  const char* in = static_cast<const char*>(job.in);
  // This block's share of a rank's part, as a byte range of `out`.
  auto share_of = [&](int rank) -> Share {
    const int64_t part_begin = rank * job.chunk < job.count ? rank * job.chunk : job.count;
    const int64_t length = job.count - part_begin < job.chunk ? job.count - part_begin : job.chunk;
    const Share packets = block_share(ceil_div(length, 16), job.per_block);
    return {part_begin + packets.begin * 16, part_begin + (packets.end * 16 < length ? packets.end * 16 : length)};
  };
  auto offset_in_part = [&](int rank, int64_t at) {
    return at - (rank * job.chunk < job.count ? rank * job.chunk : job.count);
  };
  const Share own_share = share_of(call.rank());
  const int64_t own_offset = offset_in_part(call.rank(), own_share.begin);
  bool is_valid = call.is_alive();
  if (is_valid) {
    for (int step = 1; step < call.world(); ++step) {
      const int peer = (call.rank() + step) % call.world();
      copy_bytes(data_at(call, peer) + plan.term_offset(call.rank()) + own_offset, in + own_offset,
                 own_share.end - own_share.begin);
    }
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
  }
  for (int source = 0; source < call.world(); ++source) {
    const Share share = share_of(source);
    char* out = static_cast<char*>(job.out) + share.begin;
    if (!is_valid) {
      fill_nan(out, share.end - share.begin);
    } else if (source == call.rank()) {
      if (out != in + own_offset) copy_bytes(out, in + own_offset, share.end - share.begin);
    } else {
      copy_bytes(out, data_at(call, call.rank()) + plan.term_offset(source) + offset_in_part(source, share.begin),
                 share.end - share.begin);
    }
  }
  end(call);
}

int32_t launch_all_gather(const Workspace* workspace, const void* in, void* out, int64_t count, int64_t chunk,
                          int32_t blocks, void* stream) {
  const int world = workspace->world;
  const int64_t longest_chunk = std::min(chunk, count);
  const Plan plan = exchange_plan(longest_chunk, world, blocks);
  if (!has_room(*workspace, plan)) return cudaErrorInvalidValue;
  const AllGather job{in, out, count, chunk, ceil_div(ceil_div(longest_chunk, 16), blocks)};
  return launch(Kernel<all_gather_kernel>{}, blocks, kThreads, stream, *workspace, plan, job);
}

}  // namespace fused_tp::cuda

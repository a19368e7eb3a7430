// Reduce-scatter in chunks of c elements: out_i at rank r = round(in_0,(r c + i) + ... + in_(W-1),(r c + i) [+ bias]).
// The last chunks may be shorter or empty.
//
// scatter.cuh describes the data movement and the memory order. `out` may be this rank's chunk of `in`: a block writes
// only elements that no other block reads, and the barrier in `wait` follows all its reads.
#include "launch.cuh"
#include "scatter.cuh"

namespace fused_tp::cuda {

struct ReduceScatter {
  const void* in;
  void* out;
  int64_t count, chunk;
  int64_t per_block;  // packets of each rank's chunk per block
  Bias bias;
};

template <class T, int kWorld>
__global__ void __launch_bounds__(kThreads, 1)
    reduce_scatter_kernel(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                          const __grid_constant__ ReduceScatter job) {
  const Call call = begin(workspace, Op::kReduceScatter);
  const ChunkedArray<T> in{job.in, job.count, job.chunk};
  const PacketArray<T> own_part = in[call.rank()];
  const PacketArray<T> out(job.out, own_part.count);
  const Share share = block_share(out.packets(), job.per_block);
  bool is_valid = call.is_alive();
  if (is_valid) {
    push_parts(call, plan, in, job.per_block);
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
    if (is_valid) {
      const SlotTerms<kWorld> terms = arrived_terms<kWorld>(call, plan, own_part);
      for_packets<kSumUnroll<kWorld>>(share, [&](auto unroll, int64_t i) {
        Packet total[decltype(unroll)::value];
        sum<T>(terms, job.bias, call.rank() * job.chunk, i, total);
        out.store(total, i);
      });
    }
  }
  if (!is_valid) fill_nan(out, share);
  end(call);
}

int32_t launch_reduce_scatter(const Workspace* workspace, const void* in, void* out, int64_t count, int64_t chunk,
                              int32_t dtype, Bias bias, int32_t blocks, void* stream) {
  const int world = workspace->world;
  if (world == 1) return launch_sum_terms(in, 1, count, out, count, dtype, bias, stream);
  return for_dtype(dtype, [&](auto type) -> int32_t {
    using T = typename decltype(type)::type;
    constexpr int64_t kBytes = sizeof(T);
    const int64_t longest_chunk = std::min(chunk, count);
    const Plan plan = exchange_plan(longest_chunk * kBytes, world, blocks);
    if (!has_room(*workspace, plan)) return cudaErrorInvalidValue;
    const ReduceScatter job{in, out, count, chunk, ceil_div(ceil_div(longest_chunk, kPacketElements<T>), blocks), bias};
    return for_world(world, [&](auto constant) -> int32_t {
      return launch(Kernel<reduce_scatter_kernel<T, decltype(constant)::value>>{}, blocks, kThreads, stream, *workspace,
                    plan, job);
    });
  });
}

}  // namespace fused_tp::cuda

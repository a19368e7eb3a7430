// All-to-all of equal parts: out[p] at rank r = in[r] at rank p. A part consists of [batches, rows] runs of row_bytes
// contiguous bytes. `in` and `out` each have their own strides.
//
//   in[p] ──push, packed──> slot [r] of rank p ──flag (0, block, r)──> slots ──copy, strided──> out
//
// The strides make a change of layout, such as from sequence shards to head shards in Ulysses attention, part of the
// copy. The memory order is that of all_gather.cu. `out` may be `in` if both layouts are equal: a block writes only
// bytes that no other block reads, and the barrier in `wait` follows all its reads.
#include "copy.cuh"
#include "launch.cuh"

namespace fused_tp::cuda {

struct AllToAll {
  const void* in;
  void* out;
  AllToAllLayout layout;
  int64_t per_block;  // packets of each part per block
};

// Position of a unit (the largest element that all copies can use) in a part, as three indices, so that a step to a
// later unit needs no division.
struct UnitIndex {
  int64_t batch, row, unit;

  __device__ static UnitIndex from_linear(int64_t index, int64_t rows, int64_t units) {
    const int64_t run = index / units;
    return {run / rows, run % rows, index % units};
  }
  __device__ void add(const UnitIndex& step, int64_t rows, int64_t units) {
    unit += step.unit;
    row += step.row;
    batch += step.batch;
    if (unit >= units) unit -= units, ++row;
    if (row >= rows) row -= rows, ++batch;
  }
};

// Addresses of the runs of a part in `in`, `out` or a slot.
struct StridedRuns {
  char* data;
  int64_t batch_stride, row_stride;

  __device__ char* at(const UnitIndex& index, int64_t unit_bytes) const {
    return data + index.batch * batch_stride + index.row * row_stride + index.unit * unit_bytes;
  }
};

// Copies units [share.begin, share.end) of a part.
template <class Unit>
__device__ __forceinline__ void copy_runs(const AllToAllLayout& layout, const StridedRuns& to, const StridedRuns& from,
                                          Share share) {
  if (share.begin >= share.end) return;
  constexpr int64_t kBytes = sizeof(Unit);
  const int64_t units = layout.row_bytes / kBytes;
  const UnitIndex step = UnitIndex::from_linear(kThreads, layout.rows, units);
  UnitIndex at = UnitIndex::from_linear(share.begin + threadIdx.x, layout.rows, units);
  for_packets<4>(share, [&](auto unroll, int64_t) {
    constexpr int kUnroll = decltype(unroll)::value;
    Unit copied[kUnroll];
    char* destinations[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      destinations[u] = to.at(at, kBytes);
      copied[u] = load_unit<Unit>(from.at(at, kBytes));
      at.add(step, layout.rows, units);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) store_unit(destinations[u], copied[u]);
  });
}

template <class Unit>
__device__ __forceinline__ void fill_nan_runs(const AllToAllLayout& layout, const StridedRuns& to, Share share) {
  constexpr int64_t kBytes = sizeof(Unit);
  for (int64_t i = share.begin + threadIdx.x; i < share.end; i += kThreads) {
    char* destination = to.at(UnitIndex::from_linear(i, layout.rows, layout.row_bytes / kBytes), kBytes);
    for (int64_t byte = 0; byte < kBytes; ++byte) destination[byte] = static_cast<char>(0xff);
  }
}

template <class Unit>
__global__ void __launch_bounds__(kThreads, 1)
    all_to_all_kernel(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                      const __grid_constant__ AllToAll job) {
  const Call call = begin(workspace, Op::kAllToAll);
  const AllToAllLayout& layout = job.layout;
  constexpr int64_t kBytes = sizeof(Unit);
  // Divide the part by packets, not by units: a rank's unit depends on the alignment of its own arrays, but a block
  // must have the same share on all ranks.
  constexpr int64_t kUnits = 16 / kBytes;
  const int64_t count = layout.batches * layout.rows * (layout.row_bytes / kBytes);
  const Share packets = block_share(ceil_div(count, kUnits), job.per_block);
  const Share share{packets.begin * kUnits, packets.end * kUnits < count ? packets.end * kUnits : count};
  auto in_runs = [&](int part) -> StridedRuns {
    char* data = static_cast<char*>(const_cast<void*>(job.in)) + part * layout.in_part_stride;
    return {data, layout.in_batch_stride, layout.in_row_stride};
  };
  auto out_runs = [&](int part) -> StridedRuns {
    return {static_cast<char*>(job.out) + part * layout.out_part_stride, layout.out_batch_stride,
            layout.out_row_stride};
  };
  // In a slot, the runs of a part are contiguous.
  auto slot_runs = [&](int rank, int slot) -> StridedRuns {
    return {data_at(call, rank) + plan.term_offset(slot), layout.rows * layout.row_bytes, layout.row_bytes};
  };
  bool is_valid = call.is_alive();
  if (is_valid) {
    for (int step = 1; step < call.world(); ++step) {
      const int peer = (call.rank() + step) % call.world();
      copy_runs<Unit>(layout, slot_runs(peer, call.rank()), in_runs(peer), share);
    }
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
  }
  for (int source = 0; source < call.world(); ++source) {
    if (is_valid) {
      const StridedRuns from = source == call.rank() ? in_runs(source) : slot_runs(call.rank(), source);
      copy_runs<Unit>(layout, out_runs(source), from, share);
    } else {
      fill_nan_runs<Unit>(layout, out_runs(source), share);
    }
  }
  end(call);
}

int32_t launch_all_to_all(const Workspace* workspace, const void* in, void* out, const AllToAllLayout* layout,
                          int32_t blocks, void* stream) {
  const int64_t part_bytes = layout->batches * layout->rows * layout->row_bytes;
  const Plan plan = exchange_plan(part_bytes, workspace->world, blocks);
  if (!has_room(*workspace, plan)) return cudaErrorInvalidValue;
  auto launch_in = [&](auto unit) -> int32_t {
    using Unit = decltype(unit);
    const AllToAll job{in, out, *layout, ceil_div(ceil_div(part_bytes, 16), blocks)};
    return launch(Kernel<all_to_all_kernel<Unit>>{}, blocks, kThreads, stream, *workspace, plan, job);
  };
  // The stride of a dim with one element is not used, so it need not be aligned.
  auto bits = [](int64_t count, int64_t stride) { return static_cast<uint64_t>(count > 1 ? stride : 0); };
  const uint64_t address_bits =
      reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out) | static_cast<uint64_t>(layout->row_bytes) |
      bits(workspace->world, layout->in_part_stride) | bits(workspace->world, layout->out_part_stride) |
      bits(layout->batches, layout->in_batch_stride | layout->out_batch_stride) |
      bits(layout->rows, layout->in_row_stride | layout->out_row_stride);
  switch (common_unit(address_bits)) {
    case 16:
      return launch_in(Packet{});
    case 8:
    case 4:
      return launch_in(uint32_t{});
    case 2:
      return launch_in(uint16_t{});
    default:
      return launch_in(uint8_t{});
  }
}

}  // namespace fused_tp::cuda

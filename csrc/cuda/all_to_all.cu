#include "all_to_all.cuh"
#include "launch.cuh"
#include "ops.h"

namespace fused_tp::cuda {

int32_t launch_all_to_all(const Workspace* workspace, const void* in, void* out, const AllToAllLayout* layout,
                          int32_t blocks, void* stream) {
  if (!is_valid(workspace, blocks) || !layout || layout->batches < 0 || layout->rows < 0 || layout->row_bytes < 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t part_bytes = layout->batches * layout->rows * layout->row_bytes;
  const Plan plan = exchange_plan(part_bytes, workspace->world, blocks);
  if (!has_room(*workspace, plan) || !is_array(in, part_bytes, 1) || !is_array(out, part_bytes, 1)) {
    return cudaErrorInvalidValue;
  }
  auto launch_in = [&](auto unit) -> int32_t {
    using Unit = decltype(unit);
    const AllToAll job{in, out, *layout, ceil_div(ceil_div(part_bytes, 16), blocks)};
    return launch(all_to_all_kernel<Unit>, blocks, kThreads, stream, *workspace, plan, job);
  };
  // A stride is not used where there is but one of what it counts.
  auto bits = [](int64_t count, int64_t stride) { return static_cast<uint64_t>(count > 1 ? stride : 0); };
  const uint64_t used = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out) |
                        static_cast<uint64_t>(layout->row_bytes) | bits(workspace->world, layout->in_part_stride) |
                        bits(workspace->world, layout->out_part_stride) |
                        bits(layout->batches, layout->in_batch_stride | layout->out_batch_stride) |
                        bits(layout->rows, layout->in_row_stride | layout->out_row_stride);
  switch (common_unit(used)) {
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

int32_t preload_all_to_all() {
  return load(all_to_all_kernel<Packet>, all_to_all_kernel<uint32_t>, all_to_all_kernel<uint16_t>,
              all_to_all_kernel<uint8_t>);
}

}  // namespace fused_tp::cuda

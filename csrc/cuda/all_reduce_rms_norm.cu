#include "all_reduce_rms_norm_one_shot.cuh"
#include "all_reduce_rms_norm_two_shot.cuh"
#include "launch.cuh"
#include "ops.h"

namespace fused_tp::cuda {

namespace {

bool is_valid(const void* partial, const RmsNorm& norm, int64_t element_bytes) {
  if (norm.rows < 0 || norm.columns < 0 || norm.output < NormOutput::kSameDtype ||
      norm.output > NormOutput::kFp8RowScale) {
    return false;
  }
  const int64_t count = norm.rows * norm.columns;
  const bool needs_scale = count > 0 && norm.output != NormOutput::kSameDtype;
  return is_array(partial, count, element_bytes) && is_array(norm.residual, count, element_bytes) &&
         is_array(norm.weight, norm.columns, element_bytes) && is_array(norm.new_residual, count, element_bytes) &&
         is_array(norm.normed, count, normed_bytes(norm.output, element_bytes)) &&
         (!needs_scale || is_array(norm.scale, 1, 4));
}

// Whether all rows of all arrays are whole packets.
template <class T>
bool is_in_packets(const void* partial, const RmsNorm& norm) {
  const int64_t normed_unit = normed_bytes(norm.output, sizeof(T)) * kPacketElements<T>;
  return norm.columns % kPacketElements<T> == 0 && is_aligned(partial, 16) && is_aligned(norm.residual, 16) &&
         is_aligned(norm.weight, 16) && is_aligned(norm.new_residual, 16) && is_aligned(norm.normed, normed_unit);
}

}  // namespace

int32_t launch_all_reduce_rms_norm(const Workspace* workspace, Algorithm algorithm, const void* partial,
                                   const RmsNorm* norm, int32_t dtype, int32_t blocks, void* stream) {
  if (!is_valid(workspace, blocks) || !norm) return cudaErrorInvalidValue;
  // Each row needs its owner before it is normed, so the switch would save but one of three exchanges.
  if (algorithm == Algorithm::kMultimem) return cudaErrorNotSupported;
  const int world = workspace->world;
  return for_dtype(dtype, [&](auto type) -> int32_t {
    using T = typename decltype(type)::type;
    if (!is_valid(partial, *norm, sizeof(T))) return cudaErrorInvalidValue;
    const Plan plan =
        all_reduce_rms_norm_plan(algorithm, norm->rows, norm->columns, sizeof(T), norm->output, world, blocks);
    if (!has_room(*workspace, plan)) return cudaErrorInvalidValue;
    const bool one_shot = algorithm == Algorithm::kOneShot;
    const int64_t rows = one_shot ? norm->rows : ceil_div(norm->rows, world);
    const AllReduceRmsNorm job{partial, *norm, ceil_div(rows, blocks),
                               group_threads(ceil_div(norm->columns, kPacketElements<T>))};
    auto launch_it = [&](auto one_shot_kernel, auto two_shot_kernel) {
      return launch(one_shot ? one_shot_kernel : two_shot_kernel, blocks, kThreads, stream, *workspace, plan, job);
    };
    if (!is_in_packets<T>(partial, *norm)) {
      return launch_it(all_reduce_rms_norm_one_shot<T, 0, false>, all_reduce_rms_norm_two_shot<T, 0, false>);
    }
    return for_world(world, [&](auto constant) -> int32_t {
      constexpr int kWorld = decltype(constant)::value;
      return launch_it(all_reduce_rms_norm_one_shot<T, kWorld, true>, all_reduce_rms_norm_two_shot<T, kWorld, true>);
    });
  });
}

int32_t preload_all_reduce_rms_norm() {
  return load_all([](auto type, auto constant) -> int32_t {
    using T = typename decltype(type)::type;
    constexpr int kWorld = decltype(constant)::value;
    return load(all_reduce_rms_norm_one_shot<T, 0, false>, all_reduce_rms_norm_two_shot<T, 0, false>,
                all_reduce_rms_norm_one_shot<T, kWorld, true>, all_reduce_rms_norm_two_shot<T, kWorld, true>);
  });
}

}  // namespace fused_tp::cuda

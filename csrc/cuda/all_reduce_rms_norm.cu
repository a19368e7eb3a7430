// All-reduce fused with a residual addition and RMSNorm; rms_norm.cuh defines the results new_residual and normed.
// new_residual may be residual, and normed may be partial.
//
// One-shot: every rank computes all rows, with one exchange. Two-shot: the owner of a row computes it and writes both
// results to all ranks, with two exchanges. all_reduce_one_shot.cuh and all_reduce_two_shot.cuh describe the memory
// order.
#include "launch.cuh"
#include "rms_norm.cuh"

namespace fused_tp::cuda {

namespace {

__device__ RowArray partial_rows(const AllReduceRmsNorm& job, int64_t pitch) {
  return {static_cast<char*>(const_cast<void*>(job.partial)), pitch, 0};
}

template <class T, int kWorld, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_rms_norm_one_shot(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                                 const __grid_constant__ AllReduceRmsNorm job) {
  const Call call = begin(workspace, Op::kAllReduceRmsNorm);
  const RmsNorm& norm = job.norm;
  const Share share = block_share(norm.rows, job.per_block);
  const int64_t slot_pitch = row_pitch(norm.columns, sizeof(T));
  const RowResults own_results = caller_results<T>(norm);
  const RowArray partial = partial_rows(job, own_results.residual.pitch);
  bool is_valid = call.is_alive();
  if (is_valid) {
    for (int step = 1; step < call.world(); ++step) {
      const int peer = (call.rank() + step) % call.world();
      const RowArray slot{data_at(call, peer) + plan.term_offset(call.rank()), slot_pitch, 0};
      copy_rows<sizeof(T), kAligned>(slot, partial, share, norm.columns);
    }
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
  }
  if (is_valid) {
    const RowTerms<kWorld> terms{
        {data_at(call, call.rank()), slot_pitch, 0}, plan.term_bytes, partial, call.rank(), call.world()};
    norm_rows<T, kWorld, kAligned>(job, share, terms, own_results);
  } else {
    fill_nan_rows<T>(norm, share);
  }
  end(call);
}

// An owner first writes its normed rows to its own output arrays and then copies them to the peers. The copy reads them
// from the L2 cache. Storing to all peers directly in norm_rows was rejected, because that loop has no free registers.
template <class T, int kWorld, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_rms_norm_two_shot(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                                 const __grid_constant__ AllReduceRmsNorm job) {
  const Call call = begin(workspace, Op::kAllReduceRmsNorm);
  const RmsNorm& norm = job.norm;
  const int64_t owned_rows = ceil_div(norm.rows, call.world());
  // Rows of rank `owner` that this block handles.
  auto share_of = [&](int owner) -> Share {
    const int64_t first_row = owner * owned_rows < norm.rows ? owner * owned_rows : norm.rows;
    const Share share =
        block_share(norm.rows - first_row < owned_rows ? norm.rows - first_row : owned_rows, job.per_block);
    return {first_row + share.begin, first_row + share.end};
  };
  const int64_t slot_pitch = row_pitch(norm.columns, sizeof(T));
  const RowResults own_results = caller_results<T>(norm);
  const RowArray partial = partial_rows(job, own_results.residual.pitch);
  // Results of the rows of rank `owner`, stored in its slot in the workspace of `rank`.
  auto results_at = [&](int rank, int owner) -> RowResults {
    char* slot = data_at(call, rank) + plan.result_offset(owner);
    const int64_t first_row = owner * owned_rows;
    return {{slot, slot_pitch, first_row}, {slot + owned_rows * slot_pitch, slot_pitch, first_row}};
  };
  auto copy_results = [&](const RowResults& to, const RowResults& from, Share rows) {
    copy_rows<sizeof(T), kAligned>(to.residual, from.residual, rows, norm.columns);
    copy_rows<sizeof(T), kAligned>(to.normed, from.normed, rows, norm.columns);
  };
  bool is_valid = call.is_alive();
  if (is_valid) {
    for (int step = 1; step < call.world(); ++step) {
      const int owner = (call.rank() + step) % call.world();
      const RowArray slot{data_at(call, owner) + plan.term_offset(call.rank()), slot_pitch, owner * owned_rows};
      copy_rows<sizeof(T), kAligned>(slot, partial, share_of(owner), norm.columns);
    }
    signal(call, plan, 0, true);
    is_valid = wait(call, plan, 0);
    if (is_valid) {
      const RowArray slots{data_at(call, call.rank()), slot_pitch, call.rank() * owned_rows};
      const RowTerms<kWorld> terms{slots, plan.term_bytes, partial, call.rank(), call.world()};
      norm_rows<T, kWorld, kAligned>(job, share_of(call.rank()), terms, own_results);
      __syncthreads();
      for (int step = 1; step < call.world(); ++step) {
        const int peer = (call.rank() + step) % call.world();
        copy_results(results_at(peer, call.rank()), own_results, share_of(call.rank()));
      }
    }
    signal(call, plan, 1, is_valid);
    is_valid = is_valid && wait(call, plan, 1);
  }
  for (int owner = 0; owner < call.world(); ++owner) {
    if (!is_valid) {
      fill_nan_rows<T>(norm, share_of(owner));
    } else if (owner != call.rank()) {
      copy_results(own_results, results_at(call.rank(), owner), share_of(owner));
    }
  }
  end(call);
}

// True if all rows of all arrays are aligned and consist of whole packets.
template <class T>
bool is_in_packets(const void* partial, const RmsNorm& norm) {
  return norm.columns % kPacketElements<T> == 0 && is_aligned(partial, 16) && is_aligned(norm.residual, 16) &&
         is_aligned(norm.weight, 16) && is_aligned(norm.new_residual, 16) && is_aligned(norm.normed, 16);
}

}  // namespace

int32_t launch_all_reduce_rms_norm(const Workspace* workspace, Algorithm algorithm, const void* partial,
                                   const RmsNorm* norm, int32_t dtype, int32_t blocks, void* stream) {
  // Not supported by the switch: a row must be complete before it is normed, so multimem would save only one of three
  // exchanges.
  if (algorithm == Algorithm::kMultimem) return cudaErrorNotSupported;
  const int world = workspace->world;
  return for_dtype(dtype, [&](auto type) -> int32_t {
    using T = typename decltype(type)::type;
    const Plan plan = all_reduce_rms_norm_plan(algorithm, norm->rows, norm->columns, sizeof(T), world, blocks);
    if (!has_room(*workspace, plan)) return cudaErrorInvalidValue;
    const bool is_one_shot = algorithm == Algorithm::kOneShot;
    const int64_t rows = is_one_shot ? norm->rows : ceil_div(norm->rows, world);
    const AllReduceRmsNorm job{partial, *norm, ceil_div(rows, blocks),
                               group_threads(ceil_div(norm->columns, kPacketElements<T>))};
    auto launch_one_of = [&](auto one_shot_kernel, auto two_shot_kernel) {
      auto launch_kernel = [&](auto kernel) { return launch(kernel, blocks, kThreads, stream, *workspace, plan, job); };
      return is_one_shot ? launch_kernel(one_shot_kernel) : launch_kernel(two_shot_kernel);
    };
    if (!is_in_packets<T>(partial, *norm)) {
      return launch_one_of(Kernel<all_reduce_rms_norm_one_shot<T, 0, false>>{},
                           Kernel<all_reduce_rms_norm_two_shot<T, 0, false>>{});
    }
    return for_world(world, [&](auto constant) -> int32_t {
      constexpr int kWorld = decltype(constant)::value;
      return launch_one_of(Kernel<all_reduce_rms_norm_one_shot<T, kWorld, true>>{},
                           Kernel<all_reduce_rms_norm_two_shot<T, kWorld, true>>{});
    });
  });
}

}  // namespace fused_tp::cuda

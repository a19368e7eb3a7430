// (normed, new_residual) of rms_norm.cuh, every row by every rank: one exchange, as in all_reduce_one_shot.cuh, which
// says what orders what. new_residual may be residual; normed, of the same dtype, may be partial.
#pragma once

#include "rms_norm.cuh"

namespace fused_tp::cuda {

template <class T, int kWorld, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_rms_norm_one_shot(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                                 const __grid_constant__ AllReduceRmsNorm job) {
  const Call call = begin(workspace, Op::kAllReduceRmsNorm);
  const RmsNorm& norm = job.norm;
  const Share share = block_share(norm.rows, job.per_block);
  const int64_t slot_pitch = row_pitch(norm.columns, sizeof(T));
  const RowResults own = given_results<T>(norm);
  const Rows partial{static_cast<char*>(const_cast<void*>(job.partial)), own.residual.pitch, 0};
  bool good = call.alive();
  if (good) {
    for (int step = 1; step < call.world(); ++step) {
      const int peer = (call.rank() + step) % call.world();
      const Rows slot{data_at(call, peer) + plan.term(call.rank()), slot_pitch, 0};
      copy_rows<sizeof(T), kAligned>(slot, partial, share, norm.columns);
    }
    put(call, plan, 0, true);
    good = wait(call, plan, 0);
  }
  if (good) {
    const RowTerms<kWorld> terms{
        {data_at(call, call.rank()), slot_pitch, 0}, plan.term_bytes, partial, call.rank(), call.world()};
    norm_rows<T, kWorld, kAligned>(job, share, terms, own);
  } else {
    fill_missing_rows<T>(norm, share);
  }
  end(call);
}

}  // namespace fused_tp::cuda

// (normed, new_residual) of rms_norm.cuh, each row by its owner, who writes both to all: two exchanges, as in
// all_reduce_two_shot.cuh, which says what orders what. new_residual may be residual; normed, of the same dtype, may be
// partial.
//
// An owner first norms its rows into its own arrays and then copies them to the peers: what it reads again is in L2,
// and the loop that norms is the same, and as short of registers, as with one shot.
#pragma once

#include "rms_norm.cuh"

namespace fused_tp::cuda {

template <class T, int kWorld, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_rms_norm_two_shot(const __grid_constant__ Workspace workspace, const __grid_constant__ Plan plan,
                                 const __grid_constant__ AllReduceRmsNorm job) {
  const Call call = begin(workspace, Op::kAllReduceRmsNorm);
  const RmsNorm& norm = job.norm;
  const int64_t owned = ceil_div(norm.rows, call.world());
  // This block's rows of an owner.
  auto share_of = [&](int owner) -> Share {
    const int64_t first = owner * owned < norm.rows ? owner * owned : norm.rows;
    const Share share = block_share(norm.rows - first < owned ? norm.rows - first : owned, job.per_block);
    return {first + share.first, first + share.last};
  };
  const int64_t term_pitch = row_pitch(norm.columns, sizeof(T));
  const int64_t normed_pitch = row_pitch(norm.columns, normed_bytes(norm.output, sizeof(T)));
  const RowResults own = given_results<T>(norm);
  const Rows partial{static_cast<char*>(const_cast<void*>(job.partial)), own.residual.pitch, 0};
  // Results of an owner in its slot at a rank.
  auto results_at = [&](int rank, int owner) -> RowResults {
    char* slot = data_at(call, rank) + plan.result(owner);
    const int64_t first = owner * owned;
    char* scales = slot + scales_in_result(owned, norm.columns, sizeof(T), norm.output);
    return {{slot, term_pitch, first},
            {slot + normed_in_result(owned, norm.columns, sizeof(T)), normed_pitch, first},
            own.scales ? reinterpret_cast<float*>(scales) : nullptr};
  };
  auto copy_results = [&](const RowResults& to, const RowResults& from, Share rows) {
    copy_rows<sizeof(T), kAligned>(to.residual, from.residual, rows, norm.columns);
    if (norm.output == NormOutput::kSameDtype) {
      copy_rows<sizeof(T), kAligned>(to.normed, from.normed, rows, norm.columns);
    } else {
      copy_fp8_rows<T, kAligned>(to.normed, from.normed, rows, norm.columns);
    }
    if (!own.scales) return;
    for (int64_t row = rows.first + threadIdx.x; row < rows.last; row += kThreads) {
      to.scales[row - to.normed.first] = from.scales[row - from.normed.first];
    }
  };
  bool good = call.alive();
  if (good) {
    for (int step = 1; step < call.world(); ++step) {
      const int owner = (call.rank() + step) % call.world();
      const Rows slot{data_at(call, owner) + plan.term(call.rank()), term_pitch, owner * owned};
      copy_rows<sizeof(T), kAligned>(slot, partial, share_of(owner), norm.columns);
    }
    put(call, plan, 0, true);
    good = wait(call, plan, 0);
    if (good) {
      const RowTerms<kWorld> terms{{data_at(call, call.rank()), term_pitch, call.rank() * owned},
                                   plan.term_bytes,
                                   partial,
                                   call.rank(),
                                   call.world()};
      norm_rows<T, kWorld, kAligned>(job, share_of(call.rank()), terms, own);
      __syncthreads();
      for (int step = 1; step < call.world(); ++step) {
        const int peer = (call.rank() + step) % call.world();
        copy_results(results_at(peer, call.rank()), own, share_of(call.rank()));
      }
    }
    put(call, plan, 1, good);
    good = good && wait(call, plan, 1);
  }
  for (int owner = 0; owner < call.world(); ++owner) {
    if (!good) {
      fill_missing_rows<T>(norm, share_of(owner));
    } else if (owner != call.rank()) {
      copy_results(own, results_at(call.rank(), owner), share_of(owner));
    }
  }
  end(call);
}

}  // namespace fused_tp::cuda

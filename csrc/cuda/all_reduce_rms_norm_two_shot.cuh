// (normed, new_residual) of rms_norm.cuh, each row by its owner, who writes both to all: two exchanges, as in
// all_reduce_two_shot.cuh, which says what orders what. new_residual may be residual, and normed may be partial.
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
  bool good = call.alive();
  if (good) {
    for (int step = 1; step < call.world(); ++step) {
      const int owner = (call.rank() + step) % call.world();
      const Rows slot{data_at(call, owner) + plan.term(call.rank()), term_pitch, owner * owned};
      copy_rows(slot, partial, share_of(owner), own.residual.pitch);
    }
    put(call, plan, 0, true);
    good = wait(call, plan, 0);
    if (good) {
      const RowTerms<kWorld> terms{{data_at(call, call.rank()), term_pitch, call.rank() * owned},
                                   plan.term_bytes,
                                   partial,
                                   call.rank(),
                                   call.world()};
      norm_rows<T, kWorld, kAligned>(job, share_of(call.rank()), terms, own, [&](auto&& body) {
        body(own, std::bool_constant<kAligned>{});
#pragma unroll 1
        for (int step = 1; step < call.world(); ++step) {
          const int rank = call.rank() + step;
          body(results_at(rank < call.world() ? rank : rank - call.world(), call.rank()), std::true_type{});
        }
      });
    }
    put(call, plan, 1, good);
    good = good && wait(call, plan, 1);
  }
  for (int owner = 0; owner < call.world(); ++owner) {
    const Share share = share_of(owner);
    if (!good) {
      fill_missing_rows<T>(norm, share);
    } else if (owner != call.rank()) {
      const RowResults result = results_at(call.rank(), owner);
      copy_rows(own.residual, result.residual, share, own.residual.pitch);
      copy_rows(own.normed, result.normed, share, own.normed.pitch);
      if (own.scales && share.first < share.last) {
        copy_bytes(reinterpret_cast<char*>(own.scales + share.first),
                   reinterpret_cast<char*>(result.scales + share.first - owner * owned),
                   (share.last - share.first) * 4);
      }
    }
  }
  end(call);
}

}  // namespace fused_tp::cuda

// The launchers, one file each; library.cu makes the table of them. What they do and take is in launchers.h.
#pragma once

#include <type_traits>

#include "launchers.h"

namespace fused_tp::cuda {

template <class Pointer>
using Function = std::remove_pointer_t<Pointer>;

Function<decltype(Launchers::barrier)> launch_barrier;
Function<decltype(Launchers::all_reduce)> launch_all_reduce;
Function<decltype(Launchers::reduce_scatter)> launch_reduce_scatter;
Function<decltype(Launchers::all_gather)> launch_all_gather;
Function<decltype(Launchers::all_to_all)> launch_all_to_all;
Function<decltype(Launchers::all_reduce_rms_norm)> launch_all_reduce_rms_norm;
Function<decltype(Launchers::sum_terms)> launch_sum_terms;

}  // namespace fused_tp::cuda

// make_kernels<L>: the table of kernels for one Lanes type (see lanes.h).
#pragma once

#include "attention/backward_impl.h"
#include "attention/forward_impl.h"

namespace fused_tp::attention {
namespace {

template <class L>
constexpr Kernels make_kernels(const char* isa) {
  static_assert(kQueries % L::kWidth == 0 && kPadding % L::kWidth == 0 && 8 % L::kRows == 0,
                "block sizes must be multiples of the register tile");
  return Kernels{isa,
                 forward_sizes<L>,
                 backward_sizes<L>,
                 pack_keys_forward<L>,
                 forward_block<L>,
                 pack_keys_backward<L>,
                 pack_queries<L>,
                 zero_dk_dv<L>,
                 backward_pair<L>,
                 add_dk_dv<L>,
                 add_dq<L>};
}

}  // namespace
}  // namespace fused_tp::attention

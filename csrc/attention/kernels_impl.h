// Table of kernels for one kind of lanes.
#pragma once

#include "attention/backward_impl.h"
#include "attention/forward_impl.h"

namespace fused_tp::attention {
namespace {

template <class L>
constexpr Kernels make_kernels(const char* isa) {
  static_assert(kQueries % L::kWidth == 0 && kPadding % L::kWidth == 0 && 8 % L::kRows == 0, "blocks are whole tiles");
  return Kernels{isa,
                 forward_sizes<L>,
                 backward_sizes<L>,
                 pack_keys_forward<L>,
                 forward_block<L>,
                 pack_keys_backward<L>,
                 pack_queries<L>,
                 begin_keys<L>,
                 backward_pair<L>,
                 add_keys<L>,
                 add_queries<L>};
}

}  // namespace
}  // namespace fused_tp::attention

// Four fp32 or two fp64 lanes, any CPU.
#include "attention/kernels_impl.h"

namespace fused_tp::attention {

const Kernels& kernels_plain(DType dtype) {
  static constexpr Kernels single = make_kernels<GenericLanes<float, 16>>("plain");
  static constexpr Kernels twice = make_kernels<GenericLanes<double, 16>>("plain");
  return dtype == DType::kF64 ? twice : single;
}

}  // namespace fused_tp::attention

// Attention kernels for any CPU: vectors of four fp32 or two fp64 lanes.
#include "attention/kernels_impl.h"

namespace fused_tp::attention {

const Kernels& kernels_plain(DType dtype) {
  static constexpr Kernels fp32 = make_kernels<GenericLanes<float, 16>>("plain");
  static constexpr Kernels fp64 = make_kernels<GenericLanes<double, 16>>("plain");
  return dtype == DType::kF64 ? fp64 : fp32;
}

}  // namespace fused_tp::attention

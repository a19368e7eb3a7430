#include "matmul/packed.h"

#include <cstring>
#include <stdexcept>

#include "matmul/kernels.h"
#include "threads/thread_pool.h"

namespace fused_tp::matmul {
namespace {

constexpr int64_t kStepBytes = sizeof(float);  // of a column: one fp32 element, or two of bf16

// Packs kPanelColumns rows of w to one panel.
void pack_panel(const char* w, int64_t w_row_bytes, int64_t bytes, char* panel) {
  for (int64_t at = 0; at < bytes; at += kStepBytes)
    for (int64_t column = 0; column < kPanelColumns; ++column)
      std::memcpy(panel + at * kPanelColumns + column * kStepBytes, w + column * w_row_bytes + at, kStepBytes);
}

}  // namespace

const char* packed_isa(DType dtype, const char* isa) {
  const Kernels* const kernels = select_kernels(dtype, /*is_packed=*/true, isa);
  return kernels == nullptr ? "" : kernels->isa;
}

void pack_weight(const void* w, int64_t w_row, int64_t columns, int64_t depth, DType dtype, void* packed, int threads) {
  const auto size = static_cast<int64_t>(element_size(dtype));
  parallel_for(columns / kPanelColumns, threads, [&](int64_t panel, int) {
    const int64_t begin = panel * kPanelColumns;
    pack_panel(static_cast<const char*>(w) + begin * w_row * size, w_row * size, depth * size,
               static_cast<char*>(packed) + begin * depth * size);
  });
}

void multiply_packed(Problem problem, int threads, const char* isa) {
  const Kernels* const kernels = select_kernels(problem.dtype, /*is_packed=*/true, isa);
  if (kernels == nullptr)
    throw std::invalid_argument("multiply_packed needs AVX2 or AVX-512; call it only if packed_isa returns a name");
  problem.w_row = problem.depth * kPanelColumns;
  multiply(*kernels, problem, problem.columns / kPanelColumns, kernels->tile_rows, threads);
}

}  // namespace fused_tp::matmul

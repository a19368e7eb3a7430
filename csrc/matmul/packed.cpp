#include "matmul/packed.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "matmul/kernels.h"
#include "threads/thread_pool.h"

namespace fused_tp::matmul {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t panel_elements(int64_t depth, DType dtype) {
  return divide_up(depth, panel_depth(dtype)) * panel_depth(dtype) * kPanelColumns;
}

// Packs `columns` rows of w, at most kPanelColumns, to one panel.
void pack_panel(const char* w, int64_t w_row_bytes, int64_t columns, int64_t depth, DType dtype, char* panel) {
  const int64_t step = panel_depth(dtype) * static_cast<int64_t>(element_size(dtype));
  const int64_t bytes = depth * static_cast<int64_t>(element_size(dtype)), full_bytes = bytes / step * step;
  if (columns < kPanelColumns || full_bytes < bytes)
    std::memset(panel, 0, divide_up(bytes, step) * step * kPanelColumns);
  for (int64_t at = 0; at < full_bytes; at += step)
    for (int64_t column = 0; column < columns; ++column)
      std::memcpy(panel + at * kPanelColumns + column * step, w + column * w_row_bytes + at, sizeof(float));
  for (int64_t column = 0; full_bytes < bytes && column < columns; ++column)
    std::memcpy(panel + full_bytes * kPanelColumns + column * step, w + column * w_row_bytes + full_bytes,
                bytes - full_bytes);
}

}  // namespace

const char* packed_isa(DType dtype, const char* isa) {
  const Kernels* const kernels = select_kernels(dtype, /*is_packed=*/true, isa);
  return kernels == nullptr ? "" : kernels->isa;
}

int64_t packed_elements(int64_t columns, int64_t depth, DType dtype) {
  return divide_up(columns, kPanelColumns) * panel_elements(depth, dtype);
}

void pack_weight(const void* w, int64_t w_row, int64_t columns, int64_t depth, DType dtype, void* packed, int threads) {
  const auto bytes = static_cast<int64_t>(element_size(dtype));
  parallel_for(divide_up(columns, kPanelColumns), threads, [&](int64_t panel, int) {
    const int64_t begin = panel * kPanelColumns;
    pack_panel(static_cast<const char*>(w) + begin * w_row * bytes, w_row * bytes,
               std::min(kPanelColumns, columns - begin), depth, dtype,
               static_cast<char*>(packed) + panel * panel_elements(depth, dtype) * bytes);
  });
}

void multiply_packed(Problem problem, int threads, const char* isa) {
  const Kernels* const kernels = select_kernels(problem.dtype, /*is_packed=*/true, isa);
  if (kernels == nullptr)
    throw std::invalid_argument("multiply_packed needs AVX2 or AVX-512; call it only if packed_isa returns a name");
  problem.w_row = panel_elements(problem.depth, problem.dtype);
  multiply(*kernels, problem, divide_up(problem.columns, kPanelColumns), kernels->tile_rows, threads);
}

}  // namespace fused_tp::matmul

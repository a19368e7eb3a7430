// Kernels of few_rows.h and packed.h: one table of functions per instruction set, dtype and kind of weight.
#pragma once

#include <cstddef>

#include "matmul/problem.h"

namespace fused_tp::matmul {

// Columns of y per panel of a packed weight, and depth per step: [columns / 16][depth / 2][16][2] elements in bf16, and
// [columns / 16][depth][16] in fp32. A step of a panel is one cache line. AMX tiles have the same layout.
constexpr int64_t kPanelColumns = 16;
constexpr int64_t panel_depth(DType dtype) { return dtype == DType::kF32 ? 1 : 2; }

struct Kernels {
  const char* isa;
  int64_t max_rows;                                // rows of x that are packed at a time
  int64_t tile_rows;                               // rows of w per register tile
  size_t (*packed_bytes)(const Problem& problem);  // 0 if x is read as it is, and not packed
  // Packs up to max_rows rows of x, from row `begin` on, in the order in which `multiply` reads them.
  void (*pack)(const Problem& problem, int64_t begin, char* packed);
  // Computes the columns of y of rows [begin, end) of w: a column each, or a panel.
  void (*multiply)(const Problem& problem, const char* packed, int64_t begin, int64_t end);
};

// Returns the kernels for this dtype, of at most the instruction set `isa` (if empty: FUSED_TP_ISA); null if there are
// none.
const Kernels* select_kernels(DType dtype, bool is_packed, const char* isa);

// Computes y, in tasks of `task_rows` rows of w.
void multiply(const Kernels& kernels, const Problem& problem, int64_t w_rows, int64_t task_rows, int threads);

#if FUSED_TP_X86
const Kernels& kernels_avx2(DType dtype, bool is_packed);
const Kernels& kernels_avx512(DType dtype, bool is_packed, bool has_bf16_products);
#endif

}  // namespace fused_tp::matmul

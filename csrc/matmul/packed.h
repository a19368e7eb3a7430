// Matmul by a weight that is packed once, for any number of rows: the linear layers of an engine that only serves.
//
// A panel of the packed weight has 16 columns of y; each step of its depth is one cache line (kernels.h). So the kernel
// reads a weight once, in the order of memory, multiplies by a broadcast element of x, and needs no sums of lanes: as
// fast as the memory for few rows, and as the multipliers for many, where few_rows.h needs another library.
#pragma once

#include "matmul/problem.h"

namespace fused_tp::matmul {

// Returns the instruction set of the kernels for this dtype, at most `isa` (if empty: FUSED_TP_ISA). Returns an empty
// string if there are no kernels.
const char* packed_isa(DType dtype, const char* isa);

// Packs w [columns, depth], with w_row elements between rows, to as many elements at `packed`. `columns` is a multiple
// of kPanelColumns, and `depth` of panel_depth(dtype) (kernels.h).
void pack_weight(const void* w, int64_t w_row, int64_t columns, int64_t depth, DType dtype, void* packed, int threads);

// Computes y. `problem.w` is packed; `problem.w_row` is ignored. A row's bits depend on neither the other rows nor the
// number of threads.
void multiply_packed(Problem problem, int threads, const char* isa);

}  // namespace fused_tp::matmul

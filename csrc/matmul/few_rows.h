// Matmul for few rows of x: a decoding step.
//
// The time is that of reading w once from memory. w is read in place; a library that packs w first reads it twice and
// writes it once.
#pragma once

#include "matmul/problem.h"

namespace fused_tp::matmul {

// Returns the instruction set of the kernels for this dtype, at most `isa` (if empty: FUSED_TP_ISA). Returns an empty
// string if there are no kernels.
const char* few_rows_isa(DType dtype, const char* isa);

// `rows` is at most kMaxFewRows. Results are bitwise identical for any number of threads.
void few_rows(const Problem& problem, int threads, const char* isa);

}  // namespace fused_tp::matmul

// Kernels for blocks of queries and keys: one table of functions per instruction set and operand type.
//
// Each table has its own format for packed blocks. Callers only provide the memory, aligned to kAlignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace fused_tp::attention {

constexpr int kQueries = 48;  // queries per block: a multiple of the lanes of every instruction set
constexpr int kKeys = 64;     // keys per block
constexpr size_t kAlignment = 64;

// Bytes of a packed block of keys or queries, and of one thread's scratch memory, for problems of one shape.
struct BufferSizes {
  size_t key_block, query_block, scratch;
};

struct Kernels {
  const char* isa;
  BufferSizes (*forward_sizes)(const Shape& shape);
  BufferSizes (*backward_sizes)(const Shape& shape);

  void (*pack_keys_forward)(const ForwardProblem& problem, int64_t batch, int64_t kv_head, int64_t block,
                            char* key_block, char* scratch);
  // Updates the softmax state of one block of queries with all keys.
  void (*forward_block)(const ForwardProblem& problem, int64_t batch, int64_t head, int64_t block, char* key_blocks,
                        char* scratch);

  void (*pack_keys_backward)(const BackwardProblem& problem, int64_t batch, int64_t kv_head, int64_t block,
                             char* key_block, char* scratch);
  void (*pack_queries)(const BackwardProblem& problem, int64_t batch, int64_t head, int64_t block, char* query_block,
                       char* scratch);
  // Zeroes dk, dv and the slope gradient of one block of keys in `scratch`.
  void (*zero_dk_dv)(const Shape& shape, char* scratch);
  // Backward of one block of queries and one block of keys: adds to dk, dv and the slope gradient in `scratch`, and to
  // dq in `query_block`.
  void (*backward_pair)(const BackwardProblem& problem, int64_t batch, int64_t head, int64_t block,
                        const char* key_block, char* query_block, char* scratch);
  // Adds dk and dv in `scratch` to the caller's tensors. Returns this block's contribution to d_slopes[head], the
  // gradient of the ALiBi slope.
  double (*add_dk_dv)(const BackwardProblem& problem, int64_t batch, int64_t kv_head, int64_t block, char* scratch);
  // Adds dq in `query_block` to the caller's tensor.
  void (*add_dq)(const BackwardProblem& problem, int64_t batch, int64_t head, int64_t block, char* query_block);
};

// Returns the fastest table for this dtype that this CPU supports. `isa` (if empty: FUSED_TP_ISA) limits the
// instruction set; see isa.h.
const Kernels& select_kernels(DType dtype, const char* isa);

// True if the CPU has AMX for bf16 (matrix tiles). These kernels do not use it.
bool has_matrix_tiles();

const Kernels& kernels_plain(DType dtype);
#if FUSED_TP_X86
const Kernels& kernels_avx2(DType dtype);
const Kernels& kernels_avx512(DType dtype, bool has_bf16_products);
#endif

}  // namespace fused_tp::attention

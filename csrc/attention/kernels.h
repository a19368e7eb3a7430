// Kernels for blocks of queries and keys: one table of functions per instruction set and kind of operands.
//
// The data format of a block is private to a table; callers provide the memory, aligned to kAlignment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/attention.h"

namespace fused_tp::attention {

constexpr int kQueries = 48;  // per block: lanes
constexpr int kKeys = 64;     // per block
constexpr size_t kAlignment = 64;

// Bytes of a block, and of a thread's scratch, for problems of one shape.
struct Sizes {
  size_t key_block, query_block, scratch;
};

struct Kernels {
  const char* isa;
  Sizes (*forward_sizes)(const Shape& shape);
  Sizes (*backward_sizes)(const Shape& shape);

  void (*pack_keys_forward)(const Forward& step, int64_t batch, int64_t kv_head, int64_t block, char* key_block,
                            char* scratch);
  // Folds all keys into the state of one block of queries.
  void (*forward_block)(const Forward& step, int64_t batch, int64_t head, int64_t block, char* key_blocks,
                        char* scratch);

  void (*pack_keys_backward)(const Backward& step, int64_t batch, int64_t kv_head, int64_t block, char* key_block,
                             char* scratch);
  void (*pack_queries)(const Backward& step, int64_t batch, int64_t head, int64_t block, char* query_block,
                       char* scratch);
  // Zeroes the sums of one block of keys, which are kept in `scratch`.
  void (*begin_keys)(const Shape& shape, char* scratch);
  // Adds the terms of one block of queries to these sums, and the terms of these keys to the dq of the queries.
  void (*backward_pair)(const Backward& step, int64_t batch, int64_t head, int64_t block, const char* key_block,
                        char* query_block, char* scratch);
  // Adds the sums to dk and dv, and returns their term of d_slopes[head].
  double (*add_keys)(const Backward& step, int64_t batch, int64_t kv_head, int64_t block, char* scratch);
  void (*add_queries)(const Backward& step, int64_t batch, int64_t head, int64_t block, char* query_block);
};

// The best table for this dtype that this CPU can run. `isa`, or FUSED_TP_ISA if that is empty, selects a lesser one
// (see isa.h).
const Kernels& kernels_for(DType dtype, const char* isa);

// True if the CPU has instructions for matrix tiles, which these kernels do not use.
bool has_matrix_tiles();

const Kernels& kernels_plain(DType dtype);
#if FUSED_TP_X86
const Kernels& kernels_avx2(DType dtype);
const Kernels& kernels_avx512(DType dtype, bool bf16_products);
#endif

}  // namespace fused_tp::attention

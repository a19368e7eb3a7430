// Plan: layout of flags and data in a workspace for each op, and the size of the workspace. Host C++ includes it too.
//
// A half of a workspace, as in triton_kernels/comm/signals.py:
//
//   [world]                   begun words
//   [phases, blocks, world]   flags: block b of rank s sets flag (phase, b, s) at its peers; one writer, one reader
//   (padding up to 1 / kFlagShare of the half)
//   [terms]                   slots for the inputs of ranks
//   [results]                 slots for the results of ranks
#pragma once

#include <algorithm>
#include <cstdint>

#include "../dtype.h"
#include "launchers.h"
#include "protocol.h"

// Kernels and host code use the same functions.
#ifdef __CUDACC__
#define FUSED_TP_HOST_DEVICE __host__ __device__
#else
#define FUSED_TP_HOST_DEVICE
#endif

namespace fused_tp::cuda {

FUSED_TP_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t align_up(int64_t bytes) { return ceil_div(bytes, kDataAlignment) * kDataAlignment; }

// Bytes at the start of a half that are reserved for begun words and flags.
FUSED_TP_HOST_DEVICE constexpr int64_t flag_bytes(int64_t half_bytes) {
  return half_bytes / (kFlagShare * kDataAlignment) * kDataAlignment;
}

// Size of the smallest workspace (both halves) with room for `flags` flags and `data` bytes of data.
constexpr int64_t needed_bytes(int world, int64_t flags, int64_t data) {
  return 2 *
         std::max(kFlagShare * align_up(8 * (world + flags)), align_up(ceil_div(data * kFlagShare, kFlagShare - 1)));
}

struct Plan {
  int32_t world = 1;
  int32_t blocks = 1;
  int32_t phases = 0;        // number of exchanges in which all ranks wait for each other
  int32_t terms = 0;         // number of slots for inputs
  int32_t results = 0;       // number of slots for results
  int64_t term_bytes = 0;    // size of a term slot, a multiple of kDataAlignment
  int64_t result_bytes = 0;  // size of a result slot, a multiple of kDataAlignment

  constexpr int64_t flag_count() const { return int64_t{phases} * blocks * world; }
  constexpr int64_t data_bytes() const { return terms * term_bytes + results * result_bytes; }
  FUSED_TP_HOST_DEVICE constexpr int64_t flag_index(int phase, int block, int source) const {
    return world + (int64_t{phase} * blocks + block) * world + source;
  }
  // Byte offset of a slot in the data of a half.
  FUSED_TP_HOST_DEVICE constexpr int64_t term_offset(int slot) const { return slot * term_bytes; }
  FUSED_TP_HOST_DEVICE constexpr int64_t result_offset(int slot) const {
    return terms * term_bytes + slot * result_bytes;
  }

  constexpr int64_t workspace_bytes() const { return needed_bytes(world, flag_count(), data_bytes()); }
};

// Number of elements per owner if `count` elements are divided among the ranks: whole packets of 16 bytes, so that all
// parts begin aligned.
FUSED_TP_HOST_DEVICE constexpr int64_t owned_elements(int64_t count, int64_t element_bytes, int world) {
  const int64_t per_packet = 16 / element_bytes;
  return ceil_div(ceil_div(count, per_packet), world) * per_packet;
}

// With world == 1 the plans below have no phases and no slots, because there are no peers.

constexpr Plan all_reduce_plan(Algorithm algorithm, int64_t count, int64_t element_bytes, int world, int blocks) {
  Plan plan{world, blocks};
  if (algorithm == Algorithm::kOneShot && world > 1) {
    plan.phases = 1;
    plan.terms = world;
    plan.term_bytes = align_up(count * element_bytes);
  } else if (algorithm == Algorithm::kTwoShot && world > 1) {
    plan.phases = 2;
    plan.terms = plan.results = world;
    plan.term_bytes = plan.result_bytes = align_up(owned_elements(count, element_bytes, world) * element_bytes);
  } else if (algorithm == Algorithm::kMultimem) {
    // One slot that holds the whole data: the switch adds the packets at the same offset of all ranks and writes the
    // sum there.
    plan.phases = 2;
    plan.terms = 1;
    plan.term_bytes = align_up(owned_elements(count, element_bytes, world) * element_bytes * world);
  }
  return plan;
}

// Plan for one exchange of chunks of `chunk_bytes` between all ranks: reduce-scatter, all-gather, all-to-all.
constexpr Plan exchange_plan(int64_t chunk_bytes, int world, int blocks) {
  if (world == 1) return Plan{world, blocks};
  return Plan{world, blocks, 1, world, 0, align_up(chunk_bytes), 0};
}

// Bytes between rows in a slot: a multiple of 16, so that every row begins aligned.
FUSED_TP_HOST_DEVICE constexpr int64_t row_pitch(int64_t columns, int64_t element_bytes) {
  return ceil_div(columns * element_bytes, 16) * 16;
}

// A result slot holds all rows of the new residual, then all normed rows.
constexpr Plan all_reduce_rms_norm_plan(Algorithm algorithm, int64_t rows, int64_t columns, int64_t element_bytes,
                                        int world, int blocks) {
  Plan plan{world, blocks};
  if (world == 1) return plan;
  const int64_t owned_rows = algorithm == Algorithm::kOneShot ? rows : ceil_div(rows, world);
  plan.phases = 1;
  plan.terms = world;
  plan.term_bytes = align_up(owned_rows * row_pitch(columns, element_bytes));
  if (algorithm == Algorithm::kTwoShot) {
    plan.phases = 2;
    plan.results = world;
    plan.result_bytes = align_up(2 * owned_rows * row_pitch(columns, element_bytes));
  }
  return plan;
}

// Number of blocks to launch for an op in which this rank moves `bytes`: one per 16 KB (two packets per thread),
// because with less data per block the flags of a further block cost more than its loads in flight gain. max_blocks:
// the number that can be resident, given the ranks that share the GPU; equal on all ranks.
constexpr int32_t suggested_blocks(int64_t bytes, int32_t max_blocks) {
  return static_cast<int32_t>(std::clamp<int64_t>(ceil_div(bytes, 16 << 10), 1, std::max(max_blocks, 1)));
}

}  // namespace fused_tp::cuda

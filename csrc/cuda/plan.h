// Layout of the data and flags of each op in a workspace, and the size of the workspace. Pure C++.
//
// A half of a workspace, as in triton_kernels/comm/signals.py: begun words, flags; data after the first 64th of the
// half. Flags are numbered (phase, block, source): block b of rank s puts (phase, b, s) at all its peers, so a flag has
// one writer and one reader. Data is two arrays of slots: terms, then results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../dtype.h"
#include "launchers.h"
#include "protocol.h"

// Kernels use the same functions.
#ifdef __CUDACC__
#define FUSED_TP_HOST_DEVICE __host__ __device__
#else
#define FUSED_TP_HOST_DEVICE
#endif

namespace fused_tp::cuda {

FUSED_TP_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t aligned(int64_t bytes) { return ceil_div(bytes, kDataAlignment) * kDataAlignment; }

// Bytes at the front of a half that only ever hold begun words and flags.
FUSED_TP_HOST_DEVICE constexpr int64_t flag_bytes(int64_t half_bytes) {
  return half_bytes / (kFlagShare * kDataAlignment) * kDataAlignment;
}

// Bytes of the smallest workspace (both halves) with room for these flags and bytes of data.
constexpr int64_t needed_bytes(int world, int64_t flags, int64_t data) {
  return 2 * std::max(kFlagShare * aligned(8 * (world + flags)), aligned(ceil_div(data * kFlagShare, kFlagShare - 1)));
}

struct Plan {
  int32_t world = 1;
  int32_t blocks = 1;
  int32_t phases = 0;        // number of times that all ranks wait for each other
  int32_t terms = 0;         // slots for inputs of ranks
  int32_t results = 0;       // slots for results of ranks
  int64_t term_bytes = 0;    // of a slot; multiples of kDataAlignment
  int64_t result_bytes = 0;  // of a slot

  constexpr int64_t flags() const { return int64_t{phases} * blocks * world; }
  constexpr int64_t data() const { return terms * term_bytes + results * result_bytes; }
  FUSED_TP_HOST_DEVICE constexpr int64_t flag(int phase, int block, int source) const {
    return world + (int64_t{phase} * blocks + block) * world + source;
  }
  // Byte offsets in the data of a half.
  FUSED_TP_HOST_DEVICE constexpr int64_t term(int slot) const { return slot * term_bytes; }
  FUSED_TP_HOST_DEVICE constexpr int64_t result(int slot) const { return terms * term_bytes + slot * result_bytes; }

  constexpr int64_t workspace_bytes() const { return needed_bytes(world, flags(), data()); }
};

// Elements that each rank owns of `count`: whole packets of 16 bytes, so that all parts begin aligned.
FUSED_TP_HOST_DEVICE constexpr int64_t owned_elements(int64_t count, int64_t element_bytes, int world) {
  const int64_t per_packet = 16 / element_bytes;
  return ceil_div(ceil_div(count, per_packet), world) * per_packet;
}

// A single rank has no peers: it waits for none and needs no slots.

constexpr Plan all_reduce_plan(Algorithm algorithm, int64_t count, int64_t element_bytes, int world, int blocks) {
  Plan plan{world, blocks};
  if (algorithm == Algorithm::kOneShot && world > 1) {
    plan.phases = 1;
    plan.terms = world;
    plan.term_bytes = aligned(count * element_bytes);
  } else if (algorithm == Algorithm::kTwoShot && world > 1) {
    plan.phases = 2;
    plan.terms = plan.results = world;
    plan.term_bytes = plan.result_bytes = aligned(owned_elements(count, element_bytes, world) * element_bytes);
  } else if (algorithm == Algorithm::kMultimem) {
    // One region, the same for all ranks: the switch adds the packets at one offset, and writes their sum there.
    plan.phases = 2;
    plan.terms = 1;
    plan.term_bytes = aligned(owned_elements(count, element_bytes, world) * element_bytes * world);
  }
  return plan;
}

// Chunks of `chunk_bytes` from all ranks: reduce-scatter, all-gather, and the parts of an all-to-all.
constexpr Plan exchange_plan(int64_t chunk_bytes, int world, int blocks) {
  if (world == 1) return Plan{world, blocks};
  return Plan{world, blocks, 1, world, 0, aligned(chunk_bytes), 0};
}

// Rows in slots begin at multiples of 16 bytes.
FUSED_TP_HOST_DEVICE constexpr int64_t row_pitch(int64_t columns, int64_t element_bytes) {
  return ceil_div(columns * element_bytes, 16) * 16;
}

// A slot of results holds the new residual of all its rows, then the normed rows.
constexpr Plan all_reduce_rms_norm_plan(Algorithm algorithm, int64_t rows, int64_t columns, int64_t element_bytes,
                                        int world, int blocks) {
  Plan plan{world, blocks};
  if (world == 1) return plan;
  const int64_t owned_rows = algorithm == Algorithm::kOneShot ? rows : ceil_div(rows, world);
  plan.phases = 1;
  plan.terms = world;
  plan.term_bytes = aligned(owned_rows * row_pitch(columns, element_bytes));
  if (algorithm == Algorithm::kTwoShot) {
    plan.phases = 2;
    plan.results = world;
    plan.result_bytes = aligned(2 * owned_rows * row_pitch(columns, element_bytes));
  }
  return plan;
}

// Number of blocks to launch for an op in which this rank moves `bytes`, at most `most` (as many as fit on the SMs next
// to the ranks that share the GPU): at least 16 KB for each, two packets per thread, because below that another block
// costs more in flags than it gains in loads in flight. The ranks must agree on `most`.
constexpr int32_t suggested_blocks(int64_t bytes, int32_t most) {
  return static_cast<int32_t>(std::clamp<int64_t>(ceil_div(bytes, 16 << 10), 1, std::max(most, 1)));
}

}  // namespace fused_tp::cuda

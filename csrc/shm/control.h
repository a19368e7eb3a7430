// ControlBlock: the words by which ranks synchronize, at the start of every rank's segment.
//
// Only the owner of a segment writes its words, and their values only grow. So nothing is reset between calls, and a
// late reader cannot mistake one call for another. `progress` is (call number << kStageBits) | stage. The owner stores
// it with release order, which publishes the rest of the slot and all data written before; peers load it with acquire
// order.
//
// Slot i is used by the calls i, i + kSlots, i + 2 kSlots, ... in turn. A rank begins call n only after every rank has
// ended call n - kSlots. So it may overwrite the slot and reuse the workspace of that call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "segment.h"

namespace fused_tp::shm {

constexpr int kMaxRanks = 64;
constexpr int kSlots = 16;
constexpr int kStageBits = 16;
constexpr size_t kSlotWorkspaceBytes = 64 * 1024;  // of the workspace in each slot; larger workspaces are on the heap
constexpr int kMaxDims = 8;
constexpr size_t kCacheLine = 64;

// Description of a call. Ranks compare theirs (by hash) and raise RankMismatchError if they differ.
struct Signature {
  char op[48];
  int32_t dtype;
  int32_t n_dims;
  int64_t dims[kMaxDims];
};

struct alignas(kCacheLine) Slot {
  // One cache line, which peers read while the call runs.
  std::atomic<uint64_t> progress;
  uint64_t signature_hash;
  uint64_t workspace_offset;
  uint64_t workspace_bytes;
  uint64_t ended_up_to;  // when this call began, the owner had ended all calls up to this one
  // Number of the last call in this slot that the owner has ended. In a separate cache line, because peers read it only
  // before they reuse the slot, not while the call runs.
  alignas(kCacheLine) std::atomic<uint64_t> last_ended;
  alignas(kCacheLine) Signature signature;
};

enum class RankState : uint32_t { kRunning = 0, kPeerLost = 1, kTimedOut = 2, kClosed = 3 };

struct ControlBlock {
  char token[Segment::kTokenBytes];  // written by Segment
  alignas(kCacheLine) std::atomic<uint32_t> state;
  std::atomic<uint32_t> lost_rank;  // valid if state is kPeerLost
  Slot slots[kSlots];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must be lock free");

constexpr size_t kSlotWorkspacesOffset = (sizeof(ControlBlock) + 4095) / 4096 * 4096;
constexpr size_t kHeapOffset = kSlotWorkspacesOffset + kSlots * kSlotWorkspaceBytes;
constexpr size_t kMaxReserveBytes = size_t{1} << 56;  // exceeds every CPU's address space; sums cannot overflow

}  // namespace fused_tp::shm

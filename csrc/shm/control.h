// Words by which ranks synchronize, at the start of every rank's segment.
//
// Every word has one writer, its owner, and only ever grows; so nothing is reset between calls, and a late reader can
// never mistake one call for another. `progress` is (call number << 16) | stage. Storing it (release) publishes the
// rest of the slot and all data written before; loading it (acquire) makes them readable.
//
// A slot belongs to the calls n, n + kSlots, n + 2 kSlots, ... A rank begins call n only after every rank has ended
// call n - kSlots, so it is safe to overwrite the slot and to recycle that call's workspace.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "segment.h"

namespace fused_tp::shm {

constexpr int kMaxRanks = 64;
constexpr int kSlots = 16;
constexpr int kStageBits = 16;
constexpr size_t kInlineBytes = 64 * 1024;  // a slot's own workspace; larger ones are on the heap
constexpr int kMaxDims = 8;
constexpr size_t kLine = 64;

// Description of a call, compared between ranks.
struct Signature {
  char op[48];
  int32_t dtype;
  int32_t n_dims;
  int64_t dims[kMaxDims];
};

struct alignas(kLine) Slot {
  // The owner's cache line while the call runs.
  std::atomic<uint64_t> progress;
  uint64_t signature_hash;
  uint64_t workspace_offset;
  uint64_t workspace_bytes;
  uint64_t all_ended;  // when the call began, the owner had ended all calls up to this one
  // A separate line: peers read it when they reuse the slot, not while the call runs.
  alignas(kLine) std::atomic<uint64_t> ended;  // number of the last call of this slot that the owner has ended
  alignas(kLine) Signature signature;
};

enum class RankState : uint32_t { kRunning = 0, kPeerLost = 1, kTimedOut = 2, kClosed = 3 };

struct ControlBlock {
  char token[Segment::kTokenBytes];  // written by Segment
  alignas(kLine) std::atomic<uint32_t> state;
  std::atomic<uint32_t> lost_rank;  // with kPeerLost
  Slot slots[kSlots];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "atomics in shared memory must be lock free");

constexpr size_t kInlineBegin = (sizeof(ControlBlock) + 4095) / 4096 * 4096;
constexpr size_t kHeapBegin = kInlineBegin + kSlots * kInlineBytes;
constexpr size_t kMaxReserve = size_t{1} << 56;  // more than any CPU's address space

}  // namespace fused_tp::shm

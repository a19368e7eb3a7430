// Where everything is in a rank's workspace: words that ranks leave for each other in front, data behind.
//
// A channel carries one message from a rank to each other one at a time. For every pair of ranks it has two words,
// `ready` at the receiver and `free` at the sender, and its places are the same whatever the size of a message: what
// one pair of ranks still reads, another pair cannot be writing.
#pragma once

#include <cstdint>

namespace fused_tp::copy_engine {

constexpr int kChannels = 2;  // of each kind: while one is read, the other is filled
constexpr int64_t kAlignment = 256;

constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Gathers: a rank puts its shard into its own stage, and all others copy it from there. Scatters: every rank writes
// into a slot of its own at the receiver.
enum class Way { kGather = 0, kScatter = 1 };

struct Channel {
  Way way;
  int index;
};

class Layout {
 public:
  // `gather_bytes`: of the longest shard; `scatter_bytes`: of the longest block.
  constexpr Layout(int world, int64_t gather_bytes, int64_t scatter_bytes)
      : world_(world), stage_bytes_(aligned(gather_bytes)), slot_bytes_(aligned(scatter_bytes)) {}

  constexpr int world() const { return world_; }
  constexpr int64_t stage_bytes() const { return stage_bytes_; }
  constexpr int64_t slot_bytes() const { return slot_bytes_; }
  constexpr int64_t bytes() const { return slot(kChannels, 0); }

  // Words, by number.
  constexpr int gate(int which) const { return which; }
  constexpr int ready(Channel channel, int sender) const { return flag(channel, 0, sender); }
  constexpr int free(Channel channel, int receiver) const { return flag(channel, 1, receiver); }
  constexpr int first_flag() const { return 16; }
  constexpr int flags() const { return 2 * kChannels * 2 * world_; }
  constexpr int words() const { return first_flag() + flags(); }
  // What a word is before the first call: gates are open, nothing is ready, everything is free.
  constexpr uint64_t first_value(int word) const {
    if (word < first_flag()) return word < 2 ? 1 : 0;
    return static_cast<uint64_t>((word - first_flag()) / world_ % 2);
  }

  // Data, by offset.
  constexpr int64_t stage(int index) const { return aligned(8 * static_cast<int64_t>(words())) + index * stage_bytes_; }
  constexpr int64_t slot(int index, int sender) const {
    return stage(kChannels) + (static_cast<int64_t>(index) * world_ + sender) * slot_bytes_;
  }

 private:
  constexpr int flag(Channel channel, int which, int peer) const {
    return first_flag() + ((static_cast<int>(channel.way) * kChannels + channel.index) * 2 + which) * world_ + peer;
  }

  int world_;
  int64_t stage_bytes_;
  int64_t slot_bytes_;
};

}  // namespace fused_tp::copy_engine

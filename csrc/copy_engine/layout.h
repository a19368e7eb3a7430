// Where everything is in a rank's workspace: words that ranks leave for each other in front, data behind.
//
// A channel carries one message from a rank to each other one at a time. For every pair of ranks it has two words,
// `ready` at the receiver and `free` at the sender, and its places are the same whatever the size of a message: what
// one pair of ranks still reads, another pair cannot be writing. What a kernel waits for has words of this rank alone.
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
  // Of the gather in this channel: the shard of `peer` is in its place. Runs of words that kernels are given begin at
  // multiples of 16 bytes: a kernel that was compiled for one alignment is not for another.
  constexpr int run() const { return world_ + world_ % 2; }
  constexpr int arrived(int index, int peer) const { return first_flag() + messages() + index * run() + peer; }
  constexpr int first_flag() const { return 16; }
  constexpr int flags() const { return messages() + kChannels * run(); }
  constexpr bool is_flag(int word) const { return word >= first_flag() && word < first_flag() + flags(); }
  // No flags, which a rank that gives up sets: W - 1 words in which a kernel notes in which order it takes shards, and
  // one in which it keeps the time; the copies may begin; the copies have ended.
  constexpr int order(int index) const { return first_flag() + flags() + index * run(); }
  constexpr int begun(int index) const { return order(kChannels) + index; }
  constexpr int drained(int index) const { return begun(kChannels) + index; }
  constexpr int words() const { return drained(kChannels); }
  // What a word is before the first call: gates are open, nothing is ready, everything is free.
  constexpr uint64_t first_value(int word) const {
    if (word < first_flag()) return word < 2 ? 1 : 0;
    return word < arrived(0, 0) ? static_cast<uint64_t>((word - first_flag()) / world_ % 2) : 0;
  }

  // Data, by offset.
  constexpr int64_t stage(int index) const { return aligned(8 * static_cast<int64_t>(words())) + index * stage_bytes_; }
  constexpr int64_t slot(int index, int sender) const {
    return stage(kChannels) + (static_cast<int64_t>(index) * world_ + sender) * slot_bytes_;
  }

 private:
  constexpr int messages() const { return 2 * kChannels * 2 * world_; }
  constexpr int flag(Channel channel, int which, int peer) const {
    return first_flag() + ((static_cast<int>(channel.way) * kChannels + channel.index) * 2 + which) * world_ + peer;
  }

  int world_;
  int64_t stage_bytes_;
  int64_t slot_bytes_;
};

}  // namespace fused_tp::copy_engine

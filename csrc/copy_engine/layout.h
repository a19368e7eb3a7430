// Layout of a rank's workspace: first the words by which ranks synchronize, then data.
//
// A channel carries one message at a time from a rank to each peer. For every pair of ranks it has two words, `ready`
// at the receiver and `free` at the sender. Its addresses do not depend on the size of a message, so no pair of ranks
// can write memory that another pair still reads. The words that a kernel waits for are private to this rank.
#pragma once

#include <cstdint>

namespace fused_tp::copy_engine {

constexpr int kChannels = 2;  // of each kind: while one is read, the other is filled
constexpr int64_t kAlignment = 256;

constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Gathers: a rank copies its shard to its own stage, and all peers copy it from there. Scatters: every rank writes to a
// slot of its own at the receiver.
enum class Way { kGather = 0, kScatter = 1 };

struct Channel {
  Way way;
  int index;
};

class Layout {
 public:
  // `gather_bytes`: size of the longest shard; `scatter_bytes`: size of the longest block.
  constexpr Layout(int world, int64_t gather_bytes, int64_t scatter_bytes)
      : world_(world), stage_bytes_(aligned(gather_bytes)), slot_bytes_(aligned(scatter_bytes)) {}

  constexpr int world() const { return world_; }
  constexpr int64_t stage_bytes() const { return stage_bytes_; }
  constexpr int64_t slot_bytes() const { return slot_bytes_; }
  constexpr int64_t bytes() const { return slot(kChannels, 0); }

  // Numbers of words.
  constexpr int gate(int which) const { return which; }
  constexpr int ready(Channel channel, int sender) const { return flag(channel, 0, sender); }
  constexpr int free(Channel channel, int receiver) const { return flag(channel, 1, receiver); }
  // For the gather in this channel: the shard of `peer` is in place. Runs of words that are passed to kernels begin at
  // multiples of 16 bytes: a kernel compiled for one alignment does not support another.
  constexpr int run() const { return world_ + world_ % 2; }
  constexpr int arrived(int index, int peer) const { return first_flag() + messages() + index * run() + peer; }
  constexpr int first_flag() const { return 16; }
  constexpr int flags() const { return messages() + kChannels * run(); }
  constexpr bool is_flag(int word) const { return word >= first_flag() && word < first_flag() + flags(); }
  // Not among the flags, all of which a rank that gives up sets. order: W - 1 words for the order in which a kernel
  // takes shards, and one for its time; begun: the copies may begin; drained: the copies have ended.
  constexpr int order(int index) const { return first_flag() + flags() + index * run(); }
  constexpr int begun(int index) const { return order(kChannels) + index; }
  constexpr int drained(int index) const { return begun(kChannels) + index; }
  constexpr int words() const { return drained(kChannels); }
  // Value of a word before the first call: gates are open, nothing is ready, everything is free.
  constexpr uint64_t first_value(int word) const {
    if (word < first_flag()) return word < 2 ? 1 : 0;
    return word < arrived(0, 0) ? static_cast<uint64_t>((word - first_flag()) / world_ % 2) : 0;
  }

  // Offsets of data.
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

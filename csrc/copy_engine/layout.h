// Layout: offsets in a rank's workspace, which holds 64-bit words for synchronization, then data.
//
// A channel carries one message at a time from each rank to each peer. For every ordered pair of ranks it has two
// words: `ready` in the receiver's workspace and `free` in the sender's. Offsets do not depend on the sizes of
// messages, so the memory of one pair never overlaps that of another. Words that a kernel polls are written and read by
// one rank only.
#pragma once

#include <cstdint>

namespace fused_tp::copy_engine {

constexpr int kChannels = 2;  // per kind: while receivers read one, senders fill the other
constexpr int64_t kAlignment = 256;

constexpr int64_t align_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// kGather: a rank copies its shard to its staging buffer, from which all peers copy it. kScatter: a rank copies a block
// to its slot in the receiver's workspace.
enum class ChannelKind { kGather = 0, kScatter = 1 };

struct Channel {
  ChannelKind kind;
  int index;
};

class Layout {
 public:
  // gather_bytes, scatter_bytes: size of the largest shard and of the largest block.
  constexpr Layout(int world, int64_t gather_bytes, int64_t scatter_bytes)
      : world_(world), stage_bytes_(align_up(gather_bytes)), slot_bytes_(align_up(scatter_bytes)) {}

  constexpr int world() const { return world_; }
  constexpr int64_t stage_bytes() const { return stage_bytes_; }
  constexpr int64_t slot_bytes() const { return slot_bytes_; }
  constexpr int64_t bytes() const { return slot(kChannels, 0); }

  // Indices of words. ready_word: 1 if the message from `sender` has arrived. free_word: 1 if `receiver` has taken the
  // previous message.
  constexpr int gate_word(int gate) const { return gate; }
  constexpr int ready_word(Channel channel, int sender) const { return flag_word(channel, 0, sender); }
  constexpr int free_word(Channel channel, int receiver) const { return flag_word(channel, 1, receiver); }
  // Number of words in arrays that are passed to kernels: an even number, so that all arrays are aligned to 16 bytes.
  // Triton compiles a separate kernel for each alignment.
  constexpr int array_words() const { return world_ + world_ % 2; }
  // 1 once the shard of `peer` in the gather of channel `index` has arrived.
  constexpr int arrived_word(int index, int peer) const {
    return first_flag_word() + message_words() + index * array_words() + peer;
  }
  constexpr int first_flag_word() const { return 16; }
  constexpr int flag_words() const { return message_words() + kChannels * array_words(); }
  constexpr bool is_flag(int word) const {
    return word >= first_flag_word() && word < first_flag_word() + flag_words();
  }
  // The following words are not flags: a rank that gives up sets all flags. order_word: first of W words for a kernel,
  // W - 1 for the order in which it takes shards and one for its time. copies_begin_word: 1 once copies may begin.
  // copies_done_word: 1 once all copies have ended.
  constexpr int order_word(int index) const { return first_flag_word() + flag_words() + index * array_words(); }
  constexpr int copies_begin_word(int index) const { return order_word(kChannels) + index; }
  constexpr int copies_done_word(int index) const { return copies_begin_word(kChannels) + index; }
  constexpr int total_words() const { return copies_done_word(kChannels); }
  // Value of a word before the first call: gates are open, `ready` words are 0, `free` words are 1.
  constexpr uint64_t initial_value(int word) const {
    if (word < first_flag_word()) return word < 2 ? 1 : 0;
    return word < arrived_word(0, 0) ? static_cast<uint64_t>((word - first_flag_word()) / world_ % 2) : 0;
  }

  // Byte offsets of data.
  constexpr int64_t stage(int index) const {
    return align_up(8 * static_cast<int64_t>(total_words())) + index * stage_bytes_;
  }
  constexpr int64_t slot(int index, int sender) const {
    return stage(kChannels) + (static_cast<int64_t>(index) * world_ + sender) * slot_bytes_;
  }

 private:
  constexpr int message_words() const { return 2 * kChannels * 2 * world_; }
  constexpr int flag_word(Channel channel, int flag, int peer) const {
    return first_flag_word() + ((static_cast<int>(channel.kind) * kChannels + channel.index) * 2 + flag) * world_ +
           peer;
  }

  int world_;
  int64_t stage_bytes_;
  int64_t slot_bytes_;
};

}  // namespace fused_tp::copy_engine

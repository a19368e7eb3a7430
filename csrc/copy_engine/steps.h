// The protocol: the steps of each stream of a rank, as plain data. The workspace passes the steps to the CUDA driver. A
// model checker (tests/native/copy_engine/model.cpp) runs the same steps in all possible orders.
//
// A message:
//
//   sender     wait until `free` of the receiver is 1, set it to 0, copy the data, set `ready` at the receiver to 1
//   receiver   wait until `ready` of the sender is 1, set it to 0, use the data, set `free` at the sender to 1
//
// Steps write constants only, so a CUDA graph can contain them, be replayed, and be mixed with other calls. A stream
// waits for words of its own rank only, so nothing polls over NVLink or PCIe. NCCL and DeepEP also signal copies by
// words that are written to a peer.
//
// Each step of a rank waits only for steps that its peers enqueue before they wait for any later step of this rank. So
// there is no deadlock even if all streams of a device share one hardware queue.
//
// A gather for a kernel that waits for shards itself (`offer`, `fetch`, `end_fetch`): the caller's stream stages the
// shard before the kernel, because a copy within a GPU may be a kernel too, which would find no free SM while the first
// kernel waits. The copy of each shard sets its arrived_word, which the kernel polls. The caller's stream and the pull
// streams synchronize by words, not by events, so that the work of each can be a separate graph: copies_begin_word
// starts the copies, copies_done_word signals their end. The caller's stream clears the arrived_words before its next
// gather in the channel, after the kernel that has read them.
//
// Giving up: if a deadline expires or a peer dies, a rank must make its streams continue, and the only way is to set
// the words for which they wait. From then on it copies without permission: it overwrites memory that peers still read,
// and it signals data that has not arrived. So it first closes the gates of all ranks, its own included. Every call
// ends with two gates in the caller's stream, behind all reads of memory that peers write. So if a call has passed both
// gates, no rank had given up before, and its data is valid. A rank that finds its gates closed gives up too. It fills
// the results of a call at its gates with 0xFF (NaN) and then lets the call pass. Two gates are needed: while the call
// is held at one, the rank closes the other, before the next call, perhaps a replay of the same graph, reaches it.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_engine/layout.h"

namespace fused_tp::copy_engine {

// Offset in the workspace of `rank`. If rank is kPrivate: a device address outside of workspaces.
struct Location {
  int rank;
  int64_t offset;
};

constexpr int kPrivate = -1;

struct Step {
  enum Kind : uint8_t {
    kWait,    // wait until word `word` of this rank (`rank`) is 1
    kWrite,   // write `value` to word `word` of rank `rank`
    kCopy,    // copy `bytes` from `from` to `to`
    kReport,  // write `value` to this rank's progress word `word`, in host memory
  };
  Kind kind;
  int rank = 0;
  int word = 0;
  uint64_t value = 0;
  Location from{}, to{};
  int64_t bytes = 0;
};

using Steps = std::vector<Step>;

// -- progress of a rank -----------------------------------------------------------------------------------------------

// Progress words are odd during a wait, as driver::GraphDeadline expects.
constexpr int kGateProgress = 0;
enum class Wait {
  kPull = 0,
  kSend = 1,
  kReceive = 2
};  // kPull, kReceive: wait for data from a peer; kSend: wait until the peer has taken the previous data
constexpr int progress_word(Wait wait, int peer, int world) { return 1 + static_cast<int>(wait) * world + peer; }
constexpr int progress_words(int world) { return 1 + 3 * world; }
// Further words in the same memory. passed_word: number of the last passage of the gates outside of graphs.
// expired_word: set to 1 by a kernel whose wait has timed out.
constexpr int passed_word(int world) { return progress_words(world); }
// Aligned to 16 bytes for every number of ranks, because it is passed to kernels (see Layout::array_words).
constexpr int expired_word(int world) { return (progress_words(world) + 2) / 2 * 2; }
constexpr int host_words(int world) { return expired_word(world) + 1; }
constexpr uint64_t wait_begun(uint64_t call) { return 2 * call + 1; }
constexpr uint64_t wait_ended(uint64_t call) { return 2 * call + 2; }

constexpr uint64_t held_at_gate(uint64_t passage, int gate) { return 8 * passage + (gate == 0 ? 1 : 3); }
constexpr uint64_t passed_gates(uint64_t passage) { return 8 * passage + 4; }

// Values of a gate word: kOpen, or closed_by(rank).
constexpr uint64_t kOpen = 1;
constexpr uint64_t closed_by(int rank) { return static_cast<uint64_t>(rank) + 2; }

// -- calls ------------------------------------------------------------------------------------------------------------

inline Step wait_step(int rank, int word) { return {Step::kWait, rank, word, 1, {}, {}, 0}; }
inline Step write_step(int rank, int word, uint64_t value) { return {Step::kWrite, rank, word, value, {}, {}, 0}; }
inline Step copy_step(Location from, Location to, int64_t bytes) { return {Step::kCopy, 0, 0, 0, from, to, bytes}; }
inline Step report_step(int word, uint64_t value) { return {Step::kReport, 0, word, value, {}, {}, 0}; }

// Ranks handle their peers in order of distance, so that no two ranks begin with the same peer.
inline int peer_at(int rank, int distance, int world) { return (rank + distance) % world; }

class Protocol {
 public:
  Protocol(const Layout& layout, int rank) : layout_(layout), rank_(rank) {}
  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }

  // Gather, sender: once all peers have copied the previous shard, copies this rank's shard to its stage.
  void stage(Steps& steps, int index, uint64_t call, Location shard, int64_t bytes) const {
    const Channel channel{ChannelKind::kGather, index};
    for (int distance = 1; distance < world(); ++distance)
      acquire_slot(steps, channel, call, peer_at(rank_, distance, world()));
    copy(steps, shard, {rank_, layout_.stage(index)}, bytes);
    // Signal in the order in which peers pull from this rank: the peer at distance W - 1 pulls from it first.
    for (int distance = world() - 1; distance >= 1; --distance)
      signal_ready(steps, channel, peer_at(rank_, distance, world()));
  }

  // Gather, receiver: copies `peer`'s shard from its stage.
  void pull(Steps& steps, int index, uint64_t call, int peer, Location to, int64_t bytes) const {
    const Channel channel{ChannelKind::kGather, index};
    wait_ready(steps, channel, call, peer, Wait::kPull);
    copy(steps, {peer, layout_.stage(index)}, to, bytes);
    signal_free(steps, channel, peer);
  }

  // Gather for a kernel that waits for shards itself: steps of the caller's stream before the kernel. If
  // `has_own_destination`, also copies this rank's shard to `own_destination`.
  void offer(Steps& steps, int index, uint64_t call, Location shard, Location own_destination, int64_t bytes,
             bool has_own_destination) const {
    for (int peer = 0; peer < world(); ++peer) {
      steps.push_back(write_step(rank_, layout_.arrived_word(index, peer), 0));
      steps.push_back(write_step(rank_, layout_.order_word(index) + peer, 0));
    }
    stage(steps, index, call, shard, bytes);
    if (has_own_destination) copy(steps, shard, own_destination, bytes);
    steps.push_back(write_step(rank_, layout_.copies_begin_word(index), 1));
  }
  // In the first pull stream, before all copies.
  void begin_fetch(Steps& steps, int index) const {
    steps.push_back(wait_step(rank_, layout_.copies_begin_word(index)));
    steps.push_back(write_step(rank_, layout_.copies_begin_word(index), 0));
  }
  void fetch(Steps& steps, int index, uint64_t call, int peer, Location to, int64_t bytes) const {
    pull(steps, index, call, peer, to, bytes);
    steps.push_back(write_step(rank_, layout_.arrived_word(index, peer), 1));
  }
  // In the first pull stream, after all copies.
  void end_fetch(Steps& steps, int index) const {
    steps.push_back(write_step(rank_, layout_.copies_done_word(index), 1));
  }
  // In the caller's stream, at the end of the call: the caller may then reuse its memory.
  void wait_copies_done(Steps& steps, int index) const {
    steps.push_back(wait_step(rank_, layout_.copies_done_word(index)));
    steps.push_back(write_step(rank_, layout_.copies_done_word(index), 0));
  }

  // Scatter, sender: copies a block to this rank's slot at `peer`.
  void push(Steps& steps, int index, uint64_t call, int peer, Location block, int64_t bytes) const {
    const Channel channel{ChannelKind::kScatter, index};
    acquire_slot(steps, channel, call, peer);
    copy(steps, block, {peer, layout_.slot(index, rank_)}, bytes);
    signal_ready(steps, channel, peer);
  }

  // Scatter, receiver: `receive`, then the work that reads the slots, then `release`.
  void receive(Steps& steps, int index, uint64_t call) const {
    for (int distance = 1; distance < world(); ++distance)
      wait_ready(steps, {ChannelKind::kScatter, index}, call, peer_at(rank_, distance, world()), Wait::kReceive);
  }
  void release(Steps& steps, int index) const {
    for (int distance = 1; distance < world(); ++distance)
      signal_free(steps, {ChannelKind::kScatter, index}, peer_at(rank_, distance, world()));
  }

  // Two gates at the end of a call. `passage` numbers the calls of this function; a replayed graph repeats its numbers.
  void pass_gates(Steps& steps, uint64_t passage, bool is_captured) const {
    for (int gate = 0; gate < 2; ++gate) {
      steps.push_back(report_step(kGateProgress, held_at_gate(passage, gate)));
      steps.push_back(wait_step(rank_, layout_.gate_word(gate)));
    }
    steps.push_back(report_step(kGateProgress, passed_gates(passage)));
    if (!is_captured) steps.push_back(report_step(passed_word(world()), passage));
  }

  // -- giving up: each of these steps only once the previous ones have taken effect -----------------------------------

  void close_all_gates(Steps& steps) const {
    for (int peer = 0; peer < world(); ++peer)
      for (int gate = 0; gate < 2; ++gate) steps.push_back(write_step(peer, layout_.gate_word(gate), closed_by(rank_)));
  }

  // Sets every word that this rank's streams may wait for, as if all data had arrived. The caller repeats it until the
  // streams are idle, because steps that are still enqueued reset words.
  void set_all_flags(Steps& steps) const {
    for (int word = layout_.first_flag_word(); word < layout_.total_words(); ++word)
      steps.push_back(write_step(rank_, word, 1));
  }

  // For a call that is held at `gate`: close the other gate; if `gate` is 0, fill the call's results; then open `gate`.
  void close_other_gate(Steps& steps, int gate) const {
    steps.push_back(write_step(rank_, layout_.gate_word(1 - gate), closed_by(rank_)));
  }
  void open_gate(Steps& steps, int gate) const { steps.push_back(write_step(rank_, layout_.gate_word(gate), kOpen)); }

 private:
  int world() const { return layout_.world(); }

  void acquire_slot(Steps& steps, Channel channel, uint64_t call, int peer) const {
    const int progress = progress_word(Wait::kSend, peer, world());
    steps.push_back(report_step(progress, wait_begun(call)));
    steps.push_back(wait_step(rank_, layout_.free_word(channel, peer)));
    steps.push_back(write_step(rank_, layout_.free_word(channel, peer), 0));
    steps.push_back(report_step(progress, wait_ended(call)));
  }
  void signal_ready(Steps& steps, Channel channel, int peer) const {
    steps.push_back(write_step(peer, layout_.ready_word(channel, rank_), 1));
  }
  void wait_ready(Steps& steps, Channel channel, uint64_t call, int peer, Wait wait) const {
    const int progress = progress_word(wait, peer, world());
    steps.push_back(report_step(progress, wait_begun(call)));
    steps.push_back(wait_step(rank_, layout_.ready_word(channel, peer)));
    steps.push_back(write_step(rank_, layout_.ready_word(channel, peer), 0));
    steps.push_back(report_step(progress, wait_ended(call)));
  }
  void signal_free(Steps& steps, Channel channel, int peer) const {
    steps.push_back(write_step(peer, layout_.free_word(channel, rank_), 1));
  }
  static void copy(Steps& steps, Location from, Location to, int64_t bytes) {
    if (bytes > 0) steps.push_back(copy_step(from, to, bytes));
  }

  Layout layout_;
  int rank_;
};

}  // namespace fused_tp::copy_engine

// The protocol: the steps of each stream of a rank, as plain data. The workspace passes the steps to the CUDA driver; a
// test runs the same steps in all possible orders.
//
// For a message, the sender waits until `free` of the receiver is 1, sets it to 0, moves the bytes and sets `ready` at
// the receiver to 1. The receiver waits until `ready` is 1, sets it to 0, uses the bytes and sets `free` at the sender
// to 1. Only constants are written, so a CUDA graph can hold all steps, be replayed, and be mixed with other calls. A
// stream waits for words of its own rank only: no stream polls over a link.
//
// Each step of a rank waits only for steps that its peers enqueue before they wait for any later step of this rank. So
// streams may share a queue of the device, even all of them, without a deadlock. NVIDIA's NCCL and DeepSeek's DeepEP
// signal copies in the same way, by words that streams write at a peer.
//
// A gather that a kernel waits for (`offer`, `fetch`, `end_fetch`): the caller's stream stages the shard before that
// kernel, since a copy within one GPU may itself be a kernel, which finds no room beside one that waits. Each shard
// that arrives sets `arrived`, which the kernel polls. The caller's stream and the copying streams synchronize by
// words, not events, so that the work of each can be one graph: `begun` starts the copies, `drained` signals their end.
// The caller's stream clears `arrived` before its next gather in the channel, after the kernel that has read it.
//
// A rank that gives up (a deadline, a peer that died) must make its streams continue, and the only way is to set the
// words that they wait for. From then on it moves bytes without permission: it overwrites memory that peers still read,
// and signals data that has not arrived. So it first closes the gates of all ranks, including its own. Every call ends
// with two gates in the caller's stream, after everything that reads memory that peers write. Hence a call that has
// passed its gates moved all its bytes before any rank gave up, so they are right. A rank that finds its gates closed
// gives up too. It lets a call pass once it has filled that call's results with 0xFF (NaN). There are two gates so that
// it can close one while the call is held at the other, before the next call, maybe of the same CUDA graph, reaches it.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_engine/layout.h"

namespace fused_tp::copy_engine {

// Offset in a rank's workspace; with rank kPrivate the address of memory of this rank alone.
struct Place {
  int rank;
  int64_t offset;
};

constexpr int kPrivate = -1;

struct Step {
  enum Kind : uint8_t {
    kWait,   // until word `word` of rank `rank` (this one) is 1
    kWrite,  // word `word` of rank `rank` becomes `value`
    kCopy,   // `bytes` from `from` to `to`
    kSay,    // this rank's progress word `word`, in host memory, becomes `value`
  };
  Kind kind;
  int rank = 0;
  int word = 0;
  uint64_t value = 0;
  Place from{}, to{};
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
};  // kPull, kReceive: for the data of a peer; kSend: until it has taken the previous data
constexpr int progress_of(Wait wait, int peer, int world) { return 1 + static_cast<int>(wait) * world + peer; }
constexpr int progress_words(int world) { return 1 + 3 * world; }
// More words in the same memory: the last passage outside of graphs, and 1 if a kernel's wait has expired.
constexpr int passed_word(int world) { return progress_words(world); }
// A kernel gets the address of this word, so it is a multiple of 16 bytes for every number of ranks (see Layout::run).
constexpr int expired_word(int world) { return (progress_words(world) + 2) / 2 * 2; }
constexpr int told_words(int world) { return expired_word(world) + 1; }
constexpr uint64_t waiting(uint64_t call) { return 2 * call + 1; }
constexpr uint64_t done(uint64_t call) { return 2 * call + 2; }

constexpr uint64_t at_gate(uint64_t passage, int which) { return 8 * passage + (which == 0 ? 1 : 3); }
constexpr uint64_t behind_gates(uint64_t passage) { return 8 * passage + 4; }

// Values of a gate word: open, or closed by a rank.
constexpr uint64_t kOpen = 1;
constexpr uint64_t closed_by(int rank) { return static_cast<uint64_t>(rank) + 2; }

// -- calls ------------------------------------------------------------------------------------------------------------

inline Step wait_step(int rank, int word) { return {Step::kWait, rank, word, 1, {}, {}, 0}; }
inline Step write_step(int rank, int word, uint64_t value) { return {Step::kWrite, rank, word, value, {}, {}, 0}; }
inline Step copy_step(Place from, Place to, int64_t bytes) { return {Step::kCopy, 0, 0, 0, from, to, bytes}; }
inline Step say_step(int word, uint64_t value) { return {Step::kSay, 0, word, value, {}, {}, 0}; }

// This rank sends its messages in order of distance, so that no two ranks begin with the same peer.
inline int peer_at(int rank, int distance, int world) { return (rank + distance) % world; }

class Protocol {
 public:
  Protocol(const Layout& layout, int rank) : layout_(layout), rank_(rank) {}
  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }

  // Gather, sender: copies the shard to this rank's stage once all peers have copied its previous content.
  void stage(Steps& steps, int index, uint64_t call, Place shard, int64_t bytes) const {
    const Channel channel{Way::kGather, index};
    for (int distance = 1; distance < world(); ++distance)
      take_leave(steps, channel, call, peer_at(rank_, distance, world()));
    copy(steps, shard, {rank_, layout_.stage(index)}, bytes);
    // The rank before this one pulls first: this rank is its nearest peer.
    for (int distance = world() - 1; distance >= 1; --distance)
      hand_over(steps, channel, peer_at(rank_, distance, world()));
  }

  // Gather, receiver: copies `peer`'s shard out of its stage.
  void pull(Steps& steps, int index, uint64_t call, int peer, Place to, int64_t bytes) const {
    const Channel channel{Way::kGather, index};
    await(steps, channel, call, peer, Wait::kPull);
    copy(steps, {peer, layout_.stage(index)}, to, bytes);
    give_back(steps, channel, peer);
  }

  // Gather for a kernel that waits: the caller's stream, before the kernel. `own`: destination of this rank's shard.
  void offer(Steps& steps, int index, uint64_t call, Place shard, Place own, int64_t bytes, bool keep) const {
    for (int peer = 0; peer < world(); ++peer) {
      steps.push_back(write_step(rank_, layout_.arrived(index, peer), 0));
      steps.push_back(write_step(rank_, layout_.order(index) + peer, 0));
    }
    stage(steps, index, call, shard, bytes);
    if (keep) copy(steps, shard, own, bytes);
    steps.push_back(write_step(rank_, layout_.begun(index), 1));
  }
  // In the first copying stream, before all copies.
  void begin_fetch(Steps& steps, int index) const {
    steps.push_back(wait_step(rank_, layout_.begun(index)));
    steps.push_back(write_step(rank_, layout_.begun(index), 0));
  }
  void fetch(Steps& steps, int index, uint64_t call, int peer, Place to, int64_t bytes) const {
    pull(steps, index, call, peer, to, bytes);
    steps.push_back(write_step(rank_, layout_.arrived(index, peer), 1));
  }
  // In the first copying stream, after all copies.
  void end_fetch(Steps& steps, int index) const { steps.push_back(write_step(rank_, layout_.drained(index), 1)); }
  // In the caller's stream: after this the caller may reuse its memory.
  void await_fetched(Steps& steps, int index) const {
    steps.push_back(wait_step(rank_, layout_.drained(index)));
    steps.push_back(write_step(rank_, layout_.drained(index), 0));
  }

  // Scatter, sender: copies a block to this rank's slot at `peer`.
  void push(Steps& steps, int index, uint64_t call, int peer, Place block, int64_t bytes) const {
    const Channel channel{Way::kScatter, index};
    take_leave(steps, channel, call, peer);
    copy(steps, block, {peer, layout_.slot(index, rank_)}, bytes);
    hand_over(steps, channel, peer);
  }

  // Scatter, receiver: `receive`, use of the slots, `release`.
  void receive(Steps& steps, int index, uint64_t call) const {
    for (int distance = 1; distance < world(); ++distance)
      await(steps, {Way::kScatter, index}, call, peer_at(rank_, distance, world()), Wait::kReceive);
  }
  void release(Steps& steps, int index) const {
    for (int distance = 1; distance < world(); ++distance)
      give_back(steps, {Way::kScatter, index}, peer_at(rank_, distance, world()));
  }

  // The end of a call. `passage` counts the passages of this rank; one in a graph happens more than once.
  void pass_gates(Steps& steps, uint64_t passage, bool captured) const {
    for (int which = 0; which < 2; ++which) {
      steps.push_back(say_step(kGateProgress, at_gate(passage, which)));
      steps.push_back(wait_step(rank_, layout_.gate(which)));
    }
    steps.push_back(say_step(kGateProgress, behind_gates(passage)));
    if (!captured) steps.push_back(say_step(passed_word(world()), passage));
  }

  // -- giving up; each only once the one before has taken effect ------------------------------------------------------

  void close_all_gates(Steps& steps) const {
    for (int peer = 0; peer < world(); ++peer)
      for (int which = 0; which < 2; ++which) steps.push_back(write_step(peer, layout_.gate(which), closed_by(rank_)));
  }

  // Repeated: sets every word that this rank's streams wait for, as if all data had arrived.
  void force(Steps& steps) const {
    for (int word = layout_.first_flag(); word < layout_.words(); ++word) steps.push_back(write_step(rank_, word, 1));
  }

  // For a call at gate `which`: close the other gate, then let it pass. At the first, fill its results in between.
  void shut_other(Steps& steps, int which) const {
    steps.push_back(write_step(rank_, layout_.gate(1 - which), closed_by(rank_)));
  }
  void let_through(Steps& steps, int which) const { steps.push_back(write_step(rank_, layout_.gate(which), kOpen)); }

 private:
  int world() const { return layout_.world(); }

  void take_leave(Steps& steps, Channel channel, uint64_t call, int peer) const {
    const int progress = progress_of(Wait::kSend, peer, world());
    steps.push_back(say_step(progress, waiting(call)));
    steps.push_back(wait_step(rank_, layout_.free(channel, peer)));
    steps.push_back(write_step(rank_, layout_.free(channel, peer), 0));
    steps.push_back(say_step(progress, done(call)));
  }
  void hand_over(Steps& steps, Channel channel, int peer) const {
    steps.push_back(write_step(peer, layout_.ready(channel, rank_), 1));
  }
  void await(Steps& steps, Channel channel, uint64_t call, int peer, Wait wait) const {
    const int progress = progress_of(wait, peer, world());
    steps.push_back(say_step(progress, waiting(call)));
    steps.push_back(wait_step(rank_, layout_.ready(channel, peer)));
    steps.push_back(write_step(rank_, layout_.ready(channel, peer), 0));
    steps.push_back(say_step(progress, done(call)));
  }
  void give_back(Steps& steps, Channel channel, int peer) const {
    steps.push_back(write_step(peer, layout_.free(channel, rank_), 1));
  }
  static void copy(Steps& steps, Place from, Place to, int64_t bytes) {
    if (bytes > 0) steps.push_back(copy_step(from, to, bytes));
  }

  Layout layout_;
  int rank_;
};

}  // namespace fused_tp::copy_engine

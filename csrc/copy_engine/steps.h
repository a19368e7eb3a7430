// The protocol: what each stream of a rank does, step by step, as plain data. The workspace gives the steps to the CUDA
// driver; a test runs the very same steps through all orders in which they can happen.
//
// For a message, the sender waits until `free` of the receiver is 1, sets it to 0, moves the bytes and sets `ready` at
// the receiver to 1. The receiver waits until `ready` is 1, sets it to 0, uses the bytes and sets `free` at the sender
// to 1. Only constants are written, so a CUDA graph holds all of it, may be replayed, and mixed with other calls. A
// stream waits for words of its own rank only: no stream polls over a link.
//
// In the order in which a rank enqueues its steps, each waits only for what its peers have enqueued before they
// wait for anything later of this rank. So streams that share a queue of the device, even all of them, do not lead to a
// deadlock. NVIDIA's NCCL and DeepSeek's DeepEP signal copies in the same way, by words that streams write at a peer.
//
// A gather that a kernel waits for (`offer`, `fetch`, `end_fetch`): the caller's stream stages the shard in front of
// that kernel, since a copy on one GPU may itself be a kernel, which finds no room beside one that waits. Each shard
// that has come sets `arrived`, for which the kernel polls. The streams of both know of each other by words, not
// events, so that what each of them does can be one graph: `begun` lets the copies begin, `drained` says that they have
// ended. The caller's stream clears `arrived` before its next gather in the channel, behind the kernel that has read
// it.
//
// A rank that gives up (a deadline, a peer that died) must get its streams to go on, and the only way is to set the
// words that they wait for. From then on it moves bytes without leave: it overwrites what others still read, and tells
// them of data that is not there. So before that it closes the gates of all ranks, its own too. Every call ends with
// two gates in the caller's stream, behind everything that reads memory that others write. Hence: a call that has
// passed its gates moved all its bytes while no rank had given up yet, so they are right. A rank that finds its gates
// closed gives up too. It lets a call through once it has filled that call's results with 0xFF (NaN); two gates, so
// that it can close one while the call is held at the other, before the next call, maybe of the same CUDA graph, comes
// there.
#pragma once

#include <cstdint>
#include <vector>

#include "copy_engine/layout.h"

namespace fused_tp::copy_engine {

// Bytes of a rank's workspace; with rank -1 memory of this rank alone, by its address.
struct Place {
  int rank;
  int64_t offset;
};

constexpr int kPrivate = -1;

struct Step {
  enum Kind : uint8_t {
    kWait,   // until word `word` of rank `rank` (this one) is 1
    kWrite,  // it becomes `value`
    kCopy,   // `bytes` from `from` to `to`
    kSay,    // this rank's progress word `word` becomes `value`, in memory of the host
  };
  Kind kind;
  int rank = 0;
  int word = 0;
  uint64_t value = 0;
  Place from{}, to{};
  int64_t bytes = 0;
};

using Steps = std::vector<Step>;

// -- what a rank says of its progress ---------------------------------------------------------------------------------

// Progress words: odd while something is waited for, which is what driver::GraphDeadline reads.
constexpr int kGateProgress = 0;
enum class Wait {
  kPull = 0,
  kSend = 1,
  kReceive = 2
};  // for the data of a peer, or until it has taken what came before
constexpr int progress_of(Wait wait, int peer, int world) { return 1 + static_cast<int>(wait) * world + peer; }
constexpr int progress_words(int world) { return 1 + 3 * world; }
// More words that are told there: the last passage outside of graphs, and whether a kernel has waited in vain.
constexpr int passed_word(int world) { return progress_words(world); }
// A kernel gets its address, so that it lies at a multiple of 16 bytes for every number of ranks (see Layout::run).
constexpr int expired_word(int world) { return (progress_words(world) + 2) / 2 * 2; }
constexpr int told_words(int world) { return expired_word(world) + 1; }
constexpr uint64_t waiting(uint64_t call) { return 2 * call + 1; }
constexpr uint64_t done(uint64_t call) { return 2 * call + 2; }

constexpr uint64_t at_gate(uint64_t passage, int which) { return 8 * passage + (which == 0 ? 1 : 3); }
constexpr uint64_t behind_gates(uint64_t passage) { return 8 * passage + 4; }

// What the gate word holds: the rank that closed it, or that it is open.
constexpr uint64_t kOpen = 1;
constexpr uint64_t closed_by(int rank) { return static_cast<uint64_t>(rank) + 2; }

// -- calls ------------------------------------------------------------------------------------------------------------

inline Step wait_step(int rank, int word) { return {Step::kWait, rank, word, 1, {}, {}, 0}; }
inline Step write_step(int rank, int word, uint64_t value) { return {Step::kWrite, rank, word, value, {}, {}, 0}; }
inline Step copy_step(Place from, Place to, int64_t bytes) { return {Step::kCopy, 0, 0, 0, from, to, bytes}; }
inline Step say_step(int word, uint64_t value) { return {Step::kSay, 0, word, value, {}, {}, 0}; }

// This rank's messages go out in the order of distance, so that no two ranks turn to the same peer first.
inline int peer_at(int rank, int distance, int world) { return (rank + distance) % world; }

class Protocol {
 public:
  Protocol(const Layout& layout, int rank) : layout_(layout), rank_(rank) {}
  const Layout& layout() const { return layout_; }
  int rank() const { return rank_; }

  // Gather, sender: the shard goes into this rank's stage once all have copied what was there.
  void stage(Steps& steps, int index, uint64_t call, Place shard, int64_t bytes) const {
    const Channel channel{Way::kGather, index};
    for (int distance = 1; distance < world(); ++distance)
      take_leave(steps, channel, call, peer_at(rank_, distance, world()));
    copy(steps, shard, {rank_, layout_.stage(index)}, bytes);
    // The first to come for it is the rank before this one, for which this is the nearest.
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

  // The same for a kernel that waits: in the caller's stream, in front of it. `own`: where this rank's shard goes, too.
  void offer(Steps& steps, int index, uint64_t call, Place shard, Place own, int64_t bytes, bool keep) const {
    for (int peer = 0; peer < world(); ++peer) {
      steps.push_back(write_step(rank_, layout_.arrived(index, peer), 0));
      steps.push_back(write_step(rank_, layout_.order(index) + peer, 0));
    }
    stage(steps, index, call, shard, bytes);
    if (keep) copy(steps, shard, own, bytes);
    steps.push_back(write_step(rank_, layout_.begun(index), 1));
  }
  // In the first of the streams that copy, in front of all copies.
  void begin_fetch(Steps& steps, int index) const {
    steps.push_back(wait_step(rank_, layout_.begun(index)));
    steps.push_back(write_step(rank_, layout_.begun(index), 0));
  }
  void fetch(Steps& steps, int index, uint64_t call, int peer, Place to, int64_t bytes) const {
    pull(steps, index, call, peer, to, bytes);
    steps.push_back(write_step(rank_, layout_.arrived(index, peer), 1));
  }
  // Behind all copies.
  void end_fetch(Steps& steps, int index) const { steps.push_back(write_step(rank_, layout_.drained(index), 1)); }
  // In the caller's stream: from here on its memory is its own again.
  void await_fetched(Steps& steps, int index) const {
    steps.push_back(wait_step(rank_, layout_.drained(index)));
    steps.push_back(write_step(rank_, layout_.drained(index), 0));
  }

  // Scatter, sender: a block goes into this rank's slot at `peer`.
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

  // The end of a call. `passage` counts the passages of this rank; one of a graph comes more than once.
  void pass_gates(Steps& steps, uint64_t passage, bool captured) const {
    for (int which = 0; which < 2; ++which) {
      steps.push_back(say_step(kGateProgress, at_gate(passage, which)));
      steps.push_back(wait_step(rank_, layout_.gate(which)));
    }
    steps.push_back(say_step(kGateProgress, behind_gates(passage)));
    if (!captured) steps.push_back(say_step(passed_word(world()), passage));
  }

  // -- giving up; each only once the one before has come into effect --------------------------------------------------

  void close_all_gates(Steps& steps) const {
    for (int peer = 0; peer < world(); ++peer)
      for (int which = 0; which < 2; ++which) steps.push_back(write_step(peer, layout_.gate(which), closed_by(rank_)));
  }

  // Again and again: everything that this rank's streams wait for has come.
  void force(Steps& steps) const {
    for (int word = layout_.first_flag(); word < layout_.words(); ++word) steps.push_back(write_step(rank_, word, 1));
  }

  // For a call at gate `which`. At the first, its results are filled between the two.
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

// Group: ranks of one host that share memory. It handles calls in flight, signals, deadlines and lost peers.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "control.h"
#include "dtype.h"
#include "errors.h"
#include "heap.h"
#include "segment.h"

namespace fused_tp::shm {

class Group;

// One collective call on this rank, from Group::begin to `end`. The destructor abandons a call that has not ended. Only
// one thread at a time may use a call.
class Call {
 public:
  Call(std::shared_ptr<Group> group, uint64_t call_number, int slot);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  uint64_t number() const { return call_number_; }
  // Returns the rank's workspace of this call. Waits until the rank has begun the call.
  char* workspace(int rank);
  size_t workspace_bytes(int rank);
  // Signals `stage`: everything that this rank has written so far is visible to a rank that has waited for it. The
  // first stage is 1 or more, and each call of `signal` passes a larger one.
  void signal(uint32_t stage);
  // Waits until `rank` has signalled `stage` or a later one. Stage 0: until the rank has begun the call.
  void wait(int rank, uint32_t stage);
  // Waits for all ranks.
  void wait_all(uint32_t stage);
  // Waits until all ranks have begun the call, so that a mismatch between the ranks' calls is always detected, and
  // releases the slot.
  void end();
  // Releases the slot without waiting. For errors: this rank sends no further signals of this call.
  void abandon();

 private:
  friend class Group;

  bool has_reached(int rank, uint32_t stage) const;
  void verify_signature(int rank);
  void wait_slowly(int rank, uint32_t stage, bool waits_for_all);

  std::shared_ptr<Group> group_;
  uint64_t call_number_;
  int slot_;
  uint64_t verified_ranks_ = 0;  // bit r: the signature of rank r has been compared with this rank's
  bool has_ended_ = false;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Reserves this rank's segment. `check_interrupt` is called about ten times a second during long waits and may throw.
  // If it throws in a call that peers have already seen, this rank leaves the group (give_up).
  Group(int rank, int size, size_t reserve_bytes, std::function<double()> timeout_seconds,
        std::function<void()> check_interrupt);
  ~Group();

  SegmentAddress address() const { return segments_[rank_]->address(); }
  // Maps the segments of all peers. Throws GroupError with the reason if a segment cannot be mapped.
  void connect(const std::vector<SegmentAddress>& addresses);

  int rank() const { return rank_; }
  int size() const { return size_; }
  uint64_t calls() const { return last_call_.load(std::memory_order_relaxed); }  // number of calls begun on this rank
  double waited_seconds() const { return static_cast<double>(waited_ns_.load(std::memory_order_relaxed)) * 1e-9; }

  // Begins the next call of this group. All ranks pass the same signature. If `begin` throws on one rank only (out of
  // memory, interrupted), its number is used up all the same: the peers find that this rank has left the call, and
  // later calls still match.
  //
  // bytes:            size of this rank's workspace; may differ between ranks.
  // publishes_now:    if false, peers see the call only at its first signal, which saves a transfer of the slot's cache
  //                   line.
  // waits_for_reuse:  first wait for peers that are still in calls that this rank has ended. The workspace can then
  //                   reuse the memory of these calls, which is likely in cache.
  // offset:           use this range of the heap as the workspace. The caller owns it until no peer reads it.
  std::unique_ptr<Call> begin(const Signature& signature, size_t bytes, bool publishes_now = true,
                              bool waits_for_reuse = false, const size_t* offset = nullptr);
  // True if `begin` with `waits_for_reuse` would not wait for peers.
  bool is_settled();

  // Description of a wait for peers.
  struct Wait {
    std::function<bool()> is_done;
    std::function<bool(int)> is_missing;     // for the error message: true if rank r has not contributed yet
    std::function<bool(int)> depends_on;     // true if the wait cannot succeed once rank r has died
    std::function<void()> check;             // throws if the wait cannot succeed for another reason
    std::function<std::string()> call_text;  // for the error message: the call that waits
  };
  // Waits until is_done(). Throws at the deadline, or if the wait cannot succeed.
  void wait_until(const Wait& wait);

  const std::shared_ptr<Heap>& heap() { return heap_; }  // shared: results in the heap may outlive the group
  // Allocates a range of the heap. If it is full, first frees the workspaces of calls that all ranks have ended.
  size_t allocate(size_t bytes);
  // Returns a peer whose process has exited, or -1.
  int dead_peer() const;
  const std::shared_ptr<Segment>& segment(int rank) const { return segments_[rank]; }
  ControlBlock& control(int rank) const { return *reinterpret_cast<ControlBlock*>(segments_[rank]->data()); }
  void close();
  // Leaves the group for good. Later calls of this rank throw with `reason`; peers that wait for this rank
  // throw PeerLostError.
  void give_up(const std::string& reason);

 private:
  friend class Call;

  void throw_if_unusable();
  void check_peers(const Wait& wait);
  bool has_closed(int rank) const;
  bool is_dead(int rank) const;
  bool has_ended(int rank, uint64_t call_number) const {
    return control(rank).slots[call_number % kSlots].last_ended.load(std::memory_order_acquire) >= call_number;
  }
  // If the group has failed on `rank`, fails here too, with the same reason.
  void adopt_failure(int rank, const std::string& call_text);
  // Both make the group unusable on this rank and throw the error.
  [[noreturn]] void fail(RankState state, const std::string& reason);
  [[noreturn]] void fail_lost_peer(int rank, const std::string& how, const std::string& call_text);
  // Frees the heap workspaces of calls that all ranks have ended. Requires mutex_.
  void recycle_workspaces();
  bool has_lagging_peers() const;
  // Waits until rank_has_ended(rank) is true for all ranks, before call `number` can begin.
  template <typename HasEnded>
  void wait_for_ranks(HasEnded&& rank_has_ended, const Signature& signature, uint64_t call_number);
  size_t allocate_workspace(size_t bytes, bool waits_for_reuse, const Signature& signature, uint64_t call_number);
  // Updates and returns own_last_ended_.
  uint64_t update_own_last_ended();

  int rank_;
  int size_;
  bool is_oversubscribed_;                   // more ranks than cores
  std::function<double()> timeout_seconds_;  // called once per long wait, so a changed setting takes effect
  std::function<void()> check_interrupt_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<int> pidfds_;
  std::shared_ptr<Heap> heap_;
  std::mutex mutex_;                                        // serializes `begin` and the recycling of workspaces
  std::atomic<uint64_t> last_call_{0};                      // number of the last call; only written with mutex_ held
  uint64_t own_last_ended_ = 0;                             // this rank has ended all calls up to this one
  std::atomic<uint64_t> known_last_ended_[kMaxRanks] = {};  // the same for rank r, as far as this rank knows
  struct HeapWorkspace {
    uint64_t call_number;
    size_t offset;
  };
  std::deque<HeapWorkspace> pending_workspaces_;
  std::mutex failure_mutex_;  // guards the next two members: one thread may fail while another begins a call
  std::string failure_reason_;
  RankState failure_state_ = RankState::kRunning;
  std::atomic<uint64_t> waited_ns_{0};
  bool is_connected_;
  uint32_t fork_count_;  // count_forks() at construction
};

}  // namespace fused_tp::shm

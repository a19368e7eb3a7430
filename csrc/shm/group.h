// A group of ranks on one host that share memory: calls in flight, signals, deadlines, lost peers.
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

// One collective call on this rank, from begin to end. Destruction abandons it. Used by one thread at a time.
class Call {
 public:
  Call(std::shared_ptr<Group> group, uint64_t number, int slot);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  uint64_t number() const { return number_; }
  // That rank's workspace of this call; waits until the rank has begun it.
  char* workspace(int rank);
  size_t workspace_bytes(int rank);
  // Everything this rank wrote before becomes visible to a rank that waits for `stage`. Stages start at 1 and only
  // grow.
  void signal(uint32_t stage);
  // Returns once `rank` has signalled `stage` or a later one. Stage 0: the rank has begun the call.
  void wait(int rank, uint32_t stage);
  void wait_all(uint32_t stage);
  // Waits for all ranks to begin, so that a disagreement is always noticed, and releases the slot.
  void end();
  // Gives the slot back at once: an error is being thrown, and this rank will do no more for the call.
  void abandon();

 private:
  friend class Group;

  bool reached(int rank, uint32_t stage) const;
  void verify(int rank);
  void wait_slowly(int rank, uint32_t stage, bool for_all);

  std::shared_ptr<Group> group_;
  uint64_t number_;
  int slot_;
  uint64_t verified_ = 0;  // bit r: rank r's signature was compared with ours
  bool ended_ = false;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Reserves this rank's segment. `interrupted` is called from time to time during long waits and may throw: if it does
  // in a call that peers have seen, the group is given up.
  Group(int rank, int size, size_t reserve_bytes, std::function<double()> timeout_seconds,
        std::function<void()> interrupted);
  ~Group();

  SegmentAddress address() const { return segments_[rank_]->address(); }
  // Maps every peer. Throws GroupError with the reason if one is not reachable.
  void connect(const std::vector<SegmentAddress>& addresses);

  int rank() const { return rank_; }
  int size() const { return size_; }
  uint64_t calls() const { return last_call_.load(std::memory_order_relaxed); }  // calls begun on this rank
  double waited_seconds() const { return static_cast<double>(waited_ns_.load(std::memory_order_relaxed)) * 1e-9; }

  // Begins the next call of this group. `signature` must agree on all ranks; `bytes` of workspace may differ. With
  // `publish` false peers see the call only at its first signal: this saves one transfer of the slot's line.
  // A begin that fails on this rank alone (no memory, interrupted) still counts as the call: its peers see that
  // this rank left it, and the ranks stay in step.
  // With `reuse` it waits for peers that are still in calls which this rank has ended, so that its workspace reuses the
  // memory of those calls and not the memory next to it.
  // `offset`: offset of its workspace in the heap, a range that the caller owns and keeps until no peer reads it.
  std::unique_ptr<Call> begin(const Signature& signature, size_t bytes, bool publish = true, bool reuse = false,
                              const size_t* offset = nullptr);
  // True if a begin with `reuse` would not have to wait.
  bool settled();

  struct Wait {
    std::function<bool()> done;
    std::function<bool(int)> missing;  // for the error message: true if this rank's part is missing
    std::function<bool(int)> matters;  // true if the wait depends on this rank being alive
    std::function<void()> check;       // checks for other reasons why the wait cannot succeed, and throws them
    std::function<std::string()> doing;
  };
  // Waits until `done`, bounded by the deadline.
  void wait_until(const Wait& wait);

  const std::shared_ptr<Heap>& heap() { return heap_; }  // results over it may outlive the group
  // Allocates a range of the heap; first frees the memory of ended calls, if necessary.
  size_t allocate(size_t bytes);
  // A peer whose process has ended, or -1.
  int dead_peer() const;
  const std::shared_ptr<Segment>& segment(int rank) const { return segments_[rank]; }
  ControlBlock& control(int rank) const { return *reinterpret_cast<ControlBlock*>(segments_[rank]->data()); }
  void close();
  // Leaves the group permanently: this rank's later calls throw `because`, and peers find that it has left.
  void give_up(const std::string& because);

 private:
  friend class Call;

  void throw_if_unusable();
  void check_peers(const Wait& wait);
  bool has_closed(int rank) const;
  bool died(int rank) const;
  bool has_ended(int rank, uint64_t number) const {
    return control(rank).slots[number % kSlots].ended.load(std::memory_order_acquire) >= number;
  }
  // If `rank` has given up the group, this rank gives it up too, for the same reason.
  void follow(int rank, const std::string& doing);
  [[noreturn]] void fail(RankState state, const std::string& because);
  [[noreturn]] void lose(int rank, const std::string& how, const std::string& doing);
  void recycle();
  bool peers_lag() const;
  // Waits until `ended(rank)` for all ranks, on behalf of call `number`.
  template <typename Ended>
  void wait_for_ranks(Ended&& ended, const Signature& signature, uint64_t number);
  size_t allocate_workspace(size_t bytes, bool reuse, const Signature& signature, uint64_t number);
  uint64_t all_ended_by_me();

  int rank_;
  int size_;
  bool crowded_;                             // more ranks than cores
  std::function<double()> timeout_seconds_;  // called once a wait turns out to be long
  std::function<void()> interrupted_;
  std::vector<std::shared_ptr<Segment>> segments_;
  std::vector<int> pidfds_;
  std::shared_ptr<Heap> heap_;
  std::mutex mutex_;                                   // order of calls
  std::atomic<uint64_t> last_call_{0};                 // written with mutex_ held
  uint64_t own_ended_ = 0;                             // this rank has ended all calls up to here
  std::atomic<uint64_t> known_ended_[kMaxRanks] = {};  // calls that rank r has ended, as far as known here
  struct HeapWorkspace {
    uint64_t number;
    size_t offset;
  };
  std::deque<HeapWorkspace> to_recycle_;
  std::mutex failure_mutex_;  // guards the next two: another thread may fail while one begins a call
  std::string unusable_because_;
  RankState unusable_state_ = RankState::kRunning;
  std::atomic<uint64_t> waited_ns_{0};
  bool connected_;
  uint32_t forks_;  // count_forks() when the group was made
};

}  // namespace fused_tp::shm

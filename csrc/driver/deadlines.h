// Deadlines and GraphDeadline: deadlines of ops in flight. They use no threads, clocks or devices: the caller passes
// the time and the results of queries, so tests can simulate both.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

namespace fused_tp::driver {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// Deadlines of the ops of one stream, which begin and end in order. Times are nanoseconds of any monotonic clock.
template <typename Op>
class Deadlines {
 public:
  struct ExpiredOp {
    Op op;
    int64_t waited_ns;
  };

  void add(Op op, int64_t timeout_ns) { ops_.push_back({std::move(op), timeout_ns, kNever}); }

  // Removes ops that have ended. The time of the first remaining op counts from the poll that first sees that it has
  // begun. If it exceeds the timeout, returns this op and removes all ops, so that a stuck stream is reported once.
  template <typename HasBegun, typename HasEnded>
  std::optional<ExpiredOp> poll(int64_t now_ns, HasBegun&& has_begun, HasEnded&& has_ended) {
    while (!ops_.empty() && has_ended(ops_.front().op)) ops_.pop_front();
    if (ops_.empty()) return std::nullopt;
    Entry& oldest = ops_.front();
    if (oldest.begin_ns == kNever && has_begun(oldest.op)) oldest.begin_ns = now_ns;
    if (oldest.begin_ns == kNever || now_ns - oldest.begin_ns < oldest.timeout_ns) return std::nullopt;
    ExpiredOp expired{std::move(oldest.op), now_ns - oldest.begin_ns};
    ops_.clear();
    return expired;
  }

  bool empty() const { return ops_.empty(); }
  void clear() { ops_.clear(); }
  // Shortest timeout of the ops in flight, from which the caller derives its polling interval; kNever if there are
  // none.
  int64_t shortest_timeout_ns() const {
    int64_t shortest = kNever;
    for (const Entry& entry : ops_) shortest = std::min(shortest, entry.timeout_ns);
    return shortest;
  }

 private:
  struct Entry {
    Op op;
    int64_t timeout_ns;
    int64_t begin_ns;  // time of the first poll that saw the op begun; kNever before
  };
  std::deque<Entry> ops_;
};

// Deadline of the ops of a CUDA graph, which writes its progress to a word (GraphProgress): odd during an op. A poll
// sets the top bit of the word. The graph's next write clears the bit, even if it writes the same number, so a replay
// counts as progress.
class GraphDeadline {
 public:
  static constexpr uint64_t kSeenBit = uint64_t{1} << 63;

  struct ExpiredOp {
    uint64_t op;
    int64_t waited_ns;
  };

  std::optional<ExpiredOp> poll(int64_t now_ns, std::atomic<uint64_t>& word, int64_t timeout_ns) {
    uint64_t value = word.load(std::memory_order_acquire);
    is_inside_op_ = value % 2 == 1;
    if (!is_inside_op_) return std::nullopt;
    if (!(value & kSeenBit)) {
      // If the device writes between the load and here, the exchange fails. That write is progress; the next poll sees
      // it.
      word.compare_exchange_strong(value, value | kSeenBit, std::memory_order_acq_rel);
      first_seen_ns_ = now_ns;
      return std::nullopt;
    }
    if (now_ns - first_seen_ns_ < timeout_ns) return std::nullopt;
    return ExpiredOp{((value & ~kSeenBit) - 1) / 2, now_ns - first_seen_ns_};
  }

  bool is_inside_op() const { return is_inside_op_; }

 private:
  bool is_inside_op_ = false;
  int64_t first_seen_ns_ = 0;
};

}  // namespace fused_tp::driver

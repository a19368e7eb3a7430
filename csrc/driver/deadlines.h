// State of the ops in flight, without threads, clocks and devices: the caller passes times and query results.
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

// Ops of one stream, which begin and end in order. Times are nanoseconds of any one clock.
template <typename Op>
class Deadlines {
 public:
  struct Expired {
    Op op;
    int64_t waited_ns;
  };

  void add(Op op, int64_t timeout_ns) { ops_.push_back({std::move(op), timeout_ns, kNever}); }

  // Drops ended ops; starts the clock of the first one that has not ended, once it has begun. Returns that op when its
  // deadline passes, and then forgets all ops: a stream expires once.
  template <typename Begun, typename Ended>
  std::optional<Expired> poll(int64_t now_ns, Begun&& begun, Ended&& ended) {
    while (!ops_.empty() && ended(ops_.front().op)) ops_.pop_front();
    if (ops_.empty()) return std::nullopt;
    Entry& first = ops_.front();
    if (first.begun_ns == kNever && begun(first.op)) first.begun_ns = now_ns;
    if (first.begun_ns == kNever || now_ns - first.begun_ns < first.timeout_ns) return std::nullopt;
    Expired expired{std::move(first.op), now_ns - first.begun_ns};
    ops_.clear();
    return expired;
  }

  bool empty() const { return ops_.empty(); }
  void clear() { ops_.clear(); }
  // The shortest timeout of the ops in flight, which sets the polling interval; kNever if there are none.
  int64_t shortest_timeout_ns() const {
    int64_t shortest = kNever;
    for (const Entry& entry : ops_) shortest = std::min(shortest, entry.timeout_ns);
    return shortest;
  }

 private:
  struct Entry {
    Op op;
    int64_t timeout_ns;
    int64_t begun_ns;  // when a poll first saw that it has begun; kNever before
  };
  std::deque<Entry> ops_;
};

// Progress of a graph, which it writes to a word (GraphWord): odd inside an op. A poll marks the word by its top bit;
// the next write clears the mark, also a write of the same number.
class GraphDeadline {
 public:
  static constexpr uint64_t kSeen = uint64_t{1} << 63;

  struct Expired {
    uint64_t op;
    int64_t waited_ns;
  };

  std::optional<Expired> poll(int64_t now_ns, std::atomic<uint64_t>& word, int64_t timeout_ns) {
    uint64_t value = word.load(std::memory_order_acquire);
    inside_ = value % 2 == 1;
    if (!inside_) return std::nullopt;
    if (!(value & kSeen)) {
      // If the device writes in between, the exchange fails: that is progress, and the next poll sees it.
      word.compare_exchange_strong(value, value | kSeen, std::memory_order_acq_rel);
      since_ns_ = now_ns;
      return std::nullopt;
    }
    if (now_ns - since_ns_ < timeout_ns) return std::nullopt;
    return Expired{((value & ~kSeen) - 1) / 2, now_ns - since_ns_};
  }

  bool inside() const { return inside_; }

 private:
  bool inside_ = false;
  int64_t since_ns_ = 0;
};

}  // namespace fused_tp::driver

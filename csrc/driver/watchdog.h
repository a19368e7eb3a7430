// Watch: watches the ops of a stream that wait for peers, and calls back when a deadline has passed.
//
// Each Watch has a thread, which sleeps while no op is in flight. Callbacks run on this thread and must not need the
// GIL.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver/deadlines.h"
#include "driver/driver.h"

namespace fused_tp::driver {

// An op in a stream. Its timeout counts from the moment at which it can begin: when begin_event is done and the op
// before it has ended.
struct WatchedOp {
  const char* name;         // for the error message; a string literal
  uint64_t call_number;     // of the call to which this op belongs
  SharedEvent begin_event;  // null: the op can begin once the op before it has ended
  SharedEvent end_event;
  double timeout_seconds;
};

// Progress of the ops in CUDA graphs, whose events the host cannot query. The graph itself writes a word of pinned
// memory: 2n + 1 before op n and 2n + 2 after it. The watchdog sets the top bit of each value that it has seen, and the
// graph's next write clears the bit. So a replay that writes the same numbers again counts as progress.
class GraphProgress {
 public:
  GraphProgress(std::shared_ptr<const Driver> driver, int device);
  // Enqueue the writes in a stream that is being captured. `begin` returns the index of the op.
  uint64_t begin(Stream stream, const char* name, uint64_t call_number);
  void end(Stream stream, uint64_t op);

  std::atomic<uint64_t>& word() const { return *static_cast<std::atomic<uint64_t>*>(memory_.data()); }
  // Returns the name and call number of an op, for an error message.
  std::string describe(uint64_t op) const;

 private:
  std::shared_ptr<const Driver> driver_;
  PinnedMemory memory_;
  struct Op {
    const char* name;
    uint64_t call_number;
  };
  mutable std::mutex mutex_;
  std::vector<Op> ops_;
};

// Watchdog of one stream. Its ops must end in the order in which they were added.
class Watch {
 public:
  struct Callbacks {
    // Called once, without locks, when the deadline of `op` has passed after `seconds`. The watch has removed all ops
    // before. The callback must abort the op so that the stream continues.
    std::function<void(const std::string& op, double seconds)> on_timeout;
    // Called once, without locks, when the driver reports an error. CUDA errors are sticky: the device is unusable.
    std::function<void(const std::string& error)> on_error;
    // Called about ten times a second while an op is in flight; may be empty.
    std::function<void()> on_tick;
  };

  Watch(std::shared_ptr<const Driver> driver, int device, Callbacks callbacks);
  // Once the destructor returns, no callback is running or will run, except for one that itself runs the destructor.
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void add(WatchedOp op);
  // From now on also watches the ops of graphs; call it at most once. Each poll calls timeout_seconds. A graph may be
  // replayed at any time, so its progress is polled until the Watch is destroyed.
  void watch_graphs(std::shared_ptr<GraphProgress> progress, std::function<double()> timeout_seconds);
  // Removes all ops, for example because the caller has aborted them itself. Does not wait for the watchdog's
  // thread, which may be blocked in the driver.
  void clear();

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace fused_tp::driver

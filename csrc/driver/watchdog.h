// Watches the ops of a stream that wait for peers, and calls back when a deadline has passed.
//
// Each watch has a thread, which sleeps while nothing is in flight. The thread does not use Python: no callback may
// need the GIL.
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

// An op in a stream. Its time starts when it can begin: once `begun` is done and the op before it has ended.
struct WatchedOp {
  const char* name;   // for the error message; lives as long as the program
  uint64_t number;    // number of the call that this op belongs to
  SharedEvent begun;  // null: as soon as the op before it has ended
  SharedEvent ended;
  double timeout_seconds;
};

// Progress of ops in a CUDA graph, which no event shows: a word of pinned memory that the graph itself writes, 2n + 1
// where op n begins and 2n + 2 where it has ended. The watchdog marks a value that it has seen by setting the top bit,
// and the graph's next write removes the mark: so a replay that writes the same numbers again counts as progress.
class GraphWord {
 public:
  GraphWord(std::shared_ptr<const Driver> driver, int device);
  // Enqueue the writes on a stream that is being captured. `begin` returns the op's number.
  uint64_t begin(Stream stream, const char* name, uint64_t call);
  void end(Stream stream, uint64_t op);

  std::atomic<uint64_t>& word() const { return *static_cast<std::atomic<uint64_t>*>(memory_.data()); }
  // Name and call of an op, for an error message.
  std::string describe(uint64_t op) const;

 private:
  std::shared_ptr<const Driver> driver_;
  PinnedMemory memory_;
  struct Op {
    const char* name;
    uint64_t call;
  };
  mutable std::mutex mutex_;
  std::vector<Op> ops_;
};

// One stream's ops under watch. Ops of a stream end in the order in which they were added.
class Watch {
 public:
  struct Callbacks {
    // Called once, on the watchdog's thread, with no lock held: `what` has waited that many seconds, and its deadline
    // has passed. The watch forgets all its ops first. The callback must make the stream continue.
    std::function<void(const std::string& what, double seconds)> expired;
    // Likewise: the driver reports an error, which is sticky: nothing on the device works any more.
    std::function<void(const std::string& why)> broken;
    // Called about ten times a second while something is in flight; may be empty.
    std::function<void()> tick;
  };

  Watch(std::shared_ptr<const Driver> driver, int device, Callbacks callbacks);
  // No callback begins after it, and none is running when it returns (except one that calls it).
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void add(WatchedOp op);
  // From now on also watches the ops of graphs, with the timeout that each poll asks for; at most once per watch. A
  // graph may run at any time, so the word is polled from time to time for as long as the watch lives.
  void watch_graphs(std::shared_ptr<GraphWord> word, std::function<double()> timeout_seconds);
  // Forgets everything in flight, e.g. because the stream was made to continue by other means. Does not block: the
  // watchdog may be stuck in the driver.
  void clear();

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace fused_tp::driver

// The watchdog of a workspace's streams: none waits for a peer beyond the deadline, and what such a wait was for
// becomes NaN. It has a thread of its own and knows nothing of Python.
//
// It is no driver::Watch, which goes by events: no event tells whether a call that a CUDA graph replays is under way.
// Streams write progress numbers to words of pinned memory instead, in graphs as elsewhere.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy_engine/steps.h"
#include "driver/deadlines.h"
#include "driver/driver.h"
#include "driver/watchdog.h"

namespace fused_tp::copy_engine {

using driver::DeviceAddress;
using driver::Driver;
using driver::Stream;

struct Memory {
  DeviceAddress address;
  size_t bytes;
};

enum class Failure : int { kNone = 0, kTimeout = 1, kLost = 2, kAborted = 3 };

// What a closed gate holds: the rank that gave up first, and why. Ranks that read it pass it on.
struct Closing {
  Failure why;
  int rank;
  uint64_t value() const { return closed_by(rank) | static_cast<uint64_t>(why) << 32; }
  static Closing of(uint64_t value) {
    return {static_cast<Failure>(value >> 32), static_cast<int>((value & 0xFFFFFFFF) - closed_by(0))};
  }
};

// Calls by number, which name their op.
enum class Op : int { kAllGather, kAllGatherMatmul, kMatmulReduceScatter, kMatmulAllReduce, kReduceScatter, kOther };
constexpr uint64_t call_number(uint64_t count, Op op) { return count * 8 + static_cast<uint64_t>(op); }

class StreamWatchdog {
 public:
  // `addresses`: of the ranks' workspaces. `sides`: streams that are to go on too. `rescue`: a stream in which nothing
  // waits.
  StreamWatchdog(std::shared_ptr<const Driver> driver, int device, Protocol protocol,
                 std::vector<DeviceAddress> addresses, std::vector<Stream> sides, Stream rescue);
  ~StreamWatchdog();
  StreamWatchdog(const StreamWatchdog&) = delete;
  StreamWatchdog& operator=(const StreamWatchdog&) = delete;

  // Where progress word `word`, or another that is told there, is for the device, and what it holds.
  DeviceAddress progress(int word) const { return pinned_.device_address() + 8 * static_cast<size_t>(word); }
  uint64_t told(int number) const { return word(number).load(std::memory_order_acquire); }

  // From now on the longest wait.
  void set_timeout(double seconds) { timeout_seconds_.store(seconds, std::memory_order_relaxed); }
  // Before the passage is enqueued: what becomes NaN if it may not pass. `captured`: it may come more than once.
  void expect(uint64_t passage, std::vector<Memory> results, bool captured);

  // That rank's process has ended: waits for it end soon, unless what they wait for has come.
  void lose(int rank);
  // Gives up, and makes the others.
  void abort(const std::string& why);

  // Of the first failure; the sentence names op, call and ranks.
  Failure failure() const { return failure_.load(std::memory_order_acquire); }
  std::string sentence() const;

  // Held while a graph is made in `sides`: the driver ends a capture whose stream is asked whether it is idle.
  std::mutex& capturing() { return capturing_; }

  // Ends the thread: nothing is looked after any more.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  // One round; how long until the next.
  std::chrono::microseconds round();
  std::chrono::microseconds look(int64_t now_ns);
  void read_gates(int64_t now_ns);
  void fail(const Closing& closing, const std::string& sentence);
  bool rescue();
  void write(const Steps& steps);
  bool settle();
  void fill(const Memory& memory);
  void forget_passed(uint64_t progress);
  std::vector<Memory> results_of(uint64_t passage) const;
  bool under_way() const;
  std::string late(int word, uint64_t call, int64_t waited_ns, bool lost) const;
  std::atomic<uint64_t>& word(int number) const;
  DeviceAddress pinned(size_t offset) const { return pinned_.device_address() + offset; }

  std::shared_ptr<const Driver> driver_;
  int device_;
  Protocol protocol_;
  std::vector<DeviceAddress> addresses_;
  std::vector<Stream> sides_;
  // Progress words; what is copied elsewhere: 1 for each flag, what a closed gate says, 0xFF; gates as last read.
  size_t ones_, closed_, gates_, nan_;
  driver::PinnedMemory pinned_;
  Stream rescue_;
  std::vector<driver::GraphDeadline> deadlines_;
  bool reading_gates_ = false;
  bool stuck_ = false;  // not even the gates can be closed; of the thread alone
  int64_t gates_read_ns_ = 0;
  uint32_t forks_;

  std::atomic<double> timeout_seconds_{600};
  std::vector<std::atomic<bool>> lost_;  // by rank
  std::atomic<Failure> failure_{Failure::kNone};

  mutable std::mutex capturing_;
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::string sentence_;
  std::string aborted_;        // why, asked for and not done yet
  bool gates_closed_ = false;  // no peer reads this rank's data any more, or `stuck_`
  bool stopping_ = false;
  struct Passage {
    uint64_t number;
    std::vector<Memory> results;
  };
  std::deque<Passage> passages_;
  std::map<uint64_t, std::vector<Memory>> captured_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace fused_tp::copy_engine

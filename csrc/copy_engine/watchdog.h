// The watchdog of a workspace's streams: no stream waits for a peer beyond the deadline, and the results of an expired
// wait are set to NaN. It has a thread of its own and does not use Python.
//
// It is not a driver::Watch, which uses events: no event shows whether a call that a CUDA graph replays is running.
// Instead, streams write progress numbers to words of pinned memory, in graphs as elsewhere.
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

// Value of a closed gate: the rank that gave up first, and why. Ranks that read it close all gates with the same value.
struct Closing {
  Failure why;
  int rank;
  uint64_t value() const { return closed_by(rank) | static_cast<uint64_t>(why) << 32; }
  static Closing of(uint64_t value) {
    return {static_cast<Failure>(value >> 32), static_cast<int>((value & 0xFFFFFFFF) - closed_by(0))};
  }
};

// Number of a call, which includes its op.
enum class Op : int { kAllGather, kAllGatherMatmul, kMatmulReduceScatter, kMatmulAllReduce, kReduceScatter, kOther };
constexpr uint64_t call_number(uint64_t count, Op op) { return count * 8 + static_cast<uint64_t>(op); }

class StreamWatchdog {
 public:
  // `addresses`: those of the ranks' workspaces. `sides`: more streams to watch. `rescue`: a stream in which nothing
  // waits.
  StreamWatchdog(std::shared_ptr<const Driver> driver, int device, Protocol protocol,
                 std::vector<DeviceAddress> addresses, std::vector<Stream> sides, Stream rescue);
  ~StreamWatchdog();
  StreamWatchdog(const StreamWatchdog&) = delete;
  StreamWatchdog& operator=(const StreamWatchdog&) = delete;

  // Device address and value of progress word `word`, or of another word in the same memory.
  DeviceAddress progress(int word) const { return pinned_.device_address() + 8 * static_cast<size_t>(word); }
  uint64_t told(int number) const { return word(number).load(std::memory_order_acquire); }

  // Sets the longest wait from now on.
  void set_timeout(double seconds) { timeout_seconds_.store(seconds, std::memory_order_relaxed); }
  // Called before the passage is enqueued. `results` become NaN if it may not pass. `captured`: it may be repeated.
  void expect(uint64_t passage, std::vector<Memory> results, bool captured);

  // That rank's process has ended: waits for it expire soon, unless its data has arrived.
  void lose(int rank);
  // Gives up, and makes the peers give up.
  void abort(const std::string& why);

  // The first failure; its sentence names op, call and ranks.
  Failure failure() const { return failure_.load(std::memory_order_acquire); }
  std::string sentence() const;

  // Held while a graph is captured in `sides`: a query of a stream invalidates the capture in it.
  std::mutex& capturing() { return capturing_; }

  // Ends the thread: streams are no longer watched.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  // Runs one round; returns the time until the next.
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
  // Offsets in `pinned_`, after the progress words: a 1 per flag, the value of a closed gate, the gates as last read,
  // bytes of 0xFF.
  size_t ones_, closed_, gates_, nan_;
  driver::PinnedMemory pinned_;
  Stream rescue_;
  std::vector<driver::GraphDeadline> deadlines_;
  bool reading_gates_ = false;
  bool stuck_ = false;  // not even the gates can be closed; used by the thread alone
  int64_t gates_read_ns_ = 0;
  uint32_t forks_;

  std::atomic<double> timeout_seconds_{600};
  std::vector<std::atomic<bool>> lost_;  // by rank
  std::atomic<Failure> failure_{Failure::kNone};

  mutable std::mutex capturing_;
  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::string sentence_;
  std::string aborted_;        // reason of an abort that is not done yet
  bool gates_closed_ = false;  // no peer reads this rank's data any more; also true if closing failed (`stuck_`)
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

// StreamWatchdog: the watchdog of a workspace's streams. At the deadline it ends a stream's wait for a peer and fills
// the results of the call with NaN. It has its own thread and does not use Python.
//
// It does not use driver::Watch, which queries events: the host cannot query events of a call that a CUDA graph
// replays. Instead, streams report their progress to words of pinned memory, inside and outside of graphs.
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

// Value of a closed gate: the rank that gave up first, and the reason. A rank that reads it closes all gates with the
// same value.
struct GateClosure {
  Failure reason;
  int rank;
  uint64_t value() const { return closed_by(rank) | static_cast<uint64_t>(reason) << 32; }
  static GateClosure from_value(uint64_t value) {
    return {static_cast<Failure>(value >> 32), static_cast<int>((value & 0xFFFFFFFF) - closed_by(0))};
  }
};

// Kinds of op. The lowest three bits of a call number are the Op; the higher bits count calls.
enum class Op : int { kAllGather, kAllGatherMatmul, kMatmulReduceScatter, kMatmulAllReduce, kReduceScatter, kOther };
constexpr uint64_t call_number(uint64_t count, Op op) { return count * 8 + static_cast<uint64_t>(op); }

class StreamWatchdog {
 public:
  // addresses: the ranks' workspaces, by rank. watched_streams: all streams of the workspace but `rescue_stream`.
  // rescue_stream: a stream that never waits, in which the watchdog itself copies.
  StreamWatchdog(std::shared_ptr<const Driver> driver, int device, Protocol protocol,
                 std::vector<DeviceAddress> addresses, std::vector<Stream> watched_streams, Stream rescue_stream);
  ~StreamWatchdog();
  StreamWatchdog(const StreamWatchdog&) = delete;
  StreamWatchdog& operator=(const StreamWatchdog&) = delete;

  // Device address and current value of a word in pinned memory: a progress word, passed_word or expired_word.
  DeviceAddress word_address(int word) const { return pinned_.device_address() + 8 * static_cast<size_t>(word); }
  uint64_t load_word(int index) const { return word(index).load(std::memory_order_acquire); }

  // Sets the timeout of all waits from now on.
  void set_timeout(double seconds) { timeout_seconds_.store(seconds, std::memory_order_relaxed); }
  // Registers the results of a call before its passage of the gates is enqueued. They become NaN if the call fails.
  // is_captured: the passage is part of a graph, so it may happen several times.
  void register_results(uint64_t passage, std::vector<Memory> results, bool is_captured);

  // Reports that the process of `rank` has exited: waits for it time out soon, unless its data is in flight.
  void lose(int rank);
  // Gives up, and closes the gates of all ranks, so that the peers give up too. Returns once the gates are closed.
  void abort(const std::string& why);

  // First failure. message() names the op, call and ranks.
  Failure failure() const { return failure_.load(std::memory_order_acquire); }
  std::string message() const;

  // Hold this mutex while a watched stream is being captured: the watchdog's query of a stream invalidates its capture.
  std::mutex& capture_mutex() { return capture_mutex_; }

  // Ends the watchdog's thread.
  void stop();

 private:
  using Clock = std::chrono::steady_clock;

  void run();
  // Polls once, or continues the rescue after a failure. Returns the time until the next round.
  std::chrono::microseconds run_round();
  std::chrono::microseconds poll(int64_t now_ns);
  void read_gates(int64_t now_ns);
  void fail(const GateClosure& closure, const std::string& message);
  bool rescue();
  void write(const Steps& steps);
  bool finish_writes();
  void fill_with_nan(const Memory& memory);
  void drop_passed(uint64_t progress);
  std::vector<Memory> find_results(uint64_t passage) const;
  bool has_work_in_flight() const;
  std::string timeout_message(int word_index, uint64_t call_number, int64_t waited_ns, bool is_lost) const;
  std::atomic<uint64_t>& word(int index) const;
  DeviceAddress pinned_address(size_t offset) const { return pinned_.device_address() + offset; }

  std::shared_ptr<const Driver> driver_;
  int device_;
  Protocol protocol_;
  std::vector<DeviceAddress> addresses_;
  std::vector<Stream> watched_streams_;
  // Byte offsets in `pinned_`, behind the progress words: flag_words() words of value 1; the value of a closed gate; a
  // copy of this rank's gates; kNanBytes bytes of 0xFF.
  size_t ones_offset_, closed_offset_, gates_offset_, nan_offset_;
  driver::PinnedMemory pinned_;
  Stream rescue_stream_;
  std::vector<driver::GraphDeadline> deadlines_;
  bool is_reading_gates_ = false;
  bool is_stuck_ = false;  // closing the gates has timed out; used by the watchdog's thread only
  int64_t gates_read_ns_ = 0;
  uint32_t fork_count_;

  std::atomic<double> timeout_seconds_{600};
  std::vector<std::atomic<bool>> is_lost_;  // by rank: true if its process has exited
  std::atomic<Failure> failure_{Failure::kNone};

  mutable std::mutex capture_mutex_;
  mutable std::mutex mutex_;  // guards the members from here to captured_results_
  std::condition_variable changed_;
  std::string message_;
  std::string abort_reason_;       // of an `abort` that the thread has not handled yet; else empty
  bool are_gates_closed_ = false;  // true once all gates are closed, or could not be closed (is_stuck_)
  bool is_stopping_ = false;
  struct Passage {
    uint64_t passage_number;
    std::vector<Memory> results;
  };
  std::deque<Passage> passages_;
  std::map<uint64_t, std::vector<Memory>> captured_results_;

  std::thread thread_;  // last member: the thread uses all others
};

}  // namespace fused_tp::copy_engine

// A NCCL communicator of our own: its stream, its deadlines, and an end that leaves the process alive.
//
// Ops are enqueued and no call waits for data; the first op between two ranks connects them, and every launch goes
// through a thread of NCCL's, which is waited for. Every op is watched: past its deadline, or when NCCL reports an
// error, or when a peer is said to be lost, the communicator is aborted, so that streams go on, and it says why from
// then on. Before that the output of the op that runs is filled with 0xFF bytes (NaN). Those of ops behind it are
// left alone: kernels ahead of them may still read what their memory has held before. Results of these, and of graphs
// that are replayed after a failure, are undefined; every later call throws.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "driver/driver.h"
#include "driver/watchdog.h"
#include "errors.h"
#include "nccl/library.h"

namespace fused_tp::nccl {

using driver::Driver;
using driver::Event;
using driver::SharedEvent;
using driver::Stream;

// An op that was enqueued. `ended` may be waited for from any stream, any number of times.
struct Ticket {
  const char* op = "";
  uint64_t number = 0;
  SharedEvent begun;  // done: it waits for nothing here but the op before it; null: always
  SharedEvent ended;
  bool captured = false;  // it is part of a CUDA graph: the host cannot wait for it
};

// One direction between this rank and another (or itself).
struct Transfer {
  enum Kind { kSend, kReceive };
  Kind kind;
  int peer;
  void* data;  // only read if it is sent
  size_t bytes;
};

class Communicator {
 public:
  struct Options {
    double timeout_seconds = 600;
    std::function<void()> interrupted = [] {};  // asked now and then while the host waits; may throw
  };

  // Joins the ranks that hold the same id, all of them within the deadline. Throws CollectiveTimeoutError.
  static std::shared_ptr<Communicator> create(std::shared_ptr<const Library> library,
                                              std::shared_ptr<const Driver> driver, int device, const UniqueId& id,
                                              int rank, int size, Options options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }
  Stream stream() const { return stream_.get(); }
  uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }
  const std::shared_ptr<const Driver>& driver() const { return driver_; }

  // Of the ops that are enqueued from now on; at each look of those in graphs.
  void set_timeout(double seconds) { timeout_seconds_.store(seconds, std::memory_order_relaxed); }
  double timeout() const { return timeout_seconds_.load(std::memory_order_relaxed); }

  // Ops begin behind the communicator's earlier ops and, where it is given, behind everything that the stream `after`
  // holds by now. The caller keeps the memory until the op has ended, and its context current.
  Ticket all_gather(const void* in, void* out, size_t bytes_per_rank, std::optional<Stream> after);
  // All of them at once: none waits for another of the list. Between two ranks they match in order.
  Ticket exchange(const std::vector<Transfer>& transfers, std::optional<Stream> after);

  // `stream` goes on once the op has ended.
  void wait(const Ticket& ticket, Stream stream);
  // Whether it waits for nothing here but the op before it, and whether it has ended. An op of a CUDA graph always has.
  // Any thread may ask.
  bool has_begun(const Ticket& ticket) const { return ticket.captured || !ticket.begun || done(*ticket.begun); }
  bool has_ended(const Ticket& ticket) const { return ticket.captured || done(*ticket.ended); }

  // Throws what the communicator has failed with, if it has.
  void check() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string failure() const;  // the sentence; empty while all is well

  // That rank's process is known to have ended: nothing will come from it any more.
  void lose(int rank, const std::string& how);
  void abort(const std::string& why);
  // Waits for what is in flight, within the deadline, and gives everything back; throws what went wrong. Destruction
  // does it too, without a word, and waits for a few seconds at most.
  void close();
  // Closes all that there are, without a word: before the interpreter, and with it the driver, goes away.
  static void close_all();

 private:
  enum class Kind { kNone, kTimeout, kLost, kOther };
  struct Handle;  // what is left to NCCL; outlives this object where an abort takes its time
  struct Range {
    void* data;
    size_t bytes;
  };
  struct InFlight {
    SharedEvent begun;
    SharedEvent ended;
    std::vector<Range> outputs;
  };

  Communicator(std::shared_ptr<const Library> library, std::shared_ptr<const Driver> driver, int device, int rank,
               int size, Options options, std::shared_ptr<Handle> handle);

  template <typename Call>
  Ticket enqueue(const char* op, std::optional<Stream> after, std::vector<Range> outputs, bool moves, Call&& call);
  template <typename Call>
  Result perform(const std::string& what, Call&& call);
  void settle(Result result, const std::string& what);
  std::unique_lock<std::mutex> lock_handle() const;
  void remember(const Ticket& ticket, std::vector<Range> outputs);
  void require_open() const;
  void fail(Kind kind, std::string sentence);
  void fail(Result result, const std::string& what);  // what NCCL says
  bool fill_outputs(double seconds);
  void expired(const std::string& what, double seconds);
  void tick();
  void end(double seconds);
  void close(double seconds);
  std::string where(const std::string& what) const;
  bool done(const driver::OwnEvent& event) const {
    const Driver::Device current(*driver_, device_);
    return driver_->done(event.get());
  }

  std::shared_ptr<const Library> library_;
  std::shared_ptr<const Driver> driver_;
  int device_;
  int rank_;
  int size_;
  Options options_;
  std::atomic<double> timeout_seconds_;
  std::shared_ptr<Handle> handle_;
  driver::OwnStream stream_;
  driver::EventPool events_;
  std::shared_ptr<driver::GraphWord> graph_word_;
  bool captured_ = false;  // some op is part of a graph

  std::mutex order_mutex_;  // one op after the other, from its first wait to its event
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> closed_{false};

  std::mutex in_flight_mutex_;
  std::deque<InFlight> in_flight_;

  std::mutex failing_mutex_;          // one thread after the other fails
  std::atomic<bool> failing_{false};  // before anything is filled: what ends from now on is not returned
  mutable std::mutex failure_mutex_;  // of the next two
  mutable std::condition_variable published_;
  Kind failure_kind_ = Kind::kNone;
  std::string failure_;
  std::atomic<bool> failed_{false};

  std::unique_ptr<driver::Watch> watch_;  // last: its callbacks use all of the above
};

}  // namespace fused_tp::nccl

// A NCCL communicator of our own: its stream, its deadlines, and an end that leaves the process alive.
//
// Ops are enqueued and no call waits for data; the first op between two ranks connects them, and a thread of NCCL does
// every launch, for which the call waits. Every op is watched: after its deadline, or if NCCL reports an error or a
// peer is lost, the communicator is aborted, so that streams continue, and every later call throws the reason. Before
// that the output of the running op is filled with 0xFF bytes (NaN). Outputs of later ops are not touched: kernels
// before them may still read the previous content of that memory. Results of these ops, and of graphs that are replayed
// after a failure, are undefined.
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
  SharedEvent begun;  // done: the op waits for nothing on this rank but the op before it; null: always done
  SharedEvent ended;
  bool captured = false;  // the op is part of a CUDA graph: the host cannot wait for it
};

// One direction between this rank and another (or itself).
struct Transfer {
  enum Kind { kSend, kReceive };
  Kind kind;
  int peer;
  void* data;  // only read if kind is kSend
  size_t bytes;
};

class Communicator {
 public:
  struct Options {
    double timeout_seconds = 600;
    std::function<void()> interrupted = [] {};  // called from time to time while the host waits; may throw
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

  // Sets the timeout of ops enqueued from now on, and of ops in graphs from the next poll on.
  void set_timeout(double seconds) { timeout_seconds_.store(seconds, std::memory_order_relaxed); }
  double timeout() const { return timeout_seconds_.load(std::memory_order_relaxed); }

  // Ops begin after the communicator's earlier ops and, if it is given, after everything that the stream `after` holds
  // now. The caller keeps the memory until the op has ended, and its context current.
  Ticket all_gather(const void* in, void* out, size_t bytes_per_rank, std::optional<Stream> after);
  // All transfers at once: none waits for another of the list. Between two ranks they match in order.
  Ticket exchange(const std::vector<Transfer>& transfers, std::optional<Stream> after);

  // `stream` continues once the op has ended.
  void wait(const Ticket& ticket, Stream stream);
  // has_begun: the op waits for nothing on this rank but the op before it. has_ended: the op has ended. Both are always
  // true for an op of a CUDA graph. Any thread may call them.
  bool has_begun(const Ticket& ticket) const { return ticket.captured || !ticket.begun || done(*ticket.begun); }
  bool has_ended(const Ticket& ticket) const { return ticket.captured || done(*ticket.ended); }

  // Throws the error of the communicator if it has failed.
  void check() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string failure() const;  // the error message; empty if there is no failure

  // That rank's process is known to have ended: it will send nothing more.
  void lose(int rank, const std::string& how);
  void abort(const std::string& why);
  // Waits for ops in flight, within the deadline, and frees everything; throws the error if there was one. Destruction
  // does the same without throwing, and waits for a few seconds at most.
  void close();
  // Closes all communicators without throwing, before the interpreter, and with it the driver, shuts down.
  static void close_all();

 private:
  enum class Kind { kNone, kTimeout, kLost, kOther };
  struct Handle;  // the part that NCCL uses; outlives this object during a long abort
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
  void fail(Result result, const std::string& what);  // an error that NCCL reports
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

  std::mutex order_mutex_;  // serializes ops, each from its first wait to its event
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> closed_{false};

  std::mutex in_flight_mutex_;
  std::deque<InFlight> in_flight_;

  std::mutex failing_mutex_;          // serializes threads that fail
  std::atomic<bool> failing_{false};  // set before anything is filled: ops that end after it are not returned
  mutable std::mutex failure_mutex_;  // guards the next two
  mutable std::condition_variable published_;
  Kind failure_kind_ = Kind::kNone;
  std::string failure_;
  std::atomic<bool> failed_{false};

  std::unique_ptr<driver::Watch> watch_;  // last: its callbacks use all of the above
};

}  // namespace fused_tp::nccl

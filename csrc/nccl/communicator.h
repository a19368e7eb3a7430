// Communicator: a NCCL communicator with its own stream, with deadlines, and with failures that do not end the process.
//
// A call enqueues an op and returns without waiting for data. It waits only until a thread of NCCL has launched the op
// and, in the first op with a peer, has connected to it.
//
// If an op misses its deadline, if NCCL reports an error, or if a peer is lost, then:
// 1. The output of the running op is filled with 0xFF bytes (NaN).
// 2. Every later call throws the error.
// 3. The NCCL communicator is aborted, so that streams continue.
// Outputs of later ops are not filled, because kernels before these ops may still read that memory. The results of
// later ops, and of graphs replayed after a failure, are undefined.
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

// An op that was enqueued. Any stream may wait for end_event, any number of times.
struct Ticket {
  const char* op = "";
  uint64_t call_number = 0;
  SharedEvent begin_event;  // done once the work before the op in `after` has completed; null: no such work
  SharedEvent end_event;
  bool is_captured = false;  // part of a CUDA graph, so the host cannot query its events
};

// A send or receive between this rank and `peer`, which may be this rank.
struct Transfer {
  enum Kind { kSend, kReceive };
  Kind kind;
  int peer;
  void* data;  // kSend: read, kReceive: written
  size_t bytes;
};

class Communicator {
 public:
  struct Options {
    double timeout_seconds = 600;
    std::function<void()> check_interrupt = [] {};  // called every few milliseconds while the host waits; may throw
  };

  // Waits until all ranks have joined with the same id. Throws CollectiveTimeoutError at the deadline.
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

  // Sets the timeout of ops enqueued from now on. For ops in CUDA graphs it takes effect immediately.
  void set_timeout(double seconds) { timeout_seconds_.store(seconds, std::memory_order_relaxed); }
  double timeout() const { return timeout_seconds_.load(std::memory_order_relaxed); }

  // These enqueue an op. It begins after the communicator's earlier ops and, if `after` is given, after all work
  // already enqueued in that stream. The caller keeps the memory alive until the op has ended.
  Ticket all_gather(const void* in, void* out, size_t bytes_per_rank, std::optional<Stream> after);
  // Enqueues all transfers as one NCCL group, so none waits for another. Transfers between two ranks match in order.
  Ticket exchange(const std::vector<Transfer>& transfers, std::optional<Stream> after);

  // Makes `stream` wait for the end of the op.
  void wait(const Ticket& ticket, Stream stream);
  // has_begun: true once the work before the op in `after` has completed; the op then waits only for earlier ops and
  // for peers. has_ended: true once the op has ended. Both are always true for an op of a CUDA graph. Any thread may
  // call them.
  bool has_begun(const Ticket& ticket) const {
    return ticket.is_captured || !ticket.begin_event || is_done(*ticket.begin_event);
  }
  bool has_ended(const Ticket& ticket) const { return ticket.is_captured || is_done(*ticket.end_event); }

  // Throws the error if the communicator has failed.
  void check() const;
  bool has_failed() const { return has_failed_.load(std::memory_order_acquire); }
  std::string failure() const;  // error message; empty if it has not failed

  // Fails with PeerLostError: the caller knows that the process of `rank` has exited.
  void lose(int rank, const std::string& how);
  void abort(const std::string& why);
  // Waits for ops in flight, within the deadline, and frees the communicator. Throws the error if it fails now; does
  // nothing if it has failed before. The destructor does the same without throwing, and waits for a few seconds at
  // most.
  void close();
  // Closes all communicators without throwing. Called at exit, before the interpreter and the driver shut down.
  static void close_all();

 private:
  enum class FailureKind { kNone, kTimeout, kLost, kOther };
  struct Handle;  // owns the NCCL communicator; an abort may keep it alive longer than this object
  struct Range {
    void* data;
    size_t bytes;
  };
  struct OpInFlight {
    SharedEvent begin_event;
    SharedEvent end_event;
    std::vector<Range> outputs;
  };

  Communicator(std::shared_ptr<const Library> library, std::shared_ptr<const Driver> driver, int device, int rank,
               int size, Options options, std::shared_ptr<Handle> handle);

  template <typename Call>
  Ticket enqueue(const char* op, std::optional<Stream> after, std::vector<Range> outputs, bool has_data, Call&& call);
  template <typename Call>
  Result call_nccl(const std::string& operation, Call&& call);
  void wait_for_result(Result result, const std::string& operation);
  std::unique_lock<std::mutex> lock_handle() const;
  void track_outputs(const Ticket& ticket, std::vector<Range> outputs);
  void require_open() const;
  void fail(FailureKind kind, std::string message);
  void fail(Result result, const std::string& operation);  // an error reported by NCCL
  bool fill_outputs(double seconds);
  void on_timeout(const std::string& op, double seconds);
  void on_tick();
  void shut_down(double seconds);
  void close(double seconds);
  std::string describe_on_rank(const std::string& subject) const;
  bool is_done(const driver::OwnedEvent& event) const {
    const Driver::ContextGuard current(*driver_, device_);
    return driver_->is_done(event.get());
  }

  std::shared_ptr<const Library> library_;
  std::shared_ptr<const Driver> driver_;
  int device_;
  int rank_;
  int size_;
  Options options_;
  std::atomic<double> timeout_seconds_;
  std::shared_ptr<Handle> handle_;
  driver::OwnedStream stream_;
  driver::EventPool events_;
  std::shared_ptr<driver::GraphProgress> graph_progress_;
  bool has_captured_ops_ = false;  // some op is part of a CUDA graph

  std::mutex enqueue_mutex_;  // serializes `enqueue`, from the wait for `after` to the record of end_event
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> is_closed_{false};

  std::mutex in_flight_mutex_;
  std::deque<OpInFlight> in_flight_;

  std::mutex failing_mutex_;             // serializes calls of `fail`
  std::atomic<bool> is_failing_{false};  // set before outputs are filled: from then on every call throws
  mutable std::mutex failure_mutex_;     // guards failure_kind_ and failure_
  mutable std::condition_variable failure_published_;
  FailureKind failure_kind_ = FailureKind::kNone;
  std::string failure_;
  std::atomic<bool> has_failed_{false};

  std::unique_ptr<driver::Watch> watch_;  // last member: its callbacks use all others
};

}  // namespace fused_tp::nccl

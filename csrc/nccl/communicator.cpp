#include "nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

namespace fused_tp::nccl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kFillSeconds = 1;  // a working GPU fills memory much faster; a broken one never does
constexpr double kLockSeconds = 5;  // time that an abort waits for a thread inside NCCL
constexpr double kFinalizeWithGraphsSeconds = 2;
constexpr double kExitAbortSeconds = 2;
constexpr double kDestroySeconds = 5;  // time that the destructor waits for ops in flight, whose results nobody reads
constexpr size_t kMaxTrackedOps = 16;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string format_seconds(double seconds) {
  std::ostringstream text;
  text.precision(3);
  text << seconds << " s";
  return text.str();
}

// Polling with increasing pauses. It yields first, because most waits here end within microseconds.
class Backoff {
 public:
  explicit Backoff(const std::function<void()>& check_interrupt) : check_interrupt_(check_interrupt) {}

  void step() {
    if (++rounds_ < 200) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(2 * pause_, std::chrono::microseconds(1000));
    const auto now = Clock::now();
    if (now < next_check_) return;
    next_check_ = now + std::chrono::milliseconds(5);
    check_interrupt_();
  }

 private:
  const std::function<void()>& check_interrupt_;
  int rounds_ = 0;
  std::chrono::microseconds pause_{10};
  Clock::time_point next_check_{};
};

// Locks a mutex within `seconds`. Not std::timed_mutex, which GCC 12's ThreadSanitizer does not support.
bool lock_within(std::unique_lock<std::mutex>& lock, double seconds) {
  const auto start = Clock::now();
  for (auto pause = std::chrono::microseconds(1); !lock.try_lock();
       pause = std::min(2 * pause, std::chrono::microseconds(500))) {
    if (seconds_since(start) > seconds) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

// Number of aborts in progress. Leaked on purpose: their threads may outlive static objects.
struct AbortCount {
  std::mutex mutex;
  std::condition_variable one_finished;
  int in_progress = 0;
};

AbortCount& abort_count() {
  static auto* instance = new AbortCount();
  return *instance;
}

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> communicators;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

}  // namespace

// The NCCL communicator. NCCL allows one thread at a time to use it; only ncclCommAbort may be called concurrently.
struct Communicator::Handle {
  Handle(std::shared_ptr<const Library> nccl_library, std::shared_ptr<const Driver> cuda_driver, int device_ordinal)
      : library(std::move(nccl_library)),
        driver(std::move(cuda_driver)),
        device(device_ordinal),
        side_stream(driver, device, driver::Priority::kGreatest) {}

  std::shared_ptr<const Library> library;
  std::shared_ptr<const Driver> driver;
  int device;
  driver::OwnedStream side_stream;  // fills outputs, so it must not wait for work that is stuck
  std::mutex mutex;                 // guards `comm`
  Comm comm = nullptr;

  Result async_error() {
    std::lock_guard<std::mutex> lock(mutex);
    if (comm == nullptr) return Result::kSuccess;
    Result error = Result::kSuccess;
    const Result query_result = library->functions().comm_get_async_error(comm, &error);
    return query_result == Result::kSuccess ? error : query_result;
  }

  // Fills the outputs of the running op (the first that has not ended, if it has begun) with NaN. Returns false if that
  // takes too long.
  //
  // This must happen before the error is published: until then the caller does not reuse the memory, and no work reads
  // the outputs before the op has ended. Outputs of later ops are not filled, because work before them may still read
  // that memory.
  bool fill_running_op(const std::deque<OpInFlight>& in_flight, const std::atomic<bool>& is_too_late) {
    Driver::ContextGuard guard(*driver, device);
    for (const OpInFlight& op : in_flight) {
      if (driver->is_done(op.end_event->get())) continue;
      if (op.begin_event && !driver->is_done(op.begin_event->get())) return true;
      for (const Range& output : op.outputs) {
        if (is_too_late) return false;
        driver->fill(reinterpret_cast<driver::DeviceAddress>(output.data), 0xFF, output.bytes, side_stream.get());
      }
      return driver->synchronize(side_stream.get(), kFillSeconds);
    }
    return true;
  }

  // Aborts the communicator, so that streams and threads that wait for it continue.
  void abort() {
    Driver::ContextGuard guard(*driver, device);
    std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
    if (!lock_within(lock, kLockSeconds) && library->has_revoke()) {
      // A thread is blocked inside NCCL, probably in a launch while the queue is full of kernels that wait for peers.
      // ncclCommRevoke ends these kernels, and frees no memory that the thread still uses.
      library->functions().comm_revoke(comm, 0);
      lock_within(lock, kLockSeconds);
    }
    // If the thread is still blocked, or NCCL has no ncclCommRevoke, its call returns an error soon after the abort.
    // NCCL frees memory only after all kernels have ended.
    const Comm aborted_comm = std::exchange(comm, nullptr);
    if (lock.owns_lock()) lock.unlock();  // other threads see a null communicator and do not wait for the abort
    if (aborted_comm != nullptr) library->functions().comm_abort(aborted_comm);
  }
};

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<const Library> library,
                                                   std::shared_ptr<const Driver> driver, int device, const UniqueId& id,
                                                   int rank, int size, Options options) {
  if (size < 1 || rank < 0 || rank >= size)
    throw std::invalid_argument("a communicator has ranks 0 to size - 1, not rank " + std::to_string(rank) + " of " +
                                std::to_string(size));
  auto handle = std::make_shared<Handle>(library, driver, device);
  std::shared_ptr<Communicator> communicator(
      new Communicator(library, driver, device, rank, size, std::move(options), handle));
  communicator->call_nccl("joining the communicator", [&] {
    Config config{sizeof(Config), kMagic, static_cast<unsigned>(Library::kMinVersion)};
    config.blocking = 0;
    return library->functions().comm_init_rank_config(&handle->comm, size, id, rank, &config);
  });
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().communicators.push_back(communicator);
  return communicator;
}

Communicator::Communicator(std::shared_ptr<const Library> library, std::shared_ptr<const Driver> driver, int device,
                           int rank, int size, Options options, std::shared_ptr<Handle> handle)
    : library_(std::move(library)),
      driver_(std::move(driver)),
      device_(device),
      rank_(rank),
      size_(size),
      options_(std::move(options)),
      timeout_seconds_(options_.timeout_seconds),
      handle_(std::move(handle)),
      // Not kGreatest: NCCL kernels are launched as clusters and may wait long for free SMs. Work that running kernels
      // wait for must be scheduled before them.
      stream_(driver_, device, driver::Priority::kHigh),
      events_(driver_, device),
      graph_progress_(std::make_shared<driver::GraphProgress>(driver_, device)) {
  driver::Watch::Callbacks callbacks;
  callbacks.on_timeout = [this](const std::string& op, double seconds) { on_timeout(op, seconds); };
  callbacks.on_error = [this](const std::string& error) {
    fail(FailureKind::kOther, describe_on_rank("the device") + " is broken: " + error);
  };
  callbacks.on_tick = [this] { on_tick(); };
  watch_ = std::make_unique<driver::Watch>(driver_, device_, std::move(callbacks));
}

Communicator::~Communicator() {
  // Leaked, because a graph that is replayed later still writes this memory.
  if (has_captured_ops_) new std::shared_ptr<driver::GraphProgress>(graph_progress_);
  if (driver_->is_forked_child()) {
    watch_.reset();
    new std::shared_ptr<Handle>(std::move(handle_));  // leaked: NCCL cannot be used in a forked child
    return;
  }
  options_.check_interrupt = [] {};  // a destructor must not throw
  try {
    shut_down(std::min(timeout(), kDestroySeconds));
  } catch (...) {  // the communicator has failed, and the abort has begun
  }
  watch_.reset();
}

// ---- calls into NCCL -------------------------------------------------------------------------------------------

// Calls a function of NCCL and waits until the communicator is no longer in state ncclInProgress. Throws if that fails.
// Returns the result of the call itself, which may be ncclInProgress.
template <typename Call>
Result Communicator::call_nccl(const std::string& operation, Call&& call) {
  Result result = Result::kSuccess;
  {
    const auto lock = lock_handle();
    check();
    Driver::ContextGuard guard(*driver_, device_);
    result = call();
  }
  wait_for_result(result, operation);
  return result;
}

// Throws instead of waiting for an abort, which may hold the mutex for long: check() throws once the communicator has
// failed.
std::unique_lock<std::mutex> Communicator::lock_handle() const {
  std::unique_lock<std::mutex> lock(handle_->mutex, std::defer_lock);
  while (!lock_within(lock, 0.02)) check();
  return lock;
}

void Communicator::wait_for_result(Result result, const std::string& operation) {
  const auto start = Clock::now();
  Backoff backoff(options_.check_interrupt);
  // Some functions return ncclSuccess although their work is still in progress, so ask at least once.
  if (result == Result::kSuccess) result = Result::kInProgress;
  while (result == Result::kInProgress) {
    check();
    result = handle_->async_error();
    if (result != Result::kInProgress) break;
    if (seconds_since(start) > timeout()) {
      fail(FailureKind::kTimeout, describe_on_rank(operation) + " took longer than " + format_seconds(timeout()) +
                                      " (FUSED_TP_TIMEOUT): some rank did not take part; NCCL does not report which.");
      break;
    }
    try {
      backoff.step();
    } catch (...) {
      fail(FailureKind::kOther,
           describe_on_rank(operation) + " was interrupted; the ranks may no longer make matching calls.");
      throw;
    }
  }
  check();
  if (result != Result::kSuccess) {
    fail(result, operation);
    check();
  }
}

// Throws if another thread is capturing this communicator's stream. An op would otherwise become part of that thread's
// graph, or invalidate its capture.
static void refuse_other_captures(const Driver& driver, int device, Stream own_stream, Stream after) {
  Driver::ContextGuard guard(driver, device);
  if (!driver.is_capturing(own_stream)) return;  // if `after` is being captured, the op becomes part of that graph
  bool is_same_capture = false;
  try {
    is_same_capture = driver.is_capturing(after);
  } catch (const driver::DriverError&) {  // the default stream cannot be queried during a capture
  }
  if (!is_same_capture)
    throw std::invalid_argument(
        "another thread is capturing this communicator's ops in a CUDA graph; call this op after the capture has "
        "ended");
}

template <typename Call>
Ticket Communicator::enqueue(const char* op, std::optional<Stream> after, std::vector<Range> outputs, bool has_data,
                             Call&& call) {
  require_open();
  std::lock_guard<std::mutex> enqueue_lock(enqueue_mutex_);
  check();
  if (after) refuse_other_captures(*driver_, device_, stream(), *after);
  Ticket ticket;
  ticket.op = op;
  ticket.call_number = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::string operation = std::string(op) + " (call " + std::to_string(ticket.call_number) + ")";
  try {
    Driver::ContextGuard guard(*driver_, device_);
    ticket.end_event = events_.take();
    SharedEvent begin_event;
    if (after) {
      begin_event = events_.take();
      driver_->record(begin_event->get(), *after);
      driver_->wait(stream(), begin_event->get());
    }
    ticket.is_captured = driver_->is_capturing(stream());
    const uint64_t graph_op = ticket.is_captured ? graph_progress_->begin(stream(), op, ticket.call_number) : 0;
    const Result launch_result = call_nccl(operation, [&] {
      // With a non-blocking communicator, a send or receive outside a group may return before it is launched.
      const Functions& f = library_->functions();
      Result result = f.group_start();
      if (result != Result::kSuccess) return result;
      result = call(f, handle_->comm);
      // Also after an error, because the group belongs to this thread, not to the communicator.
      const Result end_result = f.group_end();
      return result == Result::kSuccess || result == Result::kInProgress ? end_result : result;
    });
    if (launch_result == Result::kSuccess && has_data && size_ > 1) {
      // ncclGroupEnd of a non-blocking communicator returns ncclInProgress if it launches ops. ncclSuccess means that
      // this group was nested: its ops are launched at the end of the outermost group, after the events recorded here.
      // The ops cannot be cancelled, and NCCL will still use the communicator, so it is leaked.
      {
        const auto lock = lock_handle();
        handle_->comm = nullptr;
      }
      fail(FailureKind::kOther, describe_on_rank(operation) +
                                    " was called inside of an open ncclGroupStart of this thread, e.g. in a coalescing "
                                    "manager of torch.distributed, which delays the launch. Call it outside.");
      check();
    }
    if (ticket.is_captured) graph_progress_->end(stream(), graph_op);
    driver_->record(ticket.end_event->get(), stream());
    ticket.begin_event = begin_event;
    if (!ticket.is_captured) {
      track_outputs(ticket, std::move(outputs));
      watch_->add({op, ticket.call_number, std::move(begin_event), ticket.end_event, timeout()});
    } else if (!has_captured_ops_) {
      has_captured_ops_ = true;
      watch_->watch_graphs(graph_progress_, [this] { return timeout(); });
    }
  } catch (const driver::DriverError& error) {
    fail(FailureKind::kOther, describe_on_rank(operation) + " failed: " + error.what());
  }
  check();
  return ticket;
}

// ---- ops -------------------------------------------------------------------------------------------------------

Ticket Communicator::all_gather(const void* in, void* out, size_t bytes_per_rank, std::optional<Stream> after) {
  return enqueue(
      "all_gather", after, {{out, bytes_per_rank * static_cast<size_t>(size_)}}, bytes_per_rank > 0,
      [&](const Functions& f, Comm comm) { return f.all_gather(in, out, bytes_per_rank, kInt8, comm, stream()); });
}

Ticket Communicator::exchange(const std::vector<Transfer>& transfers, std::optional<Stream> after) {
  std::vector<Range> outputs;
  bool has_data = false;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer < 0 || transfer.peer >= size_)
      throw std::invalid_argument("a peer is a rank from 0 to " + std::to_string(size_ - 1) + ", not " +
                                  std::to_string(transfer.peer));
    if (transfer.kind == Transfer::kReceive) outputs.push_back({transfer.data, transfer.bytes});
    has_data |= transfer.bytes > 0;
  }
  return enqueue("exchange", after, std::move(outputs), has_data, [&](const Functions& f, Comm comm) {
    Result result = Result::kSuccess;
    for (const Transfer& transfer : transfers) {
      if (transfer.bytes == 0) continue;  // the peer has the same size, so it skips the transfer too
      result = transfer.kind == Transfer::kSend
                   ? f.send(transfer.data, transfer.bytes, kInt8, transfer.peer, comm, stream())
                   : f.recv(transfer.data, transfer.bytes, kInt8, transfer.peer, comm, stream());
      if (result != Result::kSuccess && result != Result::kInProgress) break;
    }
    return result;
  });
}

void Communicator::wait(const Ticket& ticket, Stream stream) {
  check();
  {
    Driver::ContextGuard guard(*driver_, device_);
    driver_->wait(stream, ticket.end_event->get());
  }
  check();  // the call may have blocked, and the communicator may have failed meanwhile
}

// ---- failing ---------------------------------------------------------------------------------------------------

std::string Communicator::describe_on_rank(const std::string& subject) const {
  return subject + " on rank " + std::to_string(rank_) + " of " + std::to_string(size_);
}

void Communicator::require_open() const {
  if (driver_->is_forked_child())
    throw GroupError(describe_on_rank("this communicator") + " belongs to the process that forked this one");
  check();
  if (is_closed_) throw GroupError(describe_on_rank("this communicator") + " is closed");
}

void Communicator::check() const {
  if (!is_failing_.load(std::memory_order_acquire)) return;
  // Wait until outputs are filled: once the caller catches the error, it may reuse their memory.
  std::unique_lock<std::mutex> lock(failure_mutex_);
  failure_published_.wait(lock, [this] { return has_failed(); });
  switch (failure_kind_) {
    case FailureKind::kTimeout:
      throw CollectiveTimeoutError(failure_);
    case FailureKind::kLost:
      throw PeerLostError(failure_);
    default:
      throw GroupError(failure_);
  }
}

std::string Communicator::failure() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

void Communicator::track_outputs(const Ticket& ticket, std::vector<Range> outputs) {
  std::lock_guard<std::mutex> lock(in_flight_mutex_);
  while (in_flight_.size() >= kMaxTrackedOps && driver_->is_done(in_flight_.front().end_event->get()))
    in_flight_.pop_front();
  in_flight_.push_back({ticket.begin_event, ticket.end_event, std::move(outputs)});
}

// Overwrites the outputs of the running op with NaN, so that nobody reads the results of an aborted op. Returns false
// if the fill takes longer than `seconds`; it returns in time even if a driver call blocks.
bool Communicator::fill_outputs(double seconds) {
  std::deque<OpInFlight> in_flight;
  {
    std::unique_lock<std::mutex> lock(in_flight_mutex_, std::defer_lock);
    if (!lock_within(lock, seconds)) return false;  // its owner is blocked in the driver
    in_flight.swap(in_flight_);
  }
  if (in_flight.empty()) return true;
  // In a new thread: this thread may be capturing a graph, and a broken device may block the driver call.
  struct Fill {
    std::atomic<bool> is_too_late{false};
    std::promise<bool> done;
  };
  const auto fill = std::make_shared<Fill>();
  std::future<bool> done = fill->done.get_future();
  try {
    std::thread([fill, handle = handle_, ops = std::move(in_flight)]() mutable {
      bool is_filled = false;
      try {
        handle->driver->relax_capture_mode();
        is_filled = handle->fill_running_op(ops, fill->is_too_late);
      } catch (const std::exception&) {  // a broken device cannot be written
      }
      ops.clear();
      handle.reset();
      fill->done.set_value(is_filled);
    }).detach();
  } catch (const std::system_error&) {  // no further thread can be created
    return false;
  }
  if (done.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready) return done.get();
  fill->is_too_late = true;
  return false;
}

void Communicator::fail(FailureKind kind, std::string message) {
  std::lock_guard<std::mutex> failing_lock(failing_mutex_);
  if (has_failed()) return;
  is_failing_.store(true, std::memory_order_release);
  watch_->clear();
  if (!fill_outputs(kFillSeconds)) message += " Its output could not be filled with NaN.";
  {
    std::lock_guard<std::mutex> lock(abort_count().mutex);
    ++abort_count().in_progress;
  }
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    failure_kind_ = kind;
    failure_ = std::move(message);
    has_failed_.store(true, std::memory_order_release);
  }
  failure_published_.notify_all();
  // In a new thread: ncclCommAbort waits for the communicator's kernels, for peers to abort too, and for the
  // destruction of CUDA graphs that contain its ops. In one thread, two aborts in different orders on two ranks would
  // deadlock. This thread may also be that of a watchdog.
  const auto abort = [handle = handle_]() mutable {
    try {
      handle->driver->relax_capture_mode();
    } catch (const std::exception&) {
    }
    try {
      handle->abort();
    } catch (const std::exception&) {
    }
    handle.reset();
    std::lock_guard<std::mutex> lock(abort_count().mutex);
    --abort_count().in_progress;
    abort_count().one_finished.notify_all();
  };
  try {
    std::thread(abort).detach();
  } catch (const std::system_error&) {  // no further thread can be created
    auto abort_here = abort;
    abort_here();
  }
}

void Communicator::fail(Result result, const std::string& operation) {
  const bool is_lost = result == Result::kRemoteError || result == Result::kSystemError;
  fail(is_lost ? FailureKind::kLost : FailureKind::kOther, describe_on_rank(operation) +
                                                               (is_lost ? " lost a peer" : " failed") +
                                                               ". NCCL says: " + library_->describe(result));
}

void Communicator::on_timeout(const std::string& op, double seconds) {
  fail(FailureKind::kTimeout,
       describe_on_rank(op) + " has waited " + format_seconds(seconds) +
           " (FUSED_TP_TIMEOUT) for its peers, some of which had not arrived; NCCL does not report which.");
}

void Communicator::on_tick() {
  Result error = Result::kSuccess;
  {
    std::unique_lock<std::mutex> lock(handle_->mutex, std::try_to_lock);
    if (!lock.owns_lock() || handle_->comm == nullptr) return;  // the thread that holds the lock polls NCCL itself
    if (library_->functions().comm_get_async_error(handle_->comm, &error) != Result::kSuccess) return;
  }
  if (error == Result::kSuccess || error == Result::kInProgress) return;
  fail(error, "call " + std::to_string(calls()) + " or an earlier one");
}

void Communicator::lose(int rank, const std::string& how) {
  fail(FailureKind::kLost, describe_on_rank("call " + std::to_string(calls()) + " or an earlier one") + " lost rank " +
                               std::to_string(rank) + ": " + how);
}

void Communicator::abort(const std::string& why) {
  fail(FailureKind::kOther, describe_on_rank("this communicator") + " was aborted: " + why);
}

// ---- ending ----------------------------------------------------------------------------------------------------

void Communicator::shut_down(double seconds) {
  std::lock_guard<std::mutex> enqueue_lock(enqueue_mutex_);
  if (is_closed_) return;
  is_closed_ = true;
  const auto start = Clock::now();
  while (!has_failed()) {  // in slices of 20 ms, because a watchdog or Ctrl-C may end the wait
    {
      Driver::ContextGuard guard(*driver_, device_);
      if (driver_->synchronize(stream(), 0.02)) break;
    }
    if (seconds_since(start) > seconds)
      fail(FailureKind::kTimeout, describe_on_rank("closing the communicator") + " took longer than " +
                                      format_seconds(seconds) + (seconds < timeout() ? "" : " (FUSED_TP_TIMEOUT)") +
                                      ": ops were still in flight.");
    try {
      options_.check_interrupt();
    } catch (...) {
      fail(FailureKind::kOther,
           describe_on_rank("closing the communicator") + " was interrupted: ops were still in flight.");
      throw;
    }
  }
  set_timeout(std::min(timeout(), seconds));
  check();
  // ncclCommFinalize completes sends that NCCL's threads still have pending.
  const auto finalize = [this] {
    return handle_->comm == nullptr ? Result::kSuccess : library_->functions().comm_finalize(handle_->comm);
  };
  if (has_captured_ops_) {
    // ncclCommFinalize also waits for the destruction of graphs that contain its ops. If they live longer, the timeout
    // aborts the communicator.
    set_timeout(std::min(timeout(), kFinalizeWithGraphsSeconds));
    try {
      call_nccl("closing the communicator", finalize);
    } catch (const CollectiveTimeoutError&) {
      return;
    }
  } else {
    call_nccl("closing the communicator", finalize);
  }
  const auto lock = lock_handle();
  Driver::ContextGuard guard(*driver_, device_);
  const Comm closed_comm = std::exchange(handle_->comm, nullptr);
  if (closed_comm != nullptr) library_->functions().comm_destroy(closed_comm);
}

void Communicator::close() { close(timeout()); }

void Communicator::close(double seconds) {
  if (driver_->is_forked_child()) return;
  if (has_failed()) {
    std::lock_guard<std::mutex> enqueue_lock(enqueue_mutex_);
    is_closed_ = true;
    return;  // an earlier call has thrown the error
  }
  shut_down(seconds);
}

void Communicator::close_all() {
  std::vector<std::weak_ptr<Communicator>> communicators;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    communicators.swap(registry().communicators);
  }
  const auto start = Clock::now();
  for (const auto& entry : communicators) {
    const std::shared_ptr<Communicator> communicator = entry.lock();
    if (!communicator) continue;
    try {
      communicator->close(std::min(communicator->timeout(), std::max(0.1, kDestroySeconds - seconds_since(start))));
    } catch (...) {  // the communicator has failed, and its abort has begun
    }
    communicator->watch_->clear();  // a poll must not read the pinned memory of graphs after the driver has freed it
  }
  std::unique_lock<std::mutex> lock(abort_count().mutex);
  abort_count().one_finished.wait_for(lock, std::chrono::duration<double>(kExitAbortSeconds),
                                      [] { return abort_count().in_progress == 0; });
}

}  // namespace fused_tp::nccl

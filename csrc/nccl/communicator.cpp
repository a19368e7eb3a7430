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

constexpr double kPoisonSeconds = 1;  // an idle GPU fills memory in far less; a broken one never
constexpr double kLockSeconds = 5;    // longest wait of an abort for a thread that is inside NCCL
constexpr double kGraphFinalizeSeconds = 2;
constexpr double kAbortsAtExitSeconds = 2;
constexpr double kEndSeconds = 5;  // for ops in flight whose results have no reader any more
constexpr size_t kKeptInFlight = 16;

double seconds_since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

std::string in_seconds(double seconds) {
  std::ostringstream text;
  text.precision(3);
  text << seconds << " s";
  return text.str();
}

// Waits of increasing length, from a few hundred nanoseconds on: most waits here end after microseconds.
class Backoff {
 public:
  explicit Backoff(const std::function<void()>& interrupted) : interrupted_(interrupted) {}

  void step() {
    if (++rounds_ < 200) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(nap_);
    nap_ = std::min(2 * nap_, std::chrono::microseconds(1000));
    const auto now = Clock::now();
    if (now < next_question_) return;
    next_question_ = now + std::chrono::milliseconds(5);
    interrupted_();
  }

 private:
  const std::function<void()>& interrupted_;
  int rounds_ = 0;
  std::chrono::microseconds nap_{10};
  Clock::time_point next_question_{};
};

// Not a timed mutex: the ThreadSanitizer of GCC 12 does not support its functions.
bool lock_within(std::unique_lock<std::mutex>& lock, double seconds) {
  const auto begun = Clock::now();
  for (auto nap = std::chrono::microseconds(1); !lock.try_lock();
       nap = std::min(2 * nap, std::chrono::microseconds(500))) {
    if (seconds_since(begun) > seconds) return false;
    std::this_thread::sleep_for(nap);
  }
  return true;
}

// Aborts in progress. Never destroyed: their threads may outlive static objects.
struct Aborts {
  std::mutex mutex;
  std::condition_variable fewer;
  int under_way = 0;
};

Aborts& aborts() {
  static auto* all = new Aborts();
  return *all;
}

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> all;
};

Registry& registry() {
  static auto* all = new Registry();
  return *all;
}

}  // namespace

// NCCL's communicator. NCCL allows only one thread at a time to use it, except for ncclCommAbort.
struct Communicator::Handle {
  Handle(std::shared_ptr<const Library> its_library, std::shared_ptr<const Driver> its_driver, int its_device)
      : library(std::move(its_library)),
        driver(std::move(its_driver)),
        device(its_device),
        side_stream(driver, device, driver::Priority::kGreatest) {}

  std::shared_ptr<const Library> library;
  std::shared_ptr<const Driver> driver;
  int device;
  driver::OwnStream side_stream;  // not ordered after work that is stuck
  std::mutex mutex;               // guards the members below
  Comm comm = nullptr;

  Result async_error() {
    std::lock_guard<std::mutex> lock(mutex);
    if (comm == nullptr) return Result::kSuccess;
    Result error = Result::kSuccess;
    const Result asked = library->functions().comm_get_async_error(comm, &error);
    return asked == Result::kSuccess ? error : asked;
  }

  // Fills the outputs of the running op with NaN: the first op that has not ended, if it has begun. Nothing reads them
  // before it has ended, and their memory is not reused while the caller knows of no failure: so this is the first
  // step. The memory of later ops may still be read by the work before them. False: it took too long.
  bool poison(const std::deque<InFlight>& in_flight, const std::atomic<bool>& too_late) {
    Driver::Device guard(*driver, device);
    for (const InFlight& op : in_flight) {
      if (driver->done(op.ended->get())) continue;
      if (op.begun && !driver->done(op.begun->get())) return true;
      for (const Range& output : op.outputs) {
        if (too_late) return false;
        driver->fill(reinterpret_cast<driver::DeviceAddress>(output.data), 0xFF, output.bytes, side_stream.get());
      }
      return driver->synchronize(side_stream.get(), kPoisonSeconds);
    }
    return true;
  }

  // Makes everything that waits continue.
  void abort() {
    Driver::Device guard(*driver, device);
    std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
    if (!lock_within(lock, kLockSeconds) && library->has_revoke()) {
      // Some thread hangs inside NCCL, most likely in a launch that finds the queue full of waiting kernels. Revoking
      // ends these, and frees nothing that the thread still uses.
      library->functions().comm_revoke(comm, 0);
      lock_within(lock, kLockSeconds);
    }
    // If that thread still hangs, or NCCL cannot revoke, its call returns an error soon after the abort: NCCL frees
    // nothing before all kernels have ended.
    const Comm dead = std::exchange(comm, nullptr);
    if (lock.owns_lock()) lock.unlock();  // others now find no communicator, and need not wait for the abort
    if (dead != nullptr) library->functions().comm_abort(dead);
  }
};

std::shared_ptr<Communicator> Communicator::create(std::shared_ptr<const Library> library,
                                                   std::shared_ptr<const Driver> driver, int device, const UniqueId& id,
                                                   int rank, int size, Options options) {
  if (size < 1 || rank < 0 || rank >= size)
    throw std::invalid_argument("a communicator has ranks 0 to size - 1, not rank " + std::to_string(rank) + " of " +
                                std::to_string(size));
  auto handle = std::make_shared<Handle>(library, driver, device);
  std::shared_ptr<Communicator> made(new Communicator(library, driver, device, rank, size, std::move(options), handle));
  made->perform("joining the communicator", [&] {
    Config config{sizeof(Config), kMagic, static_cast<unsigned>(Library::kOldest)};
    config.blocking = 0;
    return library->functions().comm_init_rank_config(&handle->comm, size, id, rank, &config);
  });
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.push_back(made);
  return made;
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
      // Not the greatest: its kernels wait for room as clusters, and work that kernels wait for must overtake them.
      stream_(driver_, device, driver::Priority::kHigh),
      events_(driver_, device),
      graph_word_(std::make_shared<driver::GraphWord>(driver_, device)) {
  driver::Watch::Callbacks callbacks;
  callbacks.expired = [this](const std::string& what, double seconds) { expired(what, seconds); };
  callbacks.broken = [this](const std::string& why) { fail(Kind::kOther, where("the device") + " is broken: " + why); };
  callbacks.tick = [this] { tick(); };
  watch_ = std::make_unique<driver::Watch>(driver_, device_, std::move(callbacks));
}

Communicator::~Communicator() {
  // A graph that is replayed later still writes its word, so the word is leaked; NCCL likewise keeps objects of graphs.
  if (captured_) new std::shared_ptr<driver::GraphWord>(graph_word_);
  if (driver_->forked()) {
    watch_.reset();
    new std::shared_ptr<Handle>(std::move(handle_));  // NCCL does not work here: leaked
    return;
  }
  options_.interrupted = [] {};  // there is no caller that could receive the exception
  try {
    end(std::min(timeout(), kEndSeconds));
  } catch (...) {  // a broken device, or Ctrl-C: the abort has begun
  }
  watch_.reset();
}

// ---- calls into NCCL -------------------------------------------------------------------------------------------

// `call` returns NCCL's result; until it is settled no other thread calls NCCL for this communicator.
// Returns the result of `call`, before it was settled.
template <typename Call>
Result Communicator::perform(const std::string& what, Call&& call) {
  Result result = Result::kSuccess;
  {
    const auto lock = lock_handle();
    check();
    Driver::Device guard(*driver_, device_);
    result = call();
  }
  settle(result, what);
  return result;
}

// An abort may hold the mutex for long; but then the communicator has failed, and check() throws.
std::unique_lock<std::mutex> Communicator::lock_handle() const {
  std::unique_lock<std::mutex> lock(handle_->mutex, std::defer_lock);
  while (!lock_within(lock, 0.02)) check();
  return lock;
}

void Communicator::settle(Result result, const std::string& what) {
  const auto begun = Clock::now();
  Backoff backoff(options_.interrupted);
  // Some functions return ncclSuccess while the work that they have started is still running.
  if (result == Result::kSuccess) result = Result::kInProgress;
  while (result == Result::kInProgress) {
    check();
    result = handle_->async_error();
    if (result != Result::kInProgress) break;
    if (seconds_since(begun) > timeout()) {
      fail(Kind::kTimeout, where(what) + " took longer than " + in_seconds(timeout()) +
                               " (FUSED_TP_TIMEOUT): some rank did not take part; NCCL does not tell which.");
      break;
    }
    try {
      backoff.step();
    } catch (...) {
      fail(Kind::kOther, where(what) + " was interrupted, and the ranks may be out of step since.");
      throw;
    }
  }
  check();
  if (result != Result::kSuccess) {
    fail(result, what);
    check();
  }
}

// An op that waits for a stream that is not being captured, on a stream that is, would end up in another owner's graph,
// or end its capture.
static void refuse_other_captures(const Driver& driver, int device, Stream ours, Stream after) {
  Driver::Device guard(driver, device);
  if (!driver.capturing(ours)) return;  // it joins a capture of `after`, if there is one
  bool same = false;
  try {
    same = driver.capturing(after);
  } catch (const driver::DriverError&) {  // the default stream cannot be queried during a capture
  }
  if (!same)
    throw std::invalid_argument(
        "another thread is capturing this communicator's ops in a CUDA graph; until that has ended there can be no "
        "others");
}

template <typename Call>
Ticket Communicator::enqueue(const char* op, std::optional<Stream> after, std::vector<Range> outputs, bool moves,
                             Call&& call) {
  require_open();
  std::lock_guard<std::mutex> order(order_mutex_);
  check();
  if (after) refuse_other_captures(*driver_, device_, stream(), *after);
  Ticket ticket;
  ticket.op = op;
  ticket.number = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
  const std::string what = std::string(op) + " (call " + std::to_string(ticket.number) + ")";
  try {
    Driver::Device guard(*driver_, device_);
    ticket.ended = events_.take();
    SharedEvent begun;
    if (after) {
      begun = events_.take();
      driver_->record(begun->get(), *after);
      driver_->wait(stream(), begun->get());
    }
    ticket.captured = driver_->capturing(stream());
    const uint64_t graph_op = ticket.captured ? graph_word_->begin(stream(), op, ticket.number) : 0;
    const Result launched = perform(what, [&] {
      // A single send or receive returns early unless it is in a group (non-blocking communicators).
      const Functions& f = library_->functions();
      Result result = f.group_start();
      if (result != Result::kSuccess) return result;
      result = call(f, handle_->comm);
      const Result ended = f.group_end();  // in any case: the group is this thread's, not the communicator's
      return result == Result::kSuccess || result == Result::kInProgress ? ended : result;
    });
    if (launched == Result::kSuccess && moves && size_ > 1) {
      // A group of a non-blocking communicator that launches something ends with ncclInProgress. This one was not the
      // outermost: its ops are launched when the outermost group ends, after our events. They cannot be undone, and
      // NCCL still uses the communicator then, so it is leaked.
      {
        const auto lock = lock_handle();
        handle_->comm = nullptr;
      }
      fail(Kind::kOther, where(what) +
                             " was called inside of an open ncclGroupStart of this thread, e.g. in a coalescing "
                             "manager of torch.distributed, where nothing is launched.");
      check();
    }
    if (ticket.captured) graph_word_->end(stream(), graph_op);
    driver_->record(ticket.ended->get(), stream());
    ticket.begun = begun;
    if (!ticket.captured) {
      remember(ticket, std::move(outputs));
      watch_->add({op, ticket.number, std::move(begun), ticket.ended, timeout()});
    } else if (!captured_) {
      captured_ = true;
      watch_->watch_graphs(graph_word_, [this] { return timeout(); });
    }
  } catch (const driver::DriverError& error) {
    fail(Kind::kOther, where(what) + " failed: " + error.what());
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
  bool moves = false;
  for (const Transfer& transfer : transfers) {
    if (transfer.peer < 0 || transfer.peer >= size_)
      throw std::invalid_argument("a peer is a rank from 0 to " + std::to_string(size_ - 1) + ", not " +
                                  std::to_string(transfer.peer));
    if (transfer.kind == Transfer::kReceive) outputs.push_back({transfer.data, transfer.bytes});
    moves |= transfer.bytes > 0;
  }
  return enqueue("exchange", after, std::move(outputs), moves, [&](const Functions& f, Comm comm) {
    Result result = Result::kSuccess;
    for (const Transfer& transfer : transfers) {
      if (transfer.bytes == 0) continue;  // the other side skips it too
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
    Driver::Device guard(*driver_, device_);
    driver_->wait(stream, ticket.ended->get());
  }
  check();  // the stream that waits may have made this thread wait
}

// ---- failing ---------------------------------------------------------------------------------------------------

std::string Communicator::where(const std::string& what) const {
  return what + " on rank " + std::to_string(rank_) + " of " + std::to_string(size_);
}

void Communicator::require_open() const {
  if (driver_->forked()) throw GroupError(where("this communicator") + " belongs to the process that forked this one");
  check();
  if (closed_) throw GroupError(where("this communicator") + " is closed");
}

void Communicator::check() const {
  if (!failing_.load(std::memory_order_acquire)) return;
  // The error is thrown after the fill: once the caller has it, it may use all memory again.
  std::unique_lock<std::mutex> lock(failure_mutex_);
  published_.wait(lock, [this] { return failed(); });
  switch (failure_kind_) {
    case Kind::kTimeout:
      throw CollectiveTimeoutError(failure_);
    case Kind::kLost:
      throw PeerLostError(failure_);
    default:
      throw GroupError(failure_);
  }
}

std::string Communicator::failure() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

void Communicator::remember(const Ticket& ticket, std::vector<Range> outputs) {
  std::lock_guard<std::mutex> lock(in_flight_mutex_);
  while (in_flight_.size() >= kKeptInFlight && driver_->done(in_flight_.front().ended->get())) in_flight_.pop_front();
  in_flight_.push_back({ticket.begun, ticket.ended, std::move(outputs)});
}

// Fills the outputs of the running op within that time, whatever the driver does.
bool Communicator::fill_outputs(double seconds) {
  std::deque<InFlight> in_flight;
  {
    std::unique_lock<std::mutex> lock(in_flight_mutex_, std::defer_lock);
    if (!lock_within(lock, seconds)) return false;  // some thread that holds it is stuck in the driver
    in_flight.swap(in_flight_);
  }
  if (in_flight.empty()) return true;
  // In a new thread: this one may be capturing a graph, and a broken device may not answer.
  struct Fill {
    std::atomic<bool> too_late{false};
    std::promise<bool> done;
  };
  const auto fill = std::make_shared<Fill>();
  std::future<bool> done = fill->done.get_future();
  try {
    std::thread([fill, handle = handle_, ops = std::move(in_flight)]() mutable {
      bool filled = false;
      try {
        handle->driver->ignore_captures();
        filled = handle->poison(ops, fill->too_late);
      } catch (const std::exception&) {  // nothing can be written to a broken device
      }
      ops.clear();
      handle.reset();
      fill->done.set_value(filled);
    }).detach();
  } catch (const std::system_error&) {  // no more threads
    return false;
  }
  if (done.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready) return done.get();
  fill->too_late = true;
  return false;
}

void Communicator::fail(Kind kind, std::string sentence) {
  std::lock_guard<std::mutex> first(failing_mutex_);
  if (failed()) return;
  failing_.store(true, std::memory_order_release);
  watch_->clear();
  if (!fill_outputs(kPoisonSeconds)) sentence += " What it was writing could not be made NaN.";
  {
    std::lock_guard<std::mutex> lock(aborts().mutex);
    ++aborts().under_way;
  }
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    failure_kind_ = kind;
    failure_ = std::move(sentence);
    failed_.store(true, std::memory_order_release);
  }
  published_.notify_all();
  // In a new thread: ncclCommAbort waits for the communicator's kernels, for peers to abort too, and for the CUDA
  // graphs that hold its ops to be destroyed. Two communicators that are aborted one after the other could block each
  // other, and this thread may be a watchdog's.
  const auto abort = [handle = handle_]() mutable {
    try {
      handle->driver->ignore_captures();
    } catch (const std::exception&) {
    }
    try {
      handle->abort();
    } catch (const std::exception&) {
    }
    handle.reset();
    std::lock_guard<std::mutex> lock(aborts().mutex);
    --aborts().under_way;
    aborts().fewer.notify_all();
  };
  try {
    std::thread(abort).detach();
  } catch (const std::system_error&) {  // no more threads
    auto here = abort;
    here();
  }
}

void Communicator::fail(Result result, const std::string& what) {
  const bool lost = result == Result::kRemoteError || result == Result::kSystemError;
  fail(lost ? Kind::kLost : Kind::kOther,
       where(what) + (lost ? " lost a peer" : " failed") + ". NCCL says: " + library_->describe(result));
}

void Communicator::expired(const std::string& what, double seconds) {
  fail(Kind::kTimeout,
       where(what) + " has waited " + in_seconds(seconds) +
           " (FUSED_TP_TIMEOUT) for its peers, some of which had not arrived; NCCL does not tell which.");
}

void Communicator::tick() {
  Result error = Result::kSuccess;
  {
    std::unique_lock<std::mutex> lock(handle_->mutex, std::try_to_lock);
    if (!lock.owns_lock() || handle_->comm == nullptr) return;  // the thread that holds it asks NCCL itself
    if (library_->functions().comm_get_async_error(handle_->comm, &error) != Result::kSuccess) return;
  }
  if (error == Result::kSuccess || error == Result::kInProgress) return;
  fail(error, "call " + std::to_string(calls()) + " or one before it");
}

void Communicator::lose(int rank, const std::string& how) {
  fail(Kind::kLost, where("call " + std::to_string(calls()) + " or one before it") + " lost rank " +
                        std::to_string(rank) + ": " + how);
}

void Communicator::abort(const std::string& why) {
  fail(Kind::kOther, where("this communicator") + " was aborted: " + why);
}

// ---- ending ----------------------------------------------------------------------------------------------------

void Communicator::end(double seconds) {
  std::lock_guard<std::mutex> order(order_mutex_);
  if (closed_) return;
  closed_ = true;
  const auto begun = Clock::now();
  while (!failed()) {  // in slices, because the watchdog may end the wait, or Ctrl-C
    {
      Driver::Device guard(*driver_, device_);
      if (driver_->synchronize(stream(), 0.02)) break;
    }
    if (seconds_since(begun) > seconds)
      fail(Kind::kTimeout, where("closing the communicator") + " took longer than " + in_seconds(seconds) +
                               (seconds < timeout() ? "" : " (FUSED_TP_TIMEOUT)") + ": ops were still in flight.");
    try {
      options_.interrupted();
    } catch (...) {
      fail(Kind::kOther, where("closing the communicator") + " was interrupted: ops were still in flight.");
      throw;
    }
  }
  set_timeout(std::min(timeout(), seconds));
  check();
  // Finalizing completes the pending sends of NCCL's own threads.
  const auto finalize = [this] {
    return handle_->comm == nullptr ? Result::kSuccess : library_->functions().comm_finalize(handle_->comm);
  };
  if (captured_) {
    // It also waits for the graphs that hold ops to be destroyed. If these outlive it, the abort does the rest.
    set_timeout(std::min(timeout(), kGraphFinalizeSeconds));
    try {
      perform("closing the communicator", finalize);
    } catch (const CollectiveTimeoutError&) {
      return;
    }
  } else {
    perform("closing the communicator", finalize);
  }
  const auto lock = lock_handle();
  Driver::Device guard(*driver_, device_);
  const Comm ended = std::exchange(handle_->comm, nullptr);
  if (ended != nullptr) library_->functions().comm_destroy(ended);
}

void Communicator::close() { close(timeout()); }

void Communicator::close(double seconds) {
  if (driver_->forked()) return;
  if (failed()) {
    std::lock_guard<std::mutex> order(order_mutex_);
    closed_ = true;
    return;  // reported before
  }
  end(seconds);
}

void Communicator::close_all() {
  std::vector<std::weak_ptr<Communicator>> all;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    all.swap(registry().all);
  }
  const auto begun = Clock::now();
  for (const auto& one : all) {
    const std::shared_ptr<Communicator> living = one.lock();
    if (!living) continue;
    try {
      living->close(std::min(living->timeout(), std::max(0.1, kEndSeconds - seconds_since(begun))));
    } catch (...) {  // an abort has begun
    }
    living->watch_->clear();  // the words of graphs are memory of the driver
  }
  std::unique_lock<std::mutex> lock(aborts().mutex);
  aborts().fewer.wait_for(lock, std::chrono::duration<double>(kAbortsAtExitSeconds),
                          [] { return aborts().under_way == 0; });
}

}  // namespace fused_tp::nccl

#include "driver/watchdog.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <optional>
#include <thread>
#include <utility>

#include "driver/api.h"

namespace fused_tp::driver {
namespace {

using Clock = std::chrono::steady_clock;

// No thread waits for the watchdog to see the end of an op, so it polls rarely: often enough to return events to their
// pool, and to detect an expired deadline within a tenth of the timeout.
constexpr int64_t kFirstPollNs = 1'000'000;
constexpr int64_t kMaxPollNs = 20'000'000;
constexpr int64_t kGraphPollNs = 100'000'000;
constexpr int64_t kTickNs = 100'000'000;
// The thread stays awake between ops, because waking it costs the next op a system call.
constexpr int kIdleRoundsBeforeSleep = 10;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

int64_t to_ns(double seconds) { return seconds < 9e9 ? static_cast<int64_t>(seconds * 1e9) : kNever; }

std::string describe_call(const char* name, uint64_t call_number) {
  return std::string(name) + " (call " + std::to_string(call_number) + ")";
}

}  // namespace

struct Watch::State {
  std::shared_ptr<const Driver> driver;
  int device;
  Callbacks callbacks;

  std::atomic<bool> must_clear{false};  // set by Watch::clear: the next poll removes all ops

  std::mutex mutex;  // guards the members from here to last_tick_ns; never held during a callback
  std::condition_variable changed;
  bool is_removed = false;
  bool is_asleep = false;
  bool has_changed_since_poll = false;
  std::thread::id thread;
  Deadlines<WatchedOp> ops;
  std::shared_ptr<GraphProgress> graph_progress;
  std::function<double()> graph_timeout;
  GraphDeadline graph;
  int64_t last_tick_ns = 0;

  std::mutex callback_mutex;  // held by the watchdog's thread during a callback

  // The caller holds `mutex`.
  void clear_if_requested() {
    if (!must_clear.exchange(false)) return;
    ops.clear();
    graph_progress = nullptr;
  }

  // Calls `change` with `mutex` held, and wakes the thread if it sleeps.
  template <typename Change>
  void update(Change&& change) {
    bool must_wake = false;
    {
      std::lock_guard<std::mutex> lock(mutex);
      clear_if_requested();
      change();
      has_changed_since_poll = true;
      must_wake = std::exchange(is_asleep, false);
    }
    if (must_wake) changed.notify_one();
  }
};

namespace {

struct PollResult {
  bool is_op_in_flight = false;
  int64_t next_poll_ns = kNever;
};

PollResult poll_watch(Watch::State& state) {
  PollResult result;
  std::optional<Deadlines<WatchedOp>::ExpiredOp> op;
  std::optional<GraphDeadline::ExpiredOp> graph_op;
  std::shared_ptr<GraphProgress> graph_progress;
  std::string error_text;
  bool must_tick = false;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.is_removed) return result;
    state.clear_if_requested();
    const int64_t now = now_ns();
    try {
      if (!state.ops.empty()) {
        Driver::ContextGuard guard(*state.driver, state.device);
        op = state.ops.poll(
            now,
            [&](const WatchedOp& watched) {
              return !watched.begin_event || state.driver->is_done(watched.begin_event->get());
            },
            [&](const WatchedOp& watched) { return state.driver->is_done(watched.end_event->get()); });
      }
    } catch (const DriverError& error) {
      state.ops.clear();
      if (error.code != kErrorDeinitialized) error_text = error.what();
    }
    if (!state.ops.empty()) result.next_poll_ns = std::min(kMaxPollNs, state.ops.shortest_timeout_ns() / 10);
    if (state.graph_progress) {
      const int64_t timeout = to_ns(state.graph_timeout());
      graph_op = state.graph.poll(now, state.graph_progress->word(), timeout);
      result.next_poll_ns = std::min({result.next_poll_ns, kGraphPollNs, timeout / 10});
      graph_progress = state.graph_progress;
      if (graph_op) state.graph_progress = nullptr;  // so that the expired deadline is reported only once
    }
    result.is_op_in_flight = !state.ops.empty() || state.graph.is_inside_op();
    if (result.is_op_in_flight && state.callbacks.on_tick && now - state.last_tick_ns >= kTickNs) {
      state.last_tick_ns = now;
      must_tick = true;
    }
  }
  if (!op && !graph_op && error_text.empty() && !must_tick) return result;
  std::lock_guard<std::mutex> callback_lock(state.callback_mutex);
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.is_removed) return result;
  }
  if (must_tick) state.callbacks.on_tick();
  if (!error_text.empty()) state.callbacks.on_error(error_text);
  if (op)
    state.callbacks.on_timeout(describe_call(op->op.name, op->op.call_number),
                               1e-9 * static_cast<double>(op->waited_ns));
  if (graph_op)
    state.callbacks.on_timeout(graph_progress->describe(graph_op->op), 1e-9 * static_cast<double>(graph_op->waited_ns));
  return result;
}

// Main function of a watchdog's thread.
void run(const std::shared_ptr<Watch::State>& state) {
  try {
    state->driver->relax_capture_mode();
  } catch (const DriverError&) {  // the polls below get the same error and report it
  }
  int64_t period = kFirstPollNs;
  int idle_rounds = 0;
  while (true) {
    const PollResult result = poll_watch(*state);
    std::unique_lock<std::mutex> lock(state->mutex);
    if (state->is_removed) return;
    // An update since the poll makes its result outdated. The update did not notify this thread, which was awake. So
    // this thread must not go to sleep now.
    idle_rounds = result.is_op_in_flight || std::exchange(state->has_changed_since_poll, false) ? 0 : idle_rounds + 1;
    if (idle_rounds <= kIdleRoundsBeforeSleep) {
      const auto pause = std::chrono::nanoseconds(std::min(period, result.next_poll_ns));
      state->changed.wait_for(lock, pause, [&] { return state->is_removed; });
      period = std::min(2 * period, kMaxPollNs);
      continue;
    }
    state->is_asleep = true;
    const auto is_woken = [&] { return state->is_removed || !state->is_asleep; };
    if (result.next_poll_ns == kNever)
      state->changed.wait(lock, is_woken);
    else if (!state->changed.wait_for(lock, std::chrono::nanoseconds(result.next_poll_ns), is_woken))
      continue;  // timeout: time to poll the progress of graphs
    idle_rounds = 0;
    period = kFirstPollNs;
  }
}

}  // namespace

GraphProgress::GraphProgress(std::shared_ptr<const Driver> driver, int device)
    : driver_(driver), memory_(std::move(driver), device, sizeof(uint64_t)) {}

uint64_t GraphProgress::begin(Stream stream, const char* name, uint64_t call_number) {
  uint64_t op = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    op = ops_.size();
    ops_.push_back({name, call_number});
  }
  driver_->write_value(stream, memory_.device_address(), 2 * op + 1);
  return op;
}

void GraphProgress::end(Stream stream, uint64_t op) {
  driver_->write_value(stream, memory_.device_address(), 2 * op + 2);
}

std::string GraphProgress::describe(uint64_t op) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (op >= ops_.size()) return "an op in a CUDA graph";
  return describe_call(ops_[op].name, ops_[op].call_number) + " in a CUDA graph";
}

Watch::Watch(std::shared_ptr<const Driver> driver, int device, Callbacks callbacks)
    : state_(std::make_shared<State>()) {
  state_->driver = std::move(driver);
  state_->device = device;
  state_->callbacks = std::move(callbacks);
  std::lock_guard<std::mutex> lock(state_->mutex);  // run() waits for this lock in its first poll, so it sees `thread`
  std::thread thread([state = state_] { run(state); });
  state_->thread = thread.get_id();
  thread.detach();
}

Watch::~Watch() {
  if (state_->driver->is_forked_child()) {
    new std::shared_ptr<State>(std::move(state_));  // leaked: its mutexes may be locked by a thread of the parent
    return;
  }
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->is_removed = true;
  }
  state_->changed.notify_one();
  // The thread was detached, not joined, because it may be blocked in the driver. It shares ownership of the state, and
  // begins no more callbacks. Wait for a callback that is running.
  if (state_->thread != std::this_thread::get_id()) std::lock_guard<std::mutex> callback_lock(state_->callback_mutex);
}

void Watch::add(WatchedOp op) {
  if (state_->driver->is_forked_child()) return;
  const int64_t timeout = to_ns(op.timeout_seconds);
  state_->update([&] { state_->ops.add(std::move(op), timeout); });
}

void Watch::watch_graphs(std::shared_ptr<GraphProgress> progress, std::function<double()> timeout_seconds) {
  state_->update([&] {
    state_->graph_progress = std::move(progress);
    state_->graph_timeout = std::move(timeout_seconds);
  });
}

void Watch::clear() {
  state_->must_clear.store(true);
  std::unique_lock<std::mutex> lock(state_->mutex, std::try_to_lock);
  if (lock.owns_lock()) state_->clear_if_requested();
}

}  // namespace fused_tp::driver

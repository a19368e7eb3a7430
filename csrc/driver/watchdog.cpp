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

// No thread waits for the watchdog to notice that an op has ended, so it polls rarely: often enough to return events to
// their pool, and to be late by at most a tenth of a deadline.
constexpr int64_t kFirstLookNs = 1'000'000;
constexpr int64_t kLookNs = 20'000'000;
constexpr int64_t kGraphLookNs = 100'000'000;
constexpr int64_t kTickNs = 100'000'000;
constexpr int kRoundsBeforeSleep = 10;  // a sleeping thread costs the next op a system call to wake it

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

int64_t to_ns(double seconds) { return seconds < 9e9 ? static_cast<int64_t>(seconds * 1e9) : kNever; }

std::string describe_call(const char* name, uint64_t call) {
  return std::string(name) + " (call " + std::to_string(call) + ")";
}

}  // namespace

struct Watch::State {
  std::shared_ptr<const Driver> driver;
  int device;
  Callbacks callbacks;

  std::atomic<bool> cleared{false};  // the next poll must forget everything in flight

  std::mutex mutex;  // guards the members below; never held during a callback
  std::condition_variable changed;
  bool removed = false;
  bool asleep = false;
  bool changed_since_look = false;
  std::thread::id thread;
  Deadlines<WatchedOp> ops;
  std::shared_ptr<GraphWord> graph_word;
  std::function<double()> graph_timeout;
  GraphDeadline graph;
  int64_t last_tick_ns = 0;

  std::mutex callback_mutex;  // held during a callback, by the watchdog's thread

  // Requires the mutex.
  void forget_if_cleared() {
    if (!cleared.exchange(false)) return;
    ops.clear();
    graph_word = nullptr;
  }

  // Changes what is watched, and wakes the thread if it sleeps.
  template <typename Change>
  void change(Change&& make) {
    bool wake = false;
    {
      std::lock_guard<std::mutex> lock(mutex);
      forget_if_cleared();
      make();
      changed_since_look = true;
      wake = std::exchange(asleep, false);
    }
    if (wake) changed.notify_one();
  }
};

namespace {

// Result of one poll of a watch.
struct Look {
  bool in_flight = false;
  int64_t look_again_ns = kNever;
};

Look look_at(Watch::State& state) {
  Look look;
  std::optional<Deadlines<WatchedOp>::Expired> op;
  std::optional<GraphDeadline::Expired> graph_op;
  std::shared_ptr<GraphWord> graph_word;
  std::string broken;
  bool tick = false;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.removed) return look;
    state.forget_if_cleared();
    const int64_t now = now_ns();
    try {
      if (!state.ops.empty()) {
        Driver::Device guard(*state.driver, state.device);
        op = state.ops.poll(
            now, [&](const WatchedOp& one) { return !one.begun || state.driver->done(one.begun->get()); },
            [&](const WatchedOp& one) { return state.driver->done(one.ended->get()); });
      }
    } catch (const DriverError& error) {
      state.ops.clear();
      if (error.code != kErrorDeinitialized) broken = error.what();
    }
    if (!state.ops.empty()) look.look_again_ns = std::min(kLookNs, state.ops.shortest_timeout_ns() / 10);
    if (state.graph_word) {
      const int64_t timeout = to_ns(state.graph_timeout());
      graph_op = state.graph.poll(now, state.graph_word->word(), timeout);
      look.look_again_ns = std::min({look.look_again_ns, kGraphLookNs, timeout / 10});
      graph_word = state.graph_word;
      if (graph_op) state.graph_word = nullptr;  // reported once
    }
    look.in_flight = !state.ops.empty() || state.graph.inside();
    if (look.in_flight && state.callbacks.tick && now - state.last_tick_ns >= kTickNs) {
      state.last_tick_ns = now;
      tick = true;
    }
  }
  if (!op && !graph_op && broken.empty() && !tick) return look;
  std::lock_guard<std::mutex> running(state.callback_mutex);
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (state.removed) return look;
  }
  if (tick) state.callbacks.tick();
  if (!broken.empty()) state.callbacks.broken(broken);
  if (op) state.callbacks.expired(describe_call(op->op.name, op->op.number), 1e-9 * static_cast<double>(op->waited_ns));
  if (graph_op)
    state.callbacks.expired(graph_word->describe(graph_op->op), 1e-9 * static_cast<double>(graph_op->waited_ns));
  return look;
}

// The thread of one watch.
void run(const std::shared_ptr<Watch::State>& state) {
  try {
    state->driver->ignore_captures();
  } catch (const DriverError&) {  // the polls below get the same error, and report it
  }
  int64_t period = kFirstLookNs;
  int idle_rounds = 0;
  while (true) {
    const Look look = look_at(*state);
    std::unique_lock<std::mutex> lock(state->mutex);
    if (state->removed) return;
    // After a change since the poll, the poll is out of date, and no one wakes a thread that does not sleep yet.
    idle_rounds = look.in_flight || std::exchange(state->changed_since_look, false) ? 0 : idle_rounds + 1;
    if (idle_rounds <= kRoundsBeforeSleep) {
      const auto pause = std::chrono::nanoseconds(std::min(period, look.look_again_ns));
      state->changed.wait_for(lock, pause, [&] { return state->removed; });
      period = std::min(2 * period, kLookNs);
      continue;
    }
    state->asleep = true;
    const auto woken = [&] { return state->removed || !state->asleep; };
    if (look.look_again_ns == kNever)
      state->changed.wait(lock, woken);
    else if (!state->changed.wait_for(lock, std::chrono::nanoseconds(look.look_again_ns), woken))
      continue;  // the word of a graph is due
    idle_rounds = 0;
    period = kFirstLookNs;
  }
}

}  // namespace

GraphWord::GraphWord(std::shared_ptr<const Driver> driver, int device)
    : driver_(driver), memory_(std::move(driver), device, sizeof(uint64_t)) {}

uint64_t GraphWord::begin(Stream stream, const char* name, uint64_t call) {
  uint64_t op = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    op = ops_.size();
    ops_.push_back({name, call});
  }
  driver_->write_value(stream, memory_.device_address(), 2 * op + 1);
  return op;
}

void GraphWord::end(Stream stream, uint64_t op) { driver_->write_value(stream, memory_.device_address(), 2 * op + 2); }

std::string GraphWord::describe(uint64_t op) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (op >= ops_.size()) return "an op in a CUDA graph";
  return describe_call(ops_[op].name, ops_[op].call) + " in a CUDA graph";
}

Watch::Watch(std::shared_ptr<const Driver> driver, int device, Callbacks callbacks)
    : state_(std::make_shared<State>()) {
  state_->driver = std::move(driver);
  state_->device = device;
  state_->callbacks = std::move(callbacks);
  std::lock_guard<std::mutex> lock(state_->mutex);  // the thread begins once its id is known
  std::thread thread([state = state_] { run(state); });
  state_->thread = thread.get_id();
  thread.detach();
}

Watch::~Watch() {
  if (state_->driver->forked()) {
    new std::shared_ptr<State>(std::move(state_));  // leaked: its mutexes may be locked here for ever
    return;
  }
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->removed = true;
  }
  state_->changed.notify_one();
  // Not joined: the thread may be stuck in the driver. It owns the state, and makes no more callbacks.
  if (state_->thread != std::this_thread::get_id())
    std::lock_guard<std::mutex> callback_has_ended(state_->callback_mutex);
}

void Watch::add(WatchedOp op) {
  if (state_->driver->forked()) return;
  const int64_t timeout = to_ns(op.timeout_seconds);
  state_->change([&] { state_->ops.add(std::move(op), timeout); });
}

void Watch::watch_graphs(std::shared_ptr<GraphWord> word, std::function<double()> timeout_seconds) {
  state_->change([&] {
    state_->graph_word = std::move(word);
    state_->graph_timeout = std::move(timeout_seconds);
  });
}

void Watch::clear() {
  state_->cleared.store(true);
  std::unique_lock<std::mutex> lock(state_->mutex, std::try_to_lock);
  if (lock.owns_lock()) state_->forget_if_cleared();
}

}  // namespace fused_tp::driver

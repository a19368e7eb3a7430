#include "driver/watchdog.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <optional>
#include <thread>

#include "driver/api.h"

namespace fused_tp::driver {
namespace {

using Clock = std::chrono::steady_clock;

// No thread waits for the watchdog to notice that an op has ended, so it looks seldom; it need only be early enough to
// give events back to their pool, and not late by more than a tenth of a deadline.
constexpr int64_t kFirstLookNs = 1'000'000;
constexpr int64_t kLookNs = 20'000'000;
constexpr int64_t kGraphLookNs = 100'000'000;
constexpr int64_t kTickNs = 100'000'000;
constexpr int kRoundsBeforeSleep = 10;  // a sleeping thread costs the next op a system call to wake it
constexpr double kStopSeconds = 2;

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

  std::atomic<bool> let_go{false};  // everything that is in flight, at the next look

  std::mutex mutex;  // of what follows; never held during a callback
  bool removed = false;
  Deadlines<WatchedOp> ops;
  std::shared_ptr<GraphWord> graph_word;
  std::function<double()> graph_timeout;
  GraphDeadline graph;
  int64_t last_tick_ns = 0;

  std::mutex callback_mutex;  // held during a callback, by the watchdog's thread

  // With the mutex held.
  void let_go_if_told() {
    if (!let_go.exchange(false)) return;
    ops.clear();
    graph_word = nullptr;
  }
};

namespace {

// What a look at one watch has shown.
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
    state.let_go_if_told();
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
      if (graph_op) state.graph_word = nullptr;  // said once
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

class Watchdog {
 public:
  // Null in a forked child, and once it was stopped. Never destroyed: watches may outlive static objects.
  static Watchdog* instance(bool make);

  void add(std::shared_ptr<Watch::State> state) {
    std::lock_guard<std::mutex> lock(mutex_);
    states_.push_back(std::move(state));
  }

  void remove(const Watch::State* state) {
    std::lock_guard<std::mutex> lock(mutex_);
    states_.erase(
        std::remove_if(states_.begin(), states_.end(), [state](const auto& one) { return one.get() == state; }),
        states_.end());
  }

  void wake() {
    if (!asleep_.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    asleep_.store(false);
    changed_.notify_all();
  }

  bool is_this_thread() const { return std::this_thread::get_id() == thread_id_; }

  void stop() {
    std::unique_lock<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    // A callback that calls exit() is on that thread. One that hangs in the driver must not keep the process.
    if (!is_this_thread())
      changed_.wait_for(lock, std::chrono::duration<double>(kStopSeconds), [this] { return ended_; });
  }

 private:
  Watchdog() {
    std::thread thread([this] { run(); });
    thread_id_ = thread.get_id();
    thread.detach();
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    int64_t period = kFirstLookNs;
    int idle_rounds = 0;
    std::vector<const Driver*> known;
    while (!stopping_) {
      const std::vector<std::shared_ptr<Watch::State>> states = states_;
      lock.unlock();
      bool in_flight = false;
      int64_t look_again = kNever;
      for (const auto& state : states) {
        if (std::find(known.begin(), known.end(), state->driver.get()) == known.end()) {
          known.push_back(state->driver.get());  // drivers are never closed
          try {
            state->driver->ignore_captures();
          } catch (const DriverError&) {  // the looks below will meet the same error, and say so
          }
        }
        const Look look = look_at(*state);
        in_flight |= look.in_flight;
        look_again = std::min(look_again, look.look_again_ns);
      }
      idle_rounds = in_flight ? 0 : idle_rounds + 1;
      const bool may_sleep = idle_rounds > kRoundsBeforeSleep;
      lock.lock();
      if (stopping_) break;
      // It announces its sleep before the last look: a thread that adds an op in between either sees the announcement
      // and wakes it, or its op is seen by the look.
      if (may_sleep && !asleep_.load()) {
        asleep_.store(true);
        continue;
      }
      if (may_sleep) {
        const auto woken = [this] { return stopping_ || !asleep_.load(); };
        if (look_again == kNever) {
          changed_.wait(lock, woken);
        } else {
          changed_.wait_for(lock, std::chrono::nanoseconds(look_again), woken);
        }
        if (asleep_.load()) continue;  // a graph's word is due
        idle_rounds = 0;
        period = kFirstLookNs;
        continue;
      }
      asleep_.store(false);
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(period, look_again)), [this] { return stopping_; });
      period = std::min(2 * period, kLookNs);
    }
    ended_ = true;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Watch::State>> states_;
  std::atomic<bool> asleep_{false};
  bool stopping_ = false;
  bool ended_ = false;
  std::thread::id thread_id_;
};

std::mutex& instance_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

// With instance_mutex held.
Watchdog* the_watchdog = nullptr;
Watchdog* stopped_watchdog = nullptr;

Watchdog* Watchdog::instance(bool make) {
  // The thread does not exist in a forked child, and its mutexes may be locked there for ever: a new one is made if
  // the child begins anew.
  static const int registered = ::pthread_atfork([] { instance_mutex().lock(); }, [] { instance_mutex().unlock(); },
                                                 [] {
                                                   the_watchdog = nullptr;
                                                   instance_mutex().unlock();
                                                 });
  (void)registered;
  std::lock_guard<std::mutex> lock(instance_mutex());
  if (the_watchdog == nullptr && make && stopped_watchdog == nullptr) {
    the_watchdog = new Watchdog();
    // After the driver was loaded, so before it ends: exit handlers run in reverse.
    static const int at_exit = std::atexit(stop_watchdog);
    (void)at_exit;
  }
  return the_watchdog;
}

}  // namespace

void stop_watchdog() {
  Watchdog* watchdog = nullptr;
  {
    std::lock_guard<std::mutex> lock(instance_mutex());
    std::swap(watchdog, the_watchdog);
    if (watchdog != nullptr) stopped_watchdog = watchdog;
  }
  if (watchdog != nullptr) watchdog->stop();
}

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
  if (Watchdog* watchdog = Watchdog::instance(true)) watchdog->add(state_);
}

Watch::~Watch() {
  if (state_->driver->forked()) {
    new std::shared_ptr<State>(std::move(state_));  // left alone: its mutexes may be locked here for ever
    return;
  }
  Watchdog* watchdog = Watchdog::instance(false);
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->removed = true;
  }
  if (watchdog == nullptr) return;
  watchdog->remove(state_.get());
  if (!watchdog->is_this_thread()) std::lock_guard<std::mutex> callback_has_ended(state_->callback_mutex);
}

void Watch::add(WatchedOp op) {
  if (state_->driver->forked()) return;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->let_go_if_told();
    const int64_t timeout = to_ns(op.timeout_seconds);
    state_->ops.add(std::move(op), timeout);
  }
  if (Watchdog* watchdog = Watchdog::instance(false)) watchdog->wake();
}

void Watch::watch_graphs(std::shared_ptr<GraphWord> word, std::function<double()> timeout_seconds) {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->let_go_if_told();
    state_->graph_word = std::move(word);
    state_->graph_timeout = std::move(timeout_seconds);
  }
  if (Watchdog* watchdog = Watchdog::instance(false)) watchdog->wake();
}

void Watch::clear() {
  state_->let_go.store(true);
  std::unique_lock<std::mutex> lock(state_->mutex, std::try_to_lock);
  if (lock.owns_lock()) state_->let_go_if_told();
}

}  // namespace fused_tp::driver

#include "copy_engine/watchdog.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fused_tp::copy_engine {
namespace {

using std::chrono::microseconds;

constexpr microseconds kIdlePoll{50'000};
constexpr microseconds kWaitPoll{10'000};
constexpr microseconds kRescuePoll{300};
constexpr int64_t kGatePollNs = 100'000'000;
// Timeout of waits for a peer whose process has exited: its last data may still be in flight.
constexpr int64_t kLostPeerTimeoutNs = 100'000'000;
constexpr size_t kNanBytes = 256 * 1024;
constexpr double kWriteSeconds = 1;
constexpr std::chrono::seconds kCloseSeconds{5};
// Limits of the time for closing the gates, which is otherwise the timeout of waits. The copies take microseconds, but
// may have to wait for large ones.
constexpr double kMinGateSeconds = 5, kMaxGateSeconds = 60;

const char* op_name(uint64_t call_number) {
  static const char* const kNames[] = {"all_gather",        "all_gather_matmul", "matmul_reduce_scatter",
                                       "matmul_all_reduce", "reduce_scatter",    "a movement"};
  return kNames[std::min<uint64_t>(call_number % 8, static_cast<uint64_t>(Op::kOther))];
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string seconds_text(int64_t ns) {
  std::string text = std::to_string(ns / 100'000'000);  // tenths of a second
  text.insert(0, text.size() < 2 ? 2 - text.size() : 0, '0');
  return text.insert(text.size() - 1, ".");
}

}  // namespace

StreamWatchdog::StreamWatchdog(std::shared_ptr<const Driver> driver, int device, Protocol protocol,
                               std::vector<DeviceAddress> addresses, std::vector<Stream> watched_streams,
                               Stream rescue_stream)
    : driver_(std::move(driver)),
      device_(device),
      protocol_(protocol),
      addresses_(std::move(addresses)),
      watched_streams_(std::move(watched_streams)),
      ones_offset_(8 * static_cast<size_t>(host_words(protocol.layout().world()))),
      closed_offset_(ones_offset_ + 8 * static_cast<size_t>(protocol.layout().flag_words())),
      gates_offset_(closed_offset_ + 8),
      nan_offset_(static_cast<size_t>(align_up(static_cast<int64_t>(gates_offset_ + 16)))),
      pinned_(driver_, device, nan_offset_ + kNanBytes),
      rescue_stream_(rescue_stream),
      deadlines_(static_cast<size_t>(progress_words(protocol.layout().world()))),
      fork_count_(count_forks()),
      is_lost_(static_cast<size_t>(protocol.layout().world())) {
  char* data = static_cast<char*>(pinned_.data());
  auto* words = reinterpret_cast<uint64_t*>(data);
  std::fill_n(words + ones_offset_ / 8, protocol_.layout().flag_words(), kOpen);
  std::memset(data + nan_offset_, 0xFF, kNanBytes);
  thread_ = std::thread([this] { run(); });
}

StreamWatchdog::~StreamWatchdog() {
  bool is_stuck = true, was_stopped = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    was_stopped = is_stopping_;  // if true, the streams may already be used by others
  }
  try {
    Driver::ContextGuard guard(*driver_, device_);
    const auto deadline = Clock::now() + kCloseSeconds;
    while (!was_stopped && has_work_in_flight() && Clock::now() < deadline) {
      // Nobody reads the results of calls that still run, and streams that wait forever would block the device.
      if (failure() == Failure::kNone)
        abort("Rank " + std::to_string(protocol_.rank()) + " closed its copy engine while calls were in flight.");
      std::this_thread::sleep_for(kRescuePoll);
    }
    is_stuck = has_work_in_flight() || !driver_->is_idle(rescue_stream_);
  } catch (const std::exception&) {  // the device has failed, so there is nothing to wait for
  }
  stop();
  // Leak the memory if streams are stuck: freeing it would wait for them, and they may still write to it.
  if (is_stuck) pinned_.release();
}

void StreamWatchdog::stop() {
  if (count_forks() != fork_count_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StreamWatchdog::register_results(uint64_t passage, std::vector<Memory> results, bool is_captured) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_captured)
    captured_results_[passage] = std::move(results);
  else
    passages_.push_back({passage, std::move(results)});
}

void StreamWatchdog::lose(int rank) {
  is_lost_.at(static_cast<size_t>(rank)) = true;
  changed_.notify_all();
}

void StreamWatchdog::abort(const std::string& why) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (is_stopping_) return;
  if (failure() == Failure::kNone && abort_reason_.empty()) abort_reason_ = why;
  changed_.notify_all();
  changed_.wait_for(lock, kCloseSeconds, [this] { return are_gates_closed_ || is_stopping_; });
}

std::string StreamWatchdog::message() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

std::atomic<uint64_t>& StreamWatchdog::word(int index) const {
  return static_cast<std::atomic<uint64_t>*>(pinned_.data())[index];
}

void StreamWatchdog::run() {
  microseconds pause{0};
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, pause, [this] { return is_stopping_ || !abort_reason_.empty(); });
      if (is_stopping_) return;
    }
    try {
      Driver::ContextGuard guard(*driver_, device_);
      driver_->relax_capture_mode();
      pause = run_round();
      if (is_stuck_) return;
    } catch (const std::exception& error) {
      if (failure() != Failure::kNone)
        return;  // the process is exiting, or the device has failed: nothing more can be done
      std::lock_guard<std::mutex> lock(mutex_);
      message_ =
          "The watchdog of the streams of rank " + std::to_string(protocol_.rank()) + " failed: " + error.what() + ".";
      are_gates_closed_ = true;  // so that `abort` does not wait
      failure_.store(Failure::kAborted, std::memory_order_release);
      changed_.notify_all();
      return;
    }
  }
}

microseconds StreamWatchdog::run_round() {
  std::string reason;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    reason = std::exchange(abort_reason_, {});
  }
  if (!reason.empty() && failure() == Failure::kNone) fail({Failure::kAborted, protocol_.rank()}, reason);
  if (failure() == Failure::kNone) {
    const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
    const microseconds pause = poll(now);
    if (failure() == Failure::kNone) return pause;
  }
  return rescue() ? kRescuePoll : kWaitPoll;
}

microseconds StreamWatchdog::poll(int64_t now_ns) {
  const int world = protocol_.layout().world();
  const auto timeout_ns = static_cast<int64_t>(std::min(timeout_seconds_.load(std::memory_order_relaxed), 9e9) * 1e9);
  bool has_waits = false;
  for (int word_index = 0; word_index < progress_words(world); ++word_index) {
    const bool is_lost = word_index != kGateProgress && is_lost_[static_cast<size_t>((word_index - 1) % world)];
    auto& deadline = deadlines_[static_cast<size_t>(word_index)];
    const auto expired =
        deadline.poll(now_ns, word(word_index), is_lost ? std::min(timeout_ns, kLostPeerTimeoutNs) : timeout_ns);
    has_waits = has_waits || deadline.is_inside_op();
    if (!expired) continue;
    fail({is_lost ? Failure::kLost : Failure::kTimeout, protocol_.rank()},
         timeout_message(word_index, expired->op, expired->waited_ns, is_lost));
    return kRescuePoll;
  }
  if (load_word(expired_word(world)) != 0) {
    // The kernel's timeout is longer than that of the streams, so the pull streams have not even begun to wait for
    // peers.
    fail({Failure::kTimeout, protocol_.rank()},
         "A kernel of rank " + std::to_string(protocol_.rank()) +
             " timed out waiting for copies of its own rank, which did not run.");
    return kRescuePoll;
  }
  drop_passed(load_word(kGateProgress) & ~driver::GraphDeadline::kSeenBit);
  if (has_waits) read_gates(now_ns);
  return std::min(has_waits ? kWaitPoll : kIdlePoll, microseconds(timeout_ns / 10'000));
}

// Returns the error message about a wait that has timed out. It also names all other peers for which this rank waits in
// the same way.
std::string StreamWatchdog::timeout_message(int word_index, uint64_t call_number, int64_t waited_ns,
                                            bool is_lost) const {
  const int world = protocol_.layout().world();
  const std::string this_rank = "rank " + std::to_string(protocol_.rank());
  const std::string duration = " for " + seconds_text(waited_ns) + " s";
  if (word_index == kGateProgress) return "R" + this_rank.substr(1) + " waited at the end of a call" + duration + ".";
  const int wait_kind = (word_index - 1) / world;
  std::vector<int> peers;
  for (int peer = 0; peer < world; ++peer) {
    const int peer_word_index = 1 + wait_kind * world + peer;
    if (peer_word_index == word_index || (!is_lost && word(peer_word_index).load(std::memory_order_acquire) % 2 == 1))
      peers.push_back(peer);
  }
  // The graphs of `offer` are launched for many calls, and report call number 0.
  const std::string count = call_number / 8 > 0 ? ", call " + std::to_string(call_number / 8) : "";
  const std::string text = op_name(call_number) + count + ": " + this_rank + " waited" + duration;
  if (wait_kind == static_cast<int>(Wait::kSend))
    return text + " until " + rank_list(peers) + " had received the data sent before.";
  return text + " for the data of " + rank_list(peers) + ".";
}

// Detects peers that have given up. It never waits: one round starts a copy of the gates to pinned memory, and a later
// round reads the copy.
void StreamWatchdog::read_gates(int64_t now_ns) {
  if (!is_reading_gates_) {
    if (now_ns - gates_read_ns_ < kGatePollNs) return;
    gates_read_ns_ = now_ns;
    const DeviceAddress own_workspace = addresses_[static_cast<size_t>(protocol_.rank())];
    driver_->copy(pinned_address(gates_offset_),
                  own_workspace + 8 * static_cast<size_t>(protocol_.layout().gate_word(0)), 16, rescue_stream_);
    is_reading_gates_ = true;
    return;
  }
  if (!driver_->is_idle(rescue_stream_)) return;
  is_reading_gates_ = false;
  const auto* gates = reinterpret_cast<const uint64_t*>(static_cast<const char*>(pinned_.data()) + gates_offset_);
  for (int gate = 0; gate < 2; ++gate) {
    if (gates[gate] <= kOpen) continue;
    const GateClosure closure = GateClosure::from_value(gates[gate]);
    return fail(closure, "Rank " + std::to_string(closure.rank) + " notified rank " + std::to_string(protocol_.rank()) +
                             (closure.reason == Failure::kTimeout ? " that it has timed out."
                              : closure.reason == Failure::kLost  ? " that it has lost a peer."
                                                                  : " that it has given up."));
  }
}

void StreamWatchdog::fail(const GateClosure& closure, const std::string& message) {
  reinterpret_cast<uint64_t*>(static_cast<char*>(pinned_.data()) + closed_offset_)[0] = closure.value();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    message_ = message;
  }
  failure_.store(closure.reason, std::memory_order_release);
  Steps steps;
  protocol_.close_all_gates(steps);
  write(steps);
  // Wait until all gates are closed. Setting words earlier would signal data that peers still accept as valid.
  const double seconds = std::clamp(timeout_seconds_.load(std::memory_order_relaxed), kMinGateSeconds, kMaxGateSeconds);
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  while (!finish_writes()) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopping_) return;
    if (Clock::now() < deadline) continue;
    // Leave the streams waiting. If they continued, they would send invalid data that peers accept.
    is_stuck_ = true;
    message_ += " The gates of the group's calls could not be closed within " +
                seconds_text(static_cast<int64_t>(1e9 * seconds)) + " s: the device of rank " +
                std::to_string(protocol_.rank()) +
                " does not copy to the memory of some rank. Its streams may never end: exit the process.";
    break;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    are_gates_closed_ = true;  // also if closing has timed out, so that `abort` does not wait
  }
  changed_.notify_all();
}

bool StreamWatchdog::has_work_in_flight() const {
  for (int index = 0; index < progress_words(protocol_.layout().world()); ++index)
    if (word(index).load(std::memory_order_acquire) % 2 == 1) return true;
  const std::unique_lock<std::mutex> lock(capture_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return true;
  return std::any_of(watched_streams_.begin(), watched_streams_.end(),
                     [this](Stream stream) { return !driver_->is_capturing(stream) && !driver_->is_idle(stream); });
}

// Rescue after a failure: makes the streams continue by one step. Returns false once no work is in flight.
bool StreamWatchdog::rescue() {
  if (!has_work_in_flight()) return false;
  const Layout& layout = protocol_.layout();
  const DeviceAddress own_workspace = addresses_[static_cast<size_t>(protocol_.rank())];
  // Protocol::set_all_flags in one copy, because the flags are contiguous.
  driver_->copy(own_workspace + 8 * static_cast<size_t>(layout.first_flag_word()), pinned_address(ones_offset_),
                8 * static_cast<size_t>(layout.flag_words()), rescue_stream_);
  const uint64_t progress = load_word(kGateProgress) & ~driver::GraphDeadline::kSeenBit;
  drop_passed(progress);
  if (progress % 2 == 1) {
    const int gate = progress % 8 == held_at_gate(0, 0) ? 0 : 1;
    Steps close_steps, open_steps;
    protocol_.close_other_gate(close_steps, gate);
    protocol_.open_gate(open_steps, gate);
    write(close_steps);
    if (!finish_writes()) return true;
    if (gate == 0)
      for (const Memory& memory : find_results(progress / 8)) fill_with_nan(memory);
    if (!finish_writes()) return true;
    write(open_steps);
  }
  finish_writes();
  return true;
}

// Writes words by copies from pinned memory. Unlike kernels and stream memory operations, copies make progress while
// kernels that wait occupy all SMs and other streams are blocked.
void StreamWatchdog::write(const Steps& steps) {
  for (const Step& step : steps)
    driver_->copy(addresses_[static_cast<size_t>(step.rank)] + 8 * static_cast<size_t>(step.word),
                  pinned_address(step.value == kOpen ? ones_offset_ : closed_offset_), 8, rescue_stream_);
}

bool StreamWatchdog::finish_writes() { return driver_->synchronize(rescue_stream_, kWriteSeconds); }

void StreamWatchdog::fill_with_nan(const Memory& memory) {
  for (size_t start = 0; start < memory.bytes; start += kNanBytes)
    driver_->copy(memory.address + start, pinned_address(nan_offset_), std::min(kNanBytes, memory.bytes - start),
                  rescue_stream_);
}

void StreamWatchdog::drop_passed(uint64_t progress) {
  const uint64_t first_held = progress / 8 + (progress % 2 == 0 ? 1 : 0);
  std::lock_guard<std::mutex> lock(mutex_);
  while (!passages_.empty() && passages_.front().passage_number < first_held) passages_.pop_front();
}

std::vector<Memory> StreamWatchdog::find_results(uint64_t passage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto captured = captured_results_.find(passage);
  if (captured != captured_results_.end()) return captured->second;
  for (const Passage& entry : passages_)
    if (entry.passage_number == passage) return entry.results;
  return {};
}

}  // namespace fused_tp::copy_engine

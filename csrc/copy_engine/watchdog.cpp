#include "copy_engine/watchdog.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fused_tp::copy_engine {
namespace {

using std::chrono::microseconds;

constexpr microseconds kIdleLook{50'000};
constexpr microseconds kLook{10'000};
constexpr microseconds kRescueLook{300};
constexpr int64_t kReadGatesNs = 100'000'000;
// A peer that has ended sends nothing more, but its last data may still be in flight.
constexpr int64_t kLostNs = 100'000'000;
constexpr size_t kNanBytes = 256 * 1024;
constexpr double kSettleSeconds = 1;
constexpr std::chrono::seconds kCloseSeconds{5};
// Copies to the gates take microseconds, but may queue behind large ones: the limit is the timeout within these bounds.
constexpr double kLeastGateSeconds = 5, kMostGateSeconds = 60;

const char* name_of(uint64_t call) {
  static const char* const kNames[] = {"all_gather",        "all_gather_matmul", "matmul_reduce_scatter",
                                       "matmul_all_reduce", "reduce_scatter",    "a movement"};
  return kNames[std::min<uint64_t>(call % 8, static_cast<uint64_t>(Op::kOther))];
}

std::string named(const std::vector<int>& ranks) {
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string seconds_text(int64_t ns) {
  std::string text = std::to_string(ns / 100'000'000);  // tenths
  text.insert(0, text.size() < 2 ? 2 - text.size() : 0, '0');
  return text.insert(text.size() - 1, ".");
}

}  // namespace

StreamWatchdog::StreamWatchdog(std::shared_ptr<const Driver> driver, int device, Protocol protocol,
                               std::vector<DeviceAddress> addresses, std::vector<Stream> sides, Stream rescue)
    : driver_(std::move(driver)),
      device_(device),
      protocol_(protocol),
      addresses_(std::move(addresses)),
      sides_(std::move(sides)),
      ones_(8 * static_cast<size_t>(told_words(protocol.layout().world()))),
      closed_(ones_ + 8 * static_cast<size_t>(protocol.layout().flags())),
      gates_(closed_ + 8),
      nan_(static_cast<size_t>(aligned(static_cast<int64_t>(gates_ + 16)))),
      pinned_(driver_, device, nan_ + kNanBytes),
      rescue_(rescue),
      deadlines_(static_cast<size_t>(progress_words(protocol.layout().world()))),
      forks_(count_forks()),
      lost_(static_cast<size_t>(protocol.layout().world())) {
  char* data = static_cast<char*>(pinned_.data());
  auto* words = reinterpret_cast<uint64_t*>(data);
  std::fill_n(words + ones_ / 8, protocol_.layout().flags(), kOpen);
  std::memset(data + nan_, 0xFF, kNanBytes);
  thread_ = std::thread([this] { run(); });
}

StreamWatchdog::~StreamWatchdog() {
  bool stuck = true, stopped = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped = stopping_;  // if true, its streams may already have other owners
  }
  try {
    Driver::Device guard(*driver_, device_);
    const auto until = Clock::now() + kCloseSeconds;
    while (!stopped && under_way() && Clock::now() < until) {
      // Calls that still run have no reader, and streams that wait for ever would block the whole device.
      if (failure() == Failure::kNone) abort("it was closed while calls were under way");
      std::this_thread::sleep_for(kRescueLook);
    }
    stuck = under_way() || !driver_->idle(rescue_);
  } catch (const std::exception&) {  // the device is gone; there is nothing left to wait for
  }
  stop();
  // Freeing it would wait for streams that may never end, and that may still write there.
  if (stuck) pinned_.leave();
}

void StreamWatchdog::stop() {
  if (count_forks() != forks_) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void StreamWatchdog::expect(uint64_t passage, std::vector<Memory> results, bool captured) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (captured)
    captured_[passage] = std::move(results);
  else
    passages_.push_back({passage, std::move(results)});
}

void StreamWatchdog::lose(int rank) {
  lost_.at(static_cast<size_t>(rank)) = true;
  changed_.notify_all();
}

void StreamWatchdog::abort(const std::string& why) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stopping_) return;
  if (failure() == Failure::kNone && aborted_.empty()) aborted_ = why;
  changed_.notify_all();
  changed_.wait_for(lock, kCloseSeconds, [this] { return gates_closed_ || stopping_; });
}

std::string StreamWatchdog::sentence() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return sentence_;
}

std::atomic<uint64_t>& StreamWatchdog::word(int number) const {
  return static_cast<std::atomic<uint64_t>*>(pinned_.data())[number];
}

void StreamWatchdog::run() {
  microseconds pause{0};
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, pause, [this] { return stopping_ || !aborted_.empty(); });
      if (stopping_) return;
    }
    try {
      Driver::Device guard(*driver_, device_);
      driver_->ignore_captures();
      pause = round();
      if (stuck_) return;
    } catch (const std::exception& error) {
      if (failure() != Failure::kNone) return;  // the process ends, or the device is broken: nothing helps
      std::lock_guard<std::mutex> lock(mutex_);
      sentence_ = std::string("its streams can no longer be looked after: ") + error.what() + ".";
      gates_closed_ = true;  // no thread may wait for the gates
      failure_.store(Failure::kAborted, std::memory_order_release);
      changed_.notify_all();
      return;
    }
  }
}

microseconds StreamWatchdog::round() {
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    why = std::exchange(aborted_, {});
  }
  if (!why.empty() && failure() == Failure::kNone) fail({Failure::kAborted, protocol_.rank()}, why);
  if (failure() == Failure::kNone) {
    const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
    const microseconds pause = look(now);
    if (failure() == Failure::kNone) return pause;
  }
  return rescue() ? kRescueLook : kLook;
}

microseconds StreamWatchdog::look(int64_t now_ns) {
  const int world = protocol_.layout().world();
  const auto timeout_ns = static_cast<int64_t>(std::min(timeout_seconds_.load(std::memory_order_relaxed), 9e9) * 1e9);
  bool waits = false;
  for (int number = 0; number < progress_words(world); ++number) {
    const bool lost = number != kGateProgress && lost_[static_cast<size_t>((number - 1) % world)];
    auto& deadline = deadlines_[static_cast<size_t>(number)];
    const auto expired = deadline.poll(now_ns, word(number), lost ? std::min(timeout_ns, kLostNs) : timeout_ns);
    waits = waits || deadline.inside();
    if (!expired) continue;
    fail({lost ? Failure::kLost : Failure::kTimeout, protocol_.rank()},
         late(number, expired->op, expired->waited_ns, lost));
    return kRescueLook;
  }
  if (told(expired_word(world)) != 0) {
    // The kernel's deadline is longer than that of the streams, so the streams have not even begun to wait.
    fail({Failure::kTimeout, protocol_.rank()}, "A kernel of rank " + std::to_string(protocol_.rank()) +
                                                    " waited in vain for copies of its own rank, which did not run.");
    return kRescueLook;
  }
  forget_passed(told(kGateProgress) & ~driver::GraphDeadline::kSeen);
  if (waits) read_gates(now_ns);
  return std::min(waits ? kLook : kIdleLook, microseconds(timeout_ns / 10'000));
}

// Sentence about an expired wait; it also names all other peers that this rank waits for in the same way.
std::string StreamWatchdog::late(int number, uint64_t call, int64_t waited_ns, bool lost) const {
  const int world = protocol_.layout().world();
  const std::string own = "rank " + std::to_string(protocol_.rank());
  const std::string in = " for " + seconds_text(waited_ns) + " s";
  if (number == kGateProgress) return "R" + own.substr(1) + " was held up at the end of a call" + in + ".";
  const int way = (number - 1) / world;
  std::vector<int> peers;
  for (int peer = 0; peer < world; ++peer) {
    const int other = 1 + way * world + peer;
    if (other == number || (!lost && word(other).load(std::memory_order_acquire) % 2 == 1)) peers.push_back(peer);
  }
  // Calls with number 0 are those of a graph of our own, which is launched repeatedly.
  const std::string count = call / 8 > 0 ? ", call " + std::to_string(call / 8) : "";
  std::string what = name_of(call) + count + ": " + own + " waited" + in;
  if (way == static_cast<int>(Wait::kSend)) return what + " until " + named(peers) + " had taken what was sent before.";
  return what + " for the data of " + named(peers) + ".";
}

// Checks whether peers have given up, without waiting: one round copies the gates, a later one reads the copy.
void StreamWatchdog::read_gates(int64_t now_ns) {
  if (!reading_gates_) {
    if (now_ns - gates_read_ns_ < kReadGatesNs) return;
    gates_read_ns_ = now_ns;
    const DeviceAddress own = addresses_[static_cast<size_t>(protocol_.rank())];
    driver_->copy(pinned(gates_), own + 8 * static_cast<size_t>(protocol_.layout().gate(0)), 16, rescue_);
    reading_gates_ = true;
    return;
  }
  if (!driver_->idle(rescue_)) return;
  reading_gates_ = false;
  const auto* gates = reinterpret_cast<const uint64_t*>(static_cast<const char*>(pinned_.data()) + gates_);
  for (int which = 0; which < 2; ++which) {
    if (gates[which] <= kOpen) continue;
    const Closing closing = Closing::of(gates[which]);
    return fail(closing, "Rank " + std::to_string(closing.rank) + " told rank " + std::to_string(protocol_.rank()) +
                             (closing.why == Failure::kTimeout ? " that it has waited in vain."
                              : closing.why == Failure::kLost  ? " that it has lost a peer."
                                                               : " that it has given up."));
  }
}

void StreamWatchdog::fail(const Closing& closing, const std::string& sentence) {
  reinterpret_cast<uint64_t*>(static_cast<char*>(pinned_.data()) + closed_)[0] = closing.value();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    sentence_ = sentence;
  }
  failure_.store(closing.why, std::memory_order_release);
  Steps steps;
  protocol_.close_all_gates(steps);
  write(steps);
  // Nothing may be forced before all gates are closed: until then peers accept all data as right.
  const double seconds =
      std::clamp(timeout_seconds_.load(std::memory_order_relaxed), kLeastGateSeconds, kMostGateSeconds);
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  while (!settle()) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return;
    if (Clock::now() < until) continue;
    // Streams keep waiting for peers: if forced, they would move bytes that peers accept as right. No thread waits.
    stuck_ = true;
    sentence_ += " The gates of the group's calls could not be closed within " +
                 seconds_text(static_cast<int64_t>(1e9 * seconds)) + " s: the device of rank " +
                 std::to_string(protocol_.rank()) +
                 " does not copy to the memory of some rank. Its streams may never end: end the process.";
    break;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    gates_closed_ = true;  // or cannot be closed: no thread may wait for the gates
  }
  changed_.notify_all();
}

bool StreamWatchdog::under_way() const {
  for (int number = 0; number < progress_words(protocol_.layout().world()); ++number)
    if (word(number).load(std::memory_order_acquire) % 2 == 1) return true;
  const std::unique_lock<std::mutex> lock(capturing_, std::try_to_lock);
  if (!lock.owns_lock()) return true;
  return std::any_of(sides_.begin(), sides_.end(),
                     [this](Stream side) { return !driver_->capturing(side) && !driver_->idle(side); });
}

// Advances the streams by one step. True while there is something to do.
bool StreamWatchdog::rescue() {
  if (!under_way()) return false;
  const Layout& layout = protocol_.layout();
  const DeviceAddress own = addresses_[static_cast<size_t>(protocol_.rank())];
  // All of Protocol::force in one copy: the flags are contiguous.
  driver_->copy(own + 8 * static_cast<size_t>(layout.first_flag()), pinned(ones_),
                8 * static_cast<size_t>(layout.flags()), rescue_);
  const uint64_t progress = told(kGateProgress) & ~driver::GraphDeadline::kSeen;
  forget_passed(progress);
  if (progress % 2 == 1) {
    const int which = progress % 8 == at_gate(0, 0) ? 0 : 1;
    Steps shut, open;
    protocol_.shut_other(shut, which);
    protocol_.let_through(open, which);
    write(shut);
    if (!settle()) return true;
    if (which == 0)
      for (const Memory& memory : results_of(progress / 8)) fill(memory);
    if (!settle()) return true;
    write(open);
  }
  settle();
  return true;
}

// Writes by copies from host memory, which make progress where kernels find no room and other streams are blocked.
void StreamWatchdog::write(const Steps& steps) {
  for (const Step& step : steps)
    driver_->copy(addresses_[static_cast<size_t>(step.rank)] + 8 * static_cast<size_t>(step.word),
                  pinned(step.value == kOpen ? ones_ : closed_), 8, rescue_);
}

bool StreamWatchdog::settle() { return driver_->synchronize(rescue_, kSettleSeconds); }

void StreamWatchdog::fill(const Memory& memory) {
  for (size_t start = 0; start < memory.bytes; start += kNanBytes)
    driver_->copy(memory.address + start, pinned(nan_), std::min(kNanBytes, memory.bytes - start), rescue_);
}

void StreamWatchdog::forget_passed(uint64_t progress) {
  const uint64_t first_held = progress / 8 + (progress % 2 == 0 ? 1 : 0);
  std::lock_guard<std::mutex> lock(mutex_);
  while (!passages_.empty() && passages_.front().number < first_held) passages_.pop_front();
}

std::vector<Memory> StreamWatchdog::results_of(uint64_t passage) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto captured = captured_.find(passage);
  if (captured != captured_.end()) return captured->second;
  for (const Passage& one : passages_)
    if (one.number == passage) return one.results;
  return {};
}

}  // namespace fused_tp::copy_engine

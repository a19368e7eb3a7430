#include "group.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <sstream>

namespace fused_tp::shm {
namespace {

using Clock = std::chrono::steady_clock;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint64_t hash_signature(const Signature& signature) {  // FNV-1a over words, with a shift so that high bits matter
  static_assert(sizeof(Signature) % sizeof(uint64_t) == 0);
  uint64_t words[sizeof(Signature) / sizeof(uint64_t)];
  std::memcpy(words, &signature, sizeof words);
  uint64_t hash = 1469598103934665603ull;
  for (uint64_t word : words) {
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 32;
  }
  return hash;
}

std::string describe(const Signature& signature) {
  std::ostringstream text;
  text << signature.op << '(';
  for (int i = 0; i < signature.n_dims; ++i) text << (i ? ", " : "") << signature.dims[i];
  text << "; " << dtype_name(static_cast<DType>(signature.dtype)) << ')';
  return text.str();
}

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

// Spin while an answer within microseconds is likely; then yield, which hands the core to a rank that shares it; then
// sleep, so that a long wait costs nothing. With more ranks than cores spinning only delays the rank waited for.
class Backoff {
 public:
  explicit Backoff(bool crowded) : crowded_(crowded) {}

  // True when so much time has passed that the slow checks are worth their cost.
  bool step() {
    ++rounds_;
    if (rounds_ < (crowded_ ? 32 : 4096)) {
      pause_cpu();
      return false;
    }
    const auto now = Clock::now();
    if (since_ == Clock::time_point{}) since_ = now;
    const double elapsed = std::chrono::duration<double>(now - since_).count();
    if (elapsed < (crowded_ ? 2e-3 : 20e-3)) {
      ::sched_yield();
    } else {
      const timespec nap{0, elapsed < 0.1 ? 50'000 : 500'000};
      ::nanosleep(&nap, nullptr);
    }
    if (now < next_check_) return false;
    next_check_ = now + std::chrono::milliseconds(5);
    return true;
  }

 private:
  bool crowded_;
  int rounds_ = 0;
  Clock::time_point since_{};
  Clock::time_point next_check_{};
};

}  // namespace

Group::Group(int rank, int size, size_t reserve_bytes, double timeout_seconds, std::function<void()> interrupted)
    : rank_(rank),
      size_(size),
      crowded_(size > ::sysconf(_SC_NPROCESSORS_ONLN)),  // asked once: it reads a file
      timeout_seconds_(timeout_seconds),
      interrupted_(std::move(interrupted)),
      segments_(static_cast<size_t>(size)),
      pidfds_(static_cast<size_t>(size), -1) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw GroupError("shared memory serves groups of 1 to " + std::to_string(kMaxRanks) + " ranks, not rank " +
                     std::to_string(rank) + " of " + std::to_string(size));
  segments_[rank] = Segment::create(kHeapBegin + reserve_bytes);
  heap_ = std::make_unique<Heap>(kHeapBegin, segments_[rank]->bytes());
}

void Group::connect(const std::vector<SegmentAddress>& addresses) {
  if (addresses.size() != static_cast<size_t>(size_))
    throw GroupError("got " + std::to_string(addresses.size()) + " addresses for " + std::to_string(size_) + " ranks");
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    segments_[r] = Segment::open(addresses[r]);
    pidfds_[r] = open_pidfd(addresses[r].pid);
    if (pidfds_[r] >= 0) ::fcntl(pidfds_[r], F_SETFD, FD_CLOEXEC);
  }
}

Group::~Group() {
  close();
  for (int fd : pidfds_)
    if (fd >= 0) ::close(fd);
}

void Group::close() {
  uint32_t running = static_cast<uint32_t>(RankState::kRunning);
  control(rank_).state.compare_exchange_strong(running, static_cast<uint32_t>(RankState::kClosed));
}

void Group::throw_if_unusable() {
  if (unusable_state_ == RankState::kRunning) return;
  const std::string text =
      "this group is unusable since an earlier call failed; make a new group. Then: " + unusable_because_;
  if (unusable_state_ == RankState::kTimedOut) throw CollectiveTimeoutError(text);
  throw PeerLostError(text);
}

void Group::lose(int rank, const std::string& how, const std::string& doing) {
  unusable_state_ = RankState::kPeerLost;
  unusable_because_ = "rank " + std::to_string(rank_) + ", in " + doing + ": rank " + std::to_string(rank) + " " + how;
  control(rank_).lost_rank.store(static_cast<uint32_t>(rank), std::memory_order_relaxed);
  control(rank_).state.store(static_cast<uint32_t>(RankState::kPeerLost), std::memory_order_release);
  throw PeerLostError(unusable_because_);
}

void Group::check_peers(const Signature& signature, uint64_t number) {
  const std::string doing = describe(signature) + ", call " + std::to_string(number);
  for (int r = 0; r < size_; ++r) {
    // A rank that ended the call did its part; whether it lives on does not matter to this call.
    if (r == rank_ || control(r).slots[number % kSlots].ended.load(std::memory_order_acquire) >= number) continue;
    switch (static_cast<RankState>(control(r).state.load(std::memory_order_acquire))) {
      case RankState::kRunning:
        break;
      case RankState::kPeerLost: {
        const int lost = static_cast<int>(control(r).lost_rank.load(std::memory_order_relaxed));
        lose(lost == rank_ ? r : lost, lost == rank_ ? "has given this rank up" : "died (as rank " + std::to_string(r) +
             " saw)", doing);
      }
      case RankState::kTimedOut:
        unusable_state_ = RankState::kTimedOut;
        unusable_because_ = "rank " + std::to_string(rank_) + ", in " + doing + ": rank " + std::to_string(r) +
                            " waited past its deadline and left the group";
        control(rank_).state.store(static_cast<uint32_t>(RankState::kTimedOut), std::memory_order_release);
        throw CollectiveTimeoutError(unusable_because_);
      case RankState::kClosed:
        lose(r, "has left the group", doing);
    }
    if (pidfds_[r] >= 0) {
      pollfd exited{pidfds_[r], POLLIN, 0};
      if (::poll(&exited, 1, 0) > 0) lose(r, "died", doing);
    } else if (::kill(segments_[r]->address().pid, 0) != 0 && errno == ESRCH) {
      lose(r, "died", doing);
    }
  }
}

void Group::wait_until(const std::function<bool()>& done, const std::function<bool(int)>& missing,
                       const std::function<void()>& check, const Signature& signature, uint64_t number,
                       double timeout_seconds) {
  if (done()) return;
  const auto begin = Clock::now();
  struct CountWait {
    std::atomic<uint64_t>& total;
    Clock::time_point begin;
    ~CountWait() { total += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count()); }
  } count{waited_ns_, begin};
  auto next_interrupt_check = begin + std::chrono::milliseconds(100);
  Backoff backoff(crowded_);
  while (!done()) {
    if (!backoff.step()) continue;
    check();
    // A peer that signalled and then exited has done its part: look once more before calling it lost.
    if (done()) return;
    check_peers(signature, number);
    const auto now = Clock::now();
    if (interrupted_ && now > next_interrupt_check) {
      next_interrupt_check = now + std::chrono::milliseconds(100);
      interrupted_();
    }
    if (std::chrono::duration<double>(now - begin).count() < timeout_seconds) continue;
    std::ostringstream text;
    text << describe(signature) << ", call " << number << ", on rank " << rank_ << " of " << size_
         << ": waited " << timeout_seconds << " s (FUSED_TP_TIMEOUT) for rank";
    const char* separator = " ";
    for (int r = 0; r < size_; ++r)
      if (missing(r)) {
        text << separator << r;
        separator = ", ";
      }
    text << ", which had not arrived";
    unusable_state_ = RankState::kTimedOut;
    unusable_because_ = text.str();
    control(rank_).state.store(static_cast<uint32_t>(RankState::kTimedOut), std::memory_order_release);
    throw CollectiveTimeoutError(unusable_because_);
  }
}

void Group::put_signal(uint32_t* word) {
  reinterpret_cast<std::atomic<uint32_t>*>(word)->fetch_add(1, std::memory_order_release);
}

void Group::wait_signal(uint32_t* word, uint32_t target, int source, double timeout_seconds) {
  throw_if_unusable();
  auto done = [&] {
    const uint32_t value = reinterpret_cast<std::atomic<uint32_t>*>(word)->load(std::memory_order_acquire);
    return static_cast<int32_t>(value - target) >= 0;
  };
  Signature signature{};
  std::strncpy(signature.op, "wait_signal", sizeof signature.op - 1);
  signature.n_dims = 1;
  signature.dims[0] = source;
  // A number that no rank has ended: every peer matters to this wait.
  wait_until(done, [&](int r) { return r == source; }, [] {}, signature, last_call_ + kSlots,
             timeout_seconds > 0 ? timeout_seconds : timeout_seconds_);
}

uint64_t Group::all_ended_by_me() {
  const ControlBlock& mine = control(rank_);
  while (own_ended_ < last_call_ &&
         mine.slots[(own_ended_ + 1) % kSlots].ended.load(std::memory_order_relaxed) >= own_ended_ + 1)
    ++own_ended_;
  return own_ended_;
}

void Group::recycle() {
  while (!to_recycle_.empty()) {
    const HeapWorkspace oldest = to_recycle_.front();
    for (int r = 0; r < size_; ++r)
      if (control(r).slots[oldest.number % kSlots].ended.load(std::memory_order_acquire) < oldest.number) return;
    heap_->release(oldest.offset);
    to_recycle_.pop_front();
  }
}

std::unique_ptr<Call> Group::begin(const Signature& signature, size_t bytes, bool publish) {
  std::lock_guard<std::mutex> lock(mutex_);
  throw_if_unusable();
  const uint64_t number = last_call_ + 1;
  const int slot_index = static_cast<int>(number % kSlots);
  if (number > kSlots) {
    const uint64_t before = number - kSlots;
    auto ended = [&](int r) {
      // What a peer said when it began a later call often answers this without touching its memory.
      return known_ended_[r].load(std::memory_order_relaxed) >= before ||
             control(r).slots[slot_index].ended.load(std::memory_order_acquire) >= before;
    };
    if (!ended(rank_))
      throw GroupError(std::to_string(kSlots) + " calls of this group are in flight on rank " + std::to_string(rank_) +
                       ", which is the limit; finish one before starting the next");
    auto all_ended = [&] {
      for (int r = 0; r < size_; ++r)
        if (!ended(r)) return false;
      return true;
    };
    wait_until(all_ended, [&](int r) { return !ended(r); }, [] {}, signature, before, timeout_seconds_);
  }
  recycle();
  Slot& slot = control(rank_).slots[slot_index];
  if (bytes <= kInlineBytes) {
    slot.workspace_offset = kInlineBegin + static_cast<size_t>(slot_index) * kInlineBytes;
  } else {
    slot.workspace_offset = heap_->allocate(bytes);
    to_recycle_.push_back({number, slot.workspace_offset});
  }
  last_call_ = number;
  slot.workspace_bytes = bytes;
  slot.signature = signature;
  slot.signature_hash = hash_signature(signature);
  slot.all_ended = all_ended_by_me();
  if (publish) slot.progress.store(number << kStageBits, std::memory_order_release);
  return std::make_unique<Call>(shared_from_this(), number, slot_index);
}

Call::Call(std::shared_ptr<Group> group, uint64_t number, int slot)
    : group_(std::move(group)), number_(number), slot_(slot) {
  verified_ = 1ull << group_->rank();
}

Call::~Call() { abandon(); }

void Call::abandon() {
  if (ended_) return;
  ended_ = true;
  group_->control(group_->rank()).slots[slot_].ended.store(number_, std::memory_order_release);
}

bool Call::reached(int rank, uint32_t stage) const {
  return group_->control(rank).slots[slot_].progress.load(std::memory_order_acquire) >=
         ((number_ << kStageBits) | stage);
}

void Call::verify(int rank) {
  if (verified_ >> rank & 1) return;
  const Slot& mine = group_->control(group_->rank()).slots[slot_];
  const Slot& theirs = group_->control(rank).slots[slot_];
  verified_ |= 1ull << rank;
  // Monotonic per rank, and any older value is still true, so a racing store of another thread does no harm.
  group_->known_ended_[rank].store(theirs.all_ended, std::memory_order_relaxed);
  if (mine.signature_hash == theirs.signature_hash) return;
  std::ostringstream text;
  text << "ranks disagree about call " << number_ << ": rank " << group_->rank() << " called "
       << describe(mine.signature) << ", rank " << rank << " called " << describe(theirs.signature)
       << "; all ranks of a group must make the same calls in the same order";
  throw RankMismatchError(text.str());
}

void Call::wait(int rank, uint32_t stage) {
  if (!reached(rank, stage)) {
    const Signature& signature = group_->control(group_->rank()).slots[slot_].signature;
    auto check = [&] {
      // The rank waited for may itself have met a rank that disagrees and left: find that rank too.
      for (int r = 0; r < group_->size(); ++r)
        if (reached(r, 0)) verify(r);
      const bool ended = group_->control(rank).slots[slot_].ended.load(std::memory_order_acquire) >= number_;
      if (ended && !reached(rank, stage))
        throw GroupError("rank " + std::to_string(rank) + " left " + describe(signature) + ", call " +
                         std::to_string(number_) + ", because of an error of its own");
    };
    group_->wait_until([&] { return reached(rank, stage); },
                       [&](int r) { return !reached(r, stage); }, check, signature, number_,
                       group_->timeout_seconds_);
  }
  verify(rank);
}

void Call::wait_all(uint32_t stage) {
  for (int r = 0; r < group_->size(); ++r)
    if (r != group_->rank()) wait(r, stage);
}

char* Call::workspace(int rank) {
  if (rank != group_->rank()) wait(rank, 0);
  return group_->segment(rank)->data() + group_->control(rank).slots[slot_].workspace_offset;
}

size_t Call::workspace_bytes(int rank) {
  if (rank != group_->rank()) wait(rank, 0);
  return group_->control(rank).slots[slot_].workspace_bytes;
}

void Call::signal(uint32_t stage) {
  if (stage == 0 || stage >= (1u << kStageBits))
    throw GroupError("stages are numbered 1 to " + std::to_string((1u << kStageBits) - 1) + ", not " +
                     std::to_string(stage));
  group_->control(group_->rank()).slots[slot_].progress.store((number_ << kStageBits) | stage,
                                                              std::memory_order_release);
}

void Call::end() {
  if (ended_) return;
  if (!reached(group_->rank(), 0))  // begun unpublished and nothing signalled: there was nothing to move
    group_->control(group_->rank()).slots[slot_].progress.store(number_ << kStageBits, std::memory_order_release);
  wait_all(0);
  abandon();
}

}  // namespace fused_tp::shm

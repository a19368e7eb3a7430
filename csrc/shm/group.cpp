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

#include "forks.h"

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

std::string describe_call(const Signature& signature, uint64_t number) {
  return describe(signature) + ", call " + std::to_string(number);
}

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

// Spin while an answer within microseconds is likely; then yield, which passes the core to a rank that shares it; then
// sleep, so that a long wait costs nothing. With more ranks than cores, spinning only delays the rank waited for.
class Backoff {
 public:
  explicit Backoff(bool crowded) : crowded_(crowded) {}

  // True once enough time has passed for the slow checks to be worth their cost.
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

Group::Group(int rank, int size, size_t reserve_bytes, std::function<double()> timeout_seconds,
             std::function<void()> interrupted)
    : rank_(rank),
      size_(size),
      crowded_(size > ::sysconf(_SC_NPROCESSORS_ONLN)),  // asked once: it reads a file
      timeout_seconds_(std::move(timeout_seconds)),
      interrupted_(std::move(interrupted)),
      segments_(static_cast<size_t>(size)),
      pidfds_(static_cast<size_t>(size), -1),
      connected_(size == 1),
      forks_(count_forks()) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw GroupError("shared memory serves groups of 1 to " + std::to_string(kMaxRanks) + " ranks, not rank " +
                     std::to_string(rank) + " of " + std::to_string(size));
  if (reserve_bytes > kMaxReserve)  // and their sum would wrap around
    throw GroupError("cannot reserve " + std::to_string(reserve_bytes) + " bytes of shared memory: at most " +
                     std::to_string(kMaxReserve) + " (FUSED_TP_SHM_RESERVE)");
  segments_[rank] = Segment::create(kHeapBegin + reserve_bytes);
  heap_ = std::make_shared<Heap>(kHeapBegin, segments_[rank]->bytes());
}

void Group::connect(const std::vector<SegmentAddress>& addresses) {
  if (addresses.size() != static_cast<size_t>(size_))
    throw GroupError("got " + std::to_string(addresses.size()) + " addresses for " + std::to_string(size_) + " ranks");
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (addresses[r].bytes <= kHeapBegin)
      throw GroupError("the shared memory of rank " + std::to_string(r) + " has " + std::to_string(addresses[r].bytes) +
                       " bytes, too few for what ranks tell each other; install the same version of fused_tp on all");
    // The process first: if its pid is reused in between, the segment's token will not match.
    pidfds_[r] = open_pidfd(addresses[r].pid);
    if (pidfds_[r] >= 0) ::fcntl(pidfds_[r], F_SETFD, FD_CLOEXEC);
    segments_[r] = Segment::open(addresses[r]);
  }
  connected_ = true;
}

Group::~Group() {
  close();
  for (int fd : pidfds_)
    if (fd >= 0) ::close(fd);
}

void Group::close() {
  if (forks_ != count_forks()) return;
  uint32_t running = static_cast<uint32_t>(RankState::kRunning);
  control(rank_).state.compare_exchange_strong(running, static_cast<uint32_t>(RankState::kClosed));
}

void Group::give_up(const std::string& because) {
  if (forks_ != count_forks()) return;
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (unusable_state_ != RankState::kRunning) return;
    unusable_state_ = RankState::kClosed;
    unusable_because_ = because;
  }
  close();
}

void Group::throw_if_unusable() {
  if (!connected_) throw GroupError("this group is not connected yet: give every rank's address to connect()");
  if (forks_ != count_forks())
    throw GroupError("this process is a fork of rank " + std::to_string(rank_) +
                     ", which made the group; only the rank itself can call its ops");
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (unusable_state_ == RankState::kRunning) return;
  const std::string text =
      "this group is unusable since an earlier call failed; make a new group. Then: " + unusable_because_;
  if (unusable_state_ == RankState::kTimedOut) throw CollectiveTimeoutError(text);
  if (unusable_state_ == RankState::kClosed) throw GroupError(text);
  throw PeerLostError(text);
}

void Group::fail(RankState state, const std::string& because) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    unusable_state_ = state;
    unusable_because_ = because;
  }
  // Before the call ends on this rank: a peer that sees it ended unfinished looks here for the reason.
  control(rank_).state.store(static_cast<uint32_t>(state), std::memory_order_release);
  if (state == RankState::kTimedOut) throw CollectiveTimeoutError(because);
  throw PeerLostError(because);
}

void Group::lose(int rank, const std::string& how, const std::string& doing) {
  control(rank_).lost_rank.store(static_cast<uint32_t>(rank), std::memory_order_relaxed);
  fail(RankState::kPeerLost,
       "rank " + std::to_string(rank_) + ", in " + doing + ": rank " + std::to_string(rank) + " " + how);
}

void Group::follow(int rank, const std::string& doing) {
  const auto state = static_cast<RankState>(control(rank).state.load(std::memory_order_acquire));
  if (state == RankState::kTimedOut)
    fail(state, "rank " + std::to_string(rank_) + ", in " + doing + ": rank " + std::to_string(rank) +
                    " waited past its deadline and left the group");
  if (state != RankState::kPeerLost) return;
  const int lost = static_cast<int>(control(rank).lost_rank.load(std::memory_order_relaxed));
  if (lost == rank_) lose(rank, "has given this rank up", doing);
  lose(lost, "died or left (as rank " + std::to_string(rank) + " saw)", doing);
}

bool Group::has_closed(int rank) const {
  return control(rank).state.load(std::memory_order_acquire) == static_cast<uint32_t>(RankState::kClosed);
}

bool Group::died(int rank) const {
  if (pidfds_[rank] >= 0) {
    pollfd exited{pidfds_[rank], POLLIN, 0};
    return ::poll(&exited, 1, 0) > 0;
  }
  return ::kill(segments_[rank]->address().pid, 0) != 0 && errno == ESRCH;
}

int Group::dead_peer() const {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && segments_[r] && died(r)) return r;
  return -1;
}

void Group::check_peers(const Wait& wait) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !wait.matters(r)) continue;
    follow(r, wait.doing());
    const bool closed = has_closed(r);
    if (!closed && !died(r)) continue;
    // Checked once more: a rank may do its part and leave between two checks.
    if (wait.done() || !wait.matters(r)) continue;
    lose(r, closed ? "has left the group" : "died", wait.doing());
  }
}

void Group::wait_until(const Wait& wait) {
  const auto begin = Clock::now();
  struct CountWait {
    std::atomic<uint64_t>& total;
    Clock::time_point begin;
    ~CountWait() { total += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count()); }
  } count{waited_ns_, begin};
  auto next_interrupt_check = begin + std::chrono::milliseconds(100);
  double timeout_seconds = 0;
  Backoff backoff(crowded_);
  while (!wait.done()) {
    if (!backoff.step()) continue;
    wait.check();
    check_peers(wait);
    const auto now = Clock::now();
    if (interrupted_ && now > next_interrupt_check) {
      next_interrupt_check = now + std::chrono::milliseconds(100);
      interrupted_();
    }
    if (timeout_seconds <= 0) timeout_seconds = timeout_seconds_();
    if (std::chrono::duration<double>(now - begin).count() < timeout_seconds || wait.done()) continue;
    std::ostringstream text;
    text << wait.doing() << ", on rank " << rank_ << " of " << size_ << ": waited " << timeout_seconds
         << " s (FUSED_TP_TIMEOUT) for rank";
    const char* separator = " ";
    for (int r = 0; r < size_; ++r)
      if (wait.missing(r)) {
        text << separator << r;
        separator = ", ";
      }
    text << ", which had not arrived";
    fail(RankState::kTimedOut, text.str());
  }
}

uint64_t Group::all_ended_by_me() {
  const ControlBlock& mine = control(rank_);
  // acquire: another thread may have ended the call, and its reads must be ordered before our publication.
  while (own_ended_ < last_call_.load(std::memory_order_relaxed) &&
         mine.slots[(own_ended_ + 1) % kSlots].ended.load(std::memory_order_acquire) >= own_ended_ + 1)
    ++own_ended_;
  return own_ended_;
}

void Group::recycle() {
  while (!to_recycle_.empty()) {
    const HeapWorkspace oldest = to_recycle_.front();
    for (int r = 0; r < size_; ++r)
      if (!has_ended(r, oldest.number)) return;
    heap_->release(oldest.offset);
    to_recycle_.pop_front();
  }
}

// After recycle: true if peers still read the workspace of a call that has ended here.
bool Group::peers_lag() const { return !to_recycle_.empty() && has_ended(rank_, to_recycle_.front().number); }

bool Group::settled() {
  std::lock_guard<std::mutex> lock(mutex_);
  recycle();
  return !peers_lag();
}

size_t Group::allocate(size_t bytes) {
  size_t offset;
  if (heap_->try_allocate(bytes, &offset)) return offset;
  std::lock_guard<std::mutex> lock(mutex_);
  recycle();
  return heap_->allocate(bytes);
}

template <typename Ended>
void Group::wait_for_ranks(Ended&& ended, const Signature& signature, uint64_t number) {
  const auto all_ended = [&] {
    for (int r = 0; r < size_; ++r)
      if (!ended(r)) return false;
    return true;
  };
  const auto missing = [&](int r) { return !ended(r); };
  if (!all_ended()) wait_until({all_ended, missing, missing, [] {}, [&] { return describe_call(signature, number); }});
}

// A rank may run up to kSlots calls ahead of its peers; if memory does not suffice for that, it waits for them.
size_t Group::allocate_workspace(size_t bytes, bool reuse, const Signature& signature, uint64_t number) {
  size_t offset;
  while ((reuse && peers_lag()) || !heap_->try_allocate(bytes, &offset)) {
    if (!peers_lag()) return heap_->allocate(bytes);  // throws
    const uint64_t oldest = to_recycle_.front().number;
    wait_for_ranks([&](int r) { return has_ended(r, oldest); }, signature, number);
    recycle();
  }
  to_recycle_.push_back({number, offset});
  return offset;
}

std::unique_ptr<Call> Group::begin(const Signature& signature, size_t bytes, bool publish, bool reuse,
                                   const size_t* offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  throw_if_unusable();
  const uint64_t number = last_call_ + 1;
  const int slot_index = static_cast<int>(number % kSlots);
  Slot& slot = control(rank_).slots[slot_index];
  if (number > kSlots && !has_ended(rank_, number - kSlots))
    throw GroupError(std::to_string(kSlots) + " calls of this group are in flight on rank " + std::to_string(rank_) +
                     ", which is the limit; finish one before starting the next");
  try {
    if (number > kSlots) {
      const uint64_t before = number - kSlots;
      auto ended = [&](int r) {
        // The count that a peer published with a later call often answers this without a read of its memory.
        return known_ended_[r].load(std::memory_order_acquire) >= before || has_ended(r, before);
      };
      wait_for_ranks(ended, signature, number);
    }
    recycle();
    if (offset != nullptr)
      slot.workspace_offset = *offset;
    else if (bytes <= kInlineBytes)
      slot.workspace_offset = kInlineBegin + static_cast<size_t>(slot_index) * kInlineBytes;
    else
      slot.workspace_offset = allocate_workspace(bytes, reuse, signature, number);
  } catch (...) {
    // Ended without having begun: peers find that this rank has left the call.
    last_call_ = number;
    slot.ended.store(number, std::memory_order_release);
    throw;
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
  // Monotonic per rank, and any older value is still true, so a racing store of another thread does no harm. Release:
  // the thread that relies on this value to overwrite a slot may not be the one that read it from the peer.
  group_->known_ended_[rank].store(theirs.all_ended, std::memory_order_release);
  if (mine.signature_hash == theirs.signature_hash) return;
  std::ostringstream text;
  text << "ranks disagree about call " << number_ << ": rank " << group_->rank() << " called "
       << describe(mine.signature) << ", rank " << rank << " called " << describe(theirs.signature)
       << "; all ranks of a group must make the same calls in the same order";
  throw RankMismatchError(text.str());
}

void Call::wait(int rank, uint32_t stage) {
  if (!reached(rank, stage)) wait_slowly(rank, stage, false);
  verify(rank);
}

void Call::wait_all(uint32_t stage) {
  for (int r = 0; r < group_->size(); ++r) {
    if (r == group_->rank()) continue;
    if (!reached(r, stage)) wait_slowly(r, stage, true);
    verify(r);
  }
}

void Call::wait_slowly(int rank, uint32_t stage, bool for_all) {
  const Signature& signature = group_->control(group_->rank()).slots[slot_].signature;
  auto missing = [&](int r) { return r == rank || (for_all && r != group_->rank() && !reached(r, stage)); };
  auto check = [&] {
    // Read `left` first. The rank waited for may have left because another rank disagrees: all that it saw before it
    // left is then visible here too, so that the disagreement is reported, not its consequence.
    const bool left = group_->has_ended(rank, number_);
    for (int r = 0; r < group_->size(); ++r)
      if (reached(r, 0)) verify(r);
    if (!left || reached(rank, stage)) return;
    const std::string doing = describe_call(signature, number_);
    group_->follow(rank, doing);
    if (group_->has_closed(rank)) group_->lose(rank, "has left the group", doing);
    throw GroupError("rank " + std::to_string(rank) + " left " + doing + ", because of an error of its own");
  };
  // A rank that ended the call did its part; this call does not depend on its later life.
  auto matters = [&](int r) { return !group_->has_ended(r, number_); };
  try {
    group_->wait_until({[&] { return reached(rank, stage); }, missing, matters, check,
                        [&] { return describe_call(signature, number_); }});
  } catch (const GroupError&) {
    throw;
  } catch (...) {
    // A signal handler of this rank has raised. Peers that have seen this rank in the call may end the call
    // without it, and would take a second try of this rank for their next call.
    if (reached(group_->rank(), 0))
      group_->give_up(describe_call(signature, number_) +
                      " was interrupted half-way, when its peers had taken part in it: from there on the ranks would "
                      "have been out of step");
    throw;
  }
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
  group_->control(group_->rank())
      .slots[slot_]
      .progress.store((number_ << kStageBits) | stage, std::memory_order_release);
}

void Call::end() {
  if (ended_) return;
  if (!reached(group_->rank(), 0))  // begun without publication and nothing signalled: there was nothing to move
    group_->control(group_->rank()).slots[slot_].progress.store(number_ << kStageBits, std::memory_order_release);
  try {
    wait_all(0);
  } catch (...) {
    abandon();  // not left to the destructor: a kept exception may keep this call alive
    throw;
  }
  abandon();
}

}  // namespace fused_tp::shm

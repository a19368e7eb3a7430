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

uint64_t hash_signature(const Signature& signature) {  // FNV-1a on words; the shift mixes the high bits
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

std::string describe_call(const Signature& signature, uint64_t call_number) {
  return describe(signature) + ", call " + std::to_string(call_number);
}

int open_pidfd(int pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
#else
  (void)pid;
  return -1;
#endif
}

// Polling in three phases. First spin: most signals arrive within microseconds. Then yield, so that a rank on the same
// core can run. Then sleep, so that long waits use no CPU time. With more ranks than cores the first two phases are
// short, because they would delay the very rank that this one waits for.
class Backoff {
 public:
  explicit Backoff(bool is_oversubscribed) : is_oversubscribed_(is_oversubscribed) {}

  // Returns true about every 5 ms of a long wait: time for checks that are too slow for every poll.
  bool step() {
    ++rounds_;
    if (rounds_ < (is_oversubscribed_ ? 32 : 4096)) {
      pause_cpu();
      return false;
    }
    const auto now = Clock::now();
    if (since_ == Clock::time_point{}) since_ = now;
    const double elapsed = std::chrono::duration<double>(now - since_).count();
    if (elapsed < (is_oversubscribed_ ? 2e-3 : 20e-3)) {
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
  bool is_oversubscribed_;
  int rounds_ = 0;
  Clock::time_point since_{};
  Clock::time_point next_check_{};
};

}  // namespace

Group::Group(int rank, int size, size_t reserve_bytes, std::function<double()> timeout_seconds,
             std::function<void()> check_interrupt)
    : rank_(rank),
      size_(size),
      is_oversubscribed_(size > ::sysconf(_SC_NPROCESSORS_ONLN)),  // sysconf reads a file, hence only once
      timeout_seconds_(std::move(timeout_seconds)),
      check_interrupt_(std::move(check_interrupt)),
      segments_(static_cast<size_t>(size)),
      pidfds_(static_cast<size_t>(size), -1),
      is_connected_(size == 1),
      fork_count_(count_forks()) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    throw GroupError("shared memory supports groups of 1 to " + std::to_string(kMaxRanks) + " ranks, not rank " +
                     std::to_string(rank) + " of " + std::to_string(size));
  if (reserve_bytes > kMaxReserveBytes)  // kHeapOffset + reserve_bytes could overflow
    throw GroupError("FUSED_TP_SHM_RESERVE is " + std::to_string(reserve_bytes) + " bytes; it must be at most " +
                     std::to_string(kMaxReserveBytes));
  segments_[rank] = Segment::create(kHeapOffset + reserve_bytes);
  heap_ = std::make_shared<Heap>(kHeapOffset, segments_[rank]->bytes());
}

void Group::connect(const std::vector<SegmentAddress>& addresses) {
  if (addresses.size() != static_cast<size_t>(size_))
    throw GroupError("connect() needs one address for each of the " + std::to_string(size_) + " ranks; it got " +
                     std::to_string(addresses.size()));
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (addresses[r].bytes <= kHeapOffset)
      throw GroupError("the shared memory of rank " + std::to_string(r) + " has " + std::to_string(addresses[r].bytes) +
                       " bytes, too few for its control words; install the same version of fused_tp on all");
    // Open the pidfd before the segment: if the pid is reused in between, the segment's token will not match.
    pidfds_[r] = open_pidfd(addresses[r].pid);
    if (pidfds_[r] >= 0) ::fcntl(pidfds_[r], F_SETFD, FD_CLOEXEC);
    segments_[r] = Segment::open(addresses[r]);
  }
  is_connected_ = true;
}

Group::~Group() {
  close();
  for (int fd : pidfds_)
    if (fd >= 0) ::close(fd);
}

void Group::close() {
  if (fork_count_ != count_forks()) return;
  uint32_t running = static_cast<uint32_t>(RankState::kRunning);
  control(rank_).state.compare_exchange_strong(running, static_cast<uint32_t>(RankState::kClosed));
}

void Group::give_up(const std::string& reason) {
  if (fork_count_ != count_forks()) return;
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_state_ != RankState::kRunning) return;
    failure_state_ = RankState::kClosed;
    failure_reason_ = reason;
  }
  close();
}

void Group::throw_if_unusable() {
  if (!is_connected_) throw GroupError("this group is not connected yet: call connect() with every rank's address");
  if (fork_count_ != count_forks())
    throw GroupError("this process is a fork of rank " + std::to_string(rank_) +
                     ", which created the group; only that rank itself can call its ops");
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_state_ == RankState::kRunning) return;
  const std::string text =
      "this group is unusable because an earlier call failed; create a new group. The earlier failure: " +
      failure_reason_;
  if (failure_state_ == RankState::kTimedOut) throw CollectiveTimeoutError(text);
  if (failure_state_ == RankState::kClosed) throw GroupError(text);
  throw PeerLostError(text);
}

void Group::fail(RankState state, const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    failure_state_ = state;
    failure_reason_ = reason;
  }
  // This precedes the end of the call on this rank: a peer that finds the call ended, but not complete, reads the
  // reason from `state`.
  control(rank_).state.store(static_cast<uint32_t>(state), std::memory_order_release);
  if (state == RankState::kTimedOut) throw CollectiveTimeoutError(reason);
  throw PeerLostError(reason);
}

void Group::fail_lost_peer(int rank, const std::string& how, const std::string& call_text) {
  control(rank_).lost_rank.store(static_cast<uint32_t>(rank), std::memory_order_relaxed);
  fail(RankState::kPeerLost,
       "rank " + std::to_string(rank_) + ", in " + call_text + ": rank " + std::to_string(rank) + " " + how);
}

void Group::adopt_failure(int rank, const std::string& call_text) {
  const auto state = static_cast<RankState>(control(rank).state.load(std::memory_order_acquire));
  if (state == RankState::kTimedOut)
    fail(state, "rank " + std::to_string(rank_) + ", in " + call_text + ": rank " + std::to_string(rank) +
                    " waited past its deadline and left the group");
  if (state != RankState::kPeerLost) return;
  const int lost_peer = static_cast<int>(control(rank).lost_rank.load(std::memory_order_relaxed));
  if (lost_peer == rank_) fail_lost_peer(rank, "gave up on this rank and left the group", call_text);
  fail_lost_peer(lost_peer, "died or left (as rank " + std::to_string(rank) + " saw)", call_text);
}

bool Group::has_closed(int rank) const {
  return control(rank).state.load(std::memory_order_acquire) == static_cast<uint32_t>(RankState::kClosed);
}

bool Group::is_dead(int rank) const {
  if (pidfds_[rank] >= 0) {
    pollfd exited{pidfds_[rank], POLLIN, 0};
    return ::poll(&exited, 1, 0) > 0;
  }
  return ::kill(segments_[rank]->address().pid, 0) != 0 && errno == ESRCH;
}

int Group::dead_peer() const {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && segments_[r] && is_dead(r)) return r;
  return -1;
}

void Group::check_peers(const Wait& wait) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !wait.depends_on(r)) continue;
    adopt_failure(r, wait.call_text());
    const bool is_closed = has_closed(r);
    if (!is_closed && !is_dead(r)) continue;
    // Check the wait again: the rank may have contributed just before it left.
    if (wait.is_done() || !wait.depends_on(r)) continue;
    fail_lost_peer(r, is_closed ? "has left the group" : "died", wait.call_text());
  }
}

void Group::wait_until(const Wait& wait) {
  const auto begin = Clock::now();
  struct CountWait {
    std::atomic<uint64_t>& total;
    Clock::time_point begin;
    ~CountWait() { total += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count()); }
  } wait_counter{waited_ns_, begin};
  auto next_interrupt_check = begin + std::chrono::milliseconds(100);
  double timeout_seconds = 0;
  Backoff backoff(is_oversubscribed_);
  while (!wait.is_done()) {
    if (!backoff.step()) continue;
    wait.check();
    check_peers(wait);
    const auto now = Clock::now();
    if (check_interrupt_ && now > next_interrupt_check) {
      next_interrupt_check = now + std::chrono::milliseconds(100);
      check_interrupt_();
    }
    if (timeout_seconds <= 0) timeout_seconds = timeout_seconds_();
    if (std::chrono::duration<double>(now - begin).count() < timeout_seconds || wait.is_done()) continue;
    std::ostringstream text;
    text << wait.call_text() << ", on rank " << rank_ << " of " << size_ << ": waited " << timeout_seconds
         << " s (FUSED_TP_TIMEOUT) for rank";
    const char* separator = " ";
    for (int r = 0; r < size_; ++r)
      if (wait.is_missing(r)) {
        text << separator << r;
        separator = ", ";
      }
    text << ", which had not arrived";
    fail(RankState::kTimedOut, text.str());
  }
}

uint64_t Group::update_own_last_ended() {
  const ControlBlock& own_control = control(rank_);
  // Acquire: another thread of this rank may have ended the call. Its reads of peers' workspaces must happen before
  // this rank publishes that the call has ended.
  while (own_last_ended_ < last_call_.load(std::memory_order_relaxed) &&
         own_control.slots[(own_last_ended_ + 1) % kSlots].last_ended.load(std::memory_order_acquire) >=
             own_last_ended_ + 1)
    ++own_last_ended_;
  return own_last_ended_;
}

void Group::recycle_workspaces() {
  while (!pending_workspaces_.empty()) {
    const HeapWorkspace oldest = pending_workspaces_.front();
    for (int r = 0; r < size_; ++r)
      if (!has_ended(r, oldest.call_number)) return;
    heap_->release(oldest.offset);
    pending_workspaces_.pop_front();
  }
}

// True if a call has ended on this rank, but peers may still read its workspace. Call recycle_workspaces first.
bool Group::has_lagging_peers() const {
  return !pending_workspaces_.empty() && has_ended(rank_, pending_workspaces_.front().call_number);
}

bool Group::is_settled() {
  std::lock_guard<std::mutex> lock(mutex_);
  recycle_workspaces();
  return !has_lagging_peers();
}

size_t Group::allocate(size_t bytes) {
  size_t offset;
  if (heap_->try_allocate(bytes, &offset)) return offset;
  std::lock_guard<std::mutex> lock(mutex_);
  recycle_workspaces();
  return heap_->allocate(bytes);
}

template <typename HasEnded>
void Group::wait_for_ranks(HasEnded&& rank_has_ended, const Signature& signature, uint64_t call_number) {
  const auto all_have_ended = [&] {
    for (int r = 0; r < size_; ++r)
      if (!rank_has_ended(r)) return false;
    return true;
  };
  const auto is_missing = [&](int r) { return !rank_has_ended(r); };
  if (!all_have_ended())
    wait_until({all_have_ended, is_missing, is_missing, [] {}, [&] { return describe_call(signature, call_number); }});
}

// A rank may be up to kSlots calls ahead of its peers. If the heap is too small for the workspaces of these calls, it
// waits for peers.
size_t Group::allocate_workspace(size_t bytes, bool waits_for_reuse, const Signature& signature, uint64_t call_number) {
  size_t offset;
  while ((waits_for_reuse && has_lagging_peers()) || !heap_->try_allocate(bytes, &offset)) {
    if (!has_lagging_peers()) return heap_->allocate(bytes);  // throws, because the heap is full
    const uint64_t oldest_call = pending_workspaces_.front().call_number;
    wait_for_ranks([&](int r) { return has_ended(r, oldest_call); }, signature, call_number);
    recycle_workspaces();
  }
  pending_workspaces_.push_back({call_number, offset});
  return offset;
}

std::unique_ptr<Call> Group::begin(const Signature& signature, size_t bytes, bool publishes_now, bool waits_for_reuse,
                                   const size_t* offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  throw_if_unusable();
  const uint64_t call_number = last_call_ + 1;
  const int slot_index = static_cast<int>(call_number % kSlots);
  Slot& slot = control(rank_).slots[slot_index];
  if (call_number > kSlots && !has_ended(rank_, call_number - kSlots))
    throw GroupError(std::to_string(kSlots) + " calls of this group are in flight on rank " + std::to_string(rank_) +
                     ", which is the limit; finish one before starting the next");
  try {
    if (call_number > kSlots) {
      const uint64_t previous_call = call_number - kSlots;
      auto rank_has_ended = [&](int r) {
        // The value that the peer published in a later call often suffices, and avoids a read of the peer's memory.
        return known_last_ended_[r].load(std::memory_order_acquire) >= previous_call || has_ended(r, previous_call);
      };
      wait_for_ranks(rank_has_ended, signature, call_number);
    }
    recycle_workspaces();
    if (offset != nullptr)
      slot.workspace_offset = *offset;
    else if (bytes <= kSlotWorkspaceBytes)
      slot.workspace_offset = kSlotWorkspacesOffset + static_cast<size_t>(slot_index) * kSlotWorkspaceBytes;
    else
      slot.workspace_offset = allocate_workspace(bytes, waits_for_reuse, signature, call_number);
  } catch (...) {
    // Mark the call as ended although it never began: peers then find that this rank has left it.
    last_call_ = call_number;
    slot.last_ended.store(call_number, std::memory_order_release);
    throw;
  }
  last_call_ = call_number;
  slot.workspace_bytes = bytes;
  slot.signature = signature;
  slot.signature_hash = hash_signature(signature);
  slot.ended_up_to = update_own_last_ended();
  if (publishes_now) slot.progress.store(call_number << kStageBits, std::memory_order_release);
  return std::make_unique<Call>(shared_from_this(), call_number, slot_index);
}

Call::Call(std::shared_ptr<Group> group, uint64_t call_number, int slot)
    : group_(std::move(group)), call_number_(call_number), slot_(slot) {
  verified_ranks_ = 1ull << group_->rank();
}

Call::~Call() { abandon(); }

void Call::abandon() {
  if (has_ended_) return;
  has_ended_ = true;
  group_->control(group_->rank()).slots[slot_].last_ended.store(call_number_, std::memory_order_release);
}

bool Call::has_reached(int rank, uint32_t stage) const {
  return group_->control(rank).slots[slot_].progress.load(std::memory_order_acquire) >=
         ((call_number_ << kStageBits) | stage);
}

void Call::verify_signature(int rank) {
  if (verified_ranks_ >> rank & 1) return;
  const Slot& own_slot = group_->control(group_->rank()).slots[slot_];
  const Slot& peer_slot = group_->control(rank).slots[slot_];
  verified_ranks_ |= 1ull << rank;
  // If another thread stores an older value concurrently, that value is still true: ended calls stay ended. Release
  // order, because another thread may use this value to overwrite a slot.
  group_->known_last_ended_[rank].store(peer_slot.ended_up_to, std::memory_order_release);
  if (own_slot.signature_hash == peer_slot.signature_hash) return;
  std::ostringstream text;
  text << "ranks disagree about call " << call_number_ << ": rank " << group_->rank() << " called "
       << describe(own_slot.signature) << ", rank " << rank << " called " << describe(peer_slot.signature)
       << "; all ranks of a group must make the same calls in the same order";
  throw RankMismatchError(text.str());
}

void Call::wait(int rank, uint32_t stage) {
  if (!has_reached(rank, stage)) wait_slowly(rank, stage, false);
  verify_signature(rank);
}

void Call::wait_all(uint32_t stage) {
  for (int r = 0; r < group_->size(); ++r) {
    if (r == group_->rank()) continue;
    if (!has_reached(r, stage)) wait_slowly(r, stage, true);
    verify_signature(r);
  }
}

void Call::wait_slowly(int rank, uint32_t stage, bool waits_for_all) {
  const Signature& signature = group_->control(group_->rank()).slots[slot_].signature;
  auto is_missing = [&](int r) {
    return r == rank || (waits_for_all && r != group_->rank() && !has_reached(r, stage));
  };
  auto check = [&] {
    // Load has_left before comparing signatures. If `rank` left the call because some rank's signature differs, the
    // acquire load makes that signature visible here, and RankMismatchError reports it instead of the rank's leaving.
    const bool has_left = group_->has_ended(rank, call_number_);
    for (int r = 0; r < group_->size(); ++r)
      if (has_reached(r, 0)) verify_signature(r);
    if (!has_left || has_reached(rank, stage)) return;
    const std::string call_text = describe_call(signature, call_number_);
    group_->adopt_failure(rank, call_text);
    if (group_->has_closed(rank)) group_->fail_lost_peer(rank, "has left the group", call_text);
    throw GroupError("rank " + std::to_string(rank) + " left " + call_text + " because it raised an error");
  };
  // A rank that has ended the call has contributed everything, so it may exit.
  auto depends_on = [&](int r) { return !group_->has_ended(r, call_number_); };
  try {
    group_->wait_until({[&] { return has_reached(rank, stage); }, is_missing, depends_on, check,
                        [&] { return describe_call(signature, call_number_); }});
  } catch (const GroupError&) {
    throw;
  } catch (...) {
    // check_interrupt has thrown, for example KeyboardInterrupt. Peers that have seen this rank in the call may
    // complete it. If this rank called the op again, they would match that with their next call.
    if (has_reached(group_->rank(), 0))
      group_->give_up(describe_call(signature, call_number_) +
                      " was interrupted after peers had joined it, so the later calls of the ranks would not match");
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
      .progress.store((call_number_ << kStageBits) | stage, std::memory_order_release);
}

void Call::end() {
  if (has_ended_) return;
  if (!has_reached(group_->rank(), 0))  // not published by `begin`, and no signal since: publish it now
    group_->control(group_->rank()).slots[slot_].progress.store(call_number_ << kStageBits, std::memory_order_release);
  try {
    wait_all(0);
  } catch (...) {
    abandon();  // do not rely on the destructor: Python's traceback may keep this call alive
    throw;
  }
  abandon();
}

}  // namespace fused_tp::shm

// A double of libnccl.so.2 on the CPU, between processes: a unique id names an object of POSIX shared memory, in which
// every pair of ranks has a small mailbox. Ops run as steps in streams of cuda_double.cpp, which is in this library,
// move their bytes through the mailboxes and wait for each other as NCCL's kernels do; an abort ends them.
//
// As in NCCL, communicators are non-blocking, here always: the work of a call has begun only once ncclCommGetAsyncError
// returns ncclSuccess.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

using Stream = struct CUstream_st*;
extern "C" void cuda_double_enqueue(Stream, void (*)(void*), void*);
extern "C" int cuda_double_capturing(Stream);

namespace {

enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };

constexpr int kInt8 = 0;
constexpr int kMaxRanks = 8;
constexpr size_t kMailboxBytes = 1 << 14;

std::atomic<int> injected{kSuccess};
std::atomic<bool> launches_stalled{false};
std::atomic<int> live_communicators{0};

// ---- shared memory ---------------------------------------------------------------------------------------------

struct Mailbox {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> read;
  char bytes[kMailboxBytes];
};

struct Shared {
  std::atomic<int> joined;
  Mailbox mailboxes[kMaxRanks][kMaxRanks];  // from, to
};

// Ranks join in any order, and the last one unlinks the name; the mappings remain.
class Region {
 public:
  explicit Region(const std::string& name) : name_(name) {
    const int file = ::shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ::ftruncate(file, sizeof(Shared)) != 0) std::abort();
    void* at = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (at == MAP_FAILED) std::abort();
    shared = static_cast<Shared*>(at);
  }
  ~Region() { ::munmap(shared, sizeof(Shared)); }
  void forget_name() { ::shm_unlink(name_.c_str()); }

  Shared* shared;

 private:
  std::string name_;
};

// ---- ops -------------------------------------------------------------------------------------------------------

// A message: its length, then that many bytes.
struct Piece {
  bool out;
  int peer;
  char* data;
  uint64_t bytes;
  uint64_t length = bytes;  // the sender's length
  uint64_t done = 0;        // bytes moved, including the 8 bytes of the length
};
using Pieces = std::vector<Piece>;

}  // namespace

struct ncclComm {
  std::shared_ptr<Region> region;
  int rank = 0;
  int size = 1;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{kSuccess};
  std::atomic<int> running{0};  // steps in streams

  // Used only by the calling thread.
  bool joined = false;
  bool captured = false;  // graphs hold its steps, so it is never deleted
  bool finalized = false;
  std::vector<std::function<void()>> to_launch;  // launched by a later call of ncclCommGetAsyncError
  int questions = 0;
};

namespace {

using CommPointer = ncclComm*;

// Sends as much as there is room for, or receives the data that has arrived; true once the whole message has moved.
bool move(ncclComm& comm, Piece& piece) {
  auto& boxes = comm.region->shared->mailboxes;
  Mailbox& box = piece.out ? boxes[comm.rank][piece.peer] : boxes[piece.peer][comm.rank];
  std::atomic<uint64_t>& own = piece.out ? box.written : box.read;
  while (piece.done < piece.bytes + 8) {
    const uint64_t moved = own.load(std::memory_order_relaxed), at = moved % kMailboxBytes;
    const uint64_t there = piece.out ? kMailboxBytes - (moved - box.read.load(std::memory_order_acquire))
                                     : box.written.load(std::memory_order_acquire) - moved;
    if (there == 0) return false;
    const bool header = piece.done < 8;
    const uint64_t step = std::min({(header ? 8 : piece.bytes + 8) - piece.done, there, kMailboxBytes - at});
    char* mine = header ? reinterpret_cast<char*>(&piece.length) + piece.done : piece.data + piece.done - 8;
    std::memcpy(piece.out ? box.bytes + at : mine, piece.out ? mine : box.bytes + at, step);
    own.store(moved + step, std::memory_order_release);
    piece.done += step;
    if (piece.done == 8 && piece.length != piece.bytes) {
      comm.error.store(kInvalidUsage);
      return false;
    }
  }
  return true;
}

// Moves all messages concurrently: none waits for another, except that messages between two ranks keep their order.
void exchange(ncclComm& comm, Pieces pieces) {
  for (int round = 0; !comm.aborted.load(); ++round) {
    bool all = true;
    bool blocked[2][kMaxRanks] = {};
    for (Piece& piece : pieces) {
      bool& behind = blocked[piece.out][piece.peer];
      behind = behind || !move(comm, piece);
      all = all && !behind;
    }
    if (all) return;
    if (round < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

struct Step {
  ncclComm* comm;
  Pieces pieces;
  bool captured;  // a captured step may run any number of times
};

void launch(ncclComm* comm, Stream stream, Pieces pieces) {
  auto* step = new Step{comm, std::move(pieces), cuda_double_capturing(stream) != 0};
  if (step->captured) {
    comm->captured = true;
  } else {
    ++comm->running;
  }
  cuda_double_enqueue(
      stream,
      [](void* argument) {
        auto* one = static_cast<Step*>(argument);
        ncclComm* its = one->comm;
        if (one->captured) ++its->running;
        exchange(*its, one->pieces);
        if (!one->captured) delete one;
        --its->running;
      },
      step);
}

struct Group {
  int depth = 0;
  struct Member {
    ncclComm* comm;
    Stream stream;
    Pieces pieces;
  };
  std::vector<Member> members;
};

Group& group() {
  thread_local Group current;
  return current;
}

int end_group() {
  Group& current = group();
  if (--current.depth > 0) return kSuccess;
  const std::vector<Group::Member> members = std::move(current.members);
  current.members.clear();
  for (const auto& member : members) {
    member.comm->to_launch.push_back([member] { launch(member.comm, member.stream, member.pieces); });
    member.comm->questions = 2;
  }
  return members.empty() ? kSuccess : kInProgress;
}

int add(ncclComm* comm, Stream stream, int type, const Pieces& pieces) {
  if (comm == nullptr || type != kInt8) return kInvalidArgument;
  if (!comm->joined || comm->finalized || !comm->to_launch.empty()) return kInvalidUsage;
  Group& current = group();
  ++current.depth;
  auto member = std::find_if(current.members.begin(), current.members.end(),
                             [&](const auto& one) { return one.comm == comm && one.stream == stream; });
  if (member == current.members.end()) member = current.members.insert(member, {comm, stream, {}});
  member->pieces.insert(member->pieces.end(), pieces.begin(), pieces.end());
  return end_group();
}

ncclComm* new_comm(const std::string& name, int rank, int size) {
  auto* comm = new ncclComm();
  comm->region = std::make_shared<Region>(name);
  comm->rank = rank;
  comm->size = size;
  if (++comm->region->shared->joined == size) comm->region->forget_name();
  ++live_communicators;
  return comm;
}

void release(ncclComm* comm) {
  while (comm->running.load() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  comm->region->forget_name();  // in case some rank has never joined
  --live_communicators;
  if (!comm->captured) delete comm;
}

struct Config {  // the fields common to all versions
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
};

bool wrong(const Config* config) {
  return config == nullptr || config->magic != 0xcafebeef || config->size < 48 || config->blocking != 0;
}

}  // namespace

// ---- knobs of the double ---------------------------------------------------------------------------------------

// Makes every communicator of this process report that error from now on.
EXPORT void nccl_double_inject(int error) { injected.store(error); }

// Makes all new work remain at ncclInProgress from now on, as when a connection cannot be made.
EXPORT void nccl_double_stall_launches(int on) { launches_stalled.store(on != 0); }

EXPORT int nccl_double_live_communicators() { return live_communicators.load(); }

// ---- NCCL's functions ------------------------------------------------------------------------------------------

EXPORT int ncclGetVersion(int* version) {
  const char* text = std::getenv("NCCL_DOUBLE_VERSION");
  *version = text ? std::atoi(text) : 23000;
  return kSuccess;
}

struct ncclUniqueId {
  char internal[128];
};

EXPORT int ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> made{0};
  std::memset(id, 0, sizeof *id);
  std::random_device chance;
  std::snprintf(id->internal, sizeof id->internal, "/fused_tp_nccl_double_%d_%d_%08x", ::getpid(), ++made, chance());
  return kSuccess;
}

EXPORT int ncclCommInitRankConfig(CommPointer* made, int size, ncclUniqueId id, int rank, const Config* config) {
  if (wrong(config) || size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return kInvalidArgument;
  *made = new_comm(id.internal, rank, size);
  return kInProgress;
}

EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* error) {
  *error = kSuccess;
  if (injected.load() != kSuccess) {
    *error = injected.load();
  } else if (comm->error.load() != kSuccess) {
    *error = comm->error.load();
  } else if (launches_stalled.load() && (!comm->to_launch.empty() || !comm->joined)) {
    *error = kInProgress;
  } else if (!comm->joined) {
    comm->joined = comm->region->shared->joined.load(std::memory_order_acquire) == comm->size;
    if (!comm->joined) *error = kInProgress;
  } else if (!comm->to_launch.empty()) {
    if (--comm->questions > 0) {
      *error = kInProgress;
    } else {
      const auto launches = std::move(comm->to_launch);
      comm->to_launch.clear();
      for (const auto& one : launches) one();
    }
  } else if (comm->finalized && (comm->running.load() > 0 || comm->captured)) {  // the end of graphs is unknown here
    *error = kInProgress;
  }
  return kSuccess;
}

EXPORT int ncclCommFinalize(ncclComm* comm) {
  if (comm->finalized) return kInvalidArgument;
  comm->finalized = true;
  return kInProgress;
}

EXPORT int ncclCommDestroy(ncclComm* comm) {
  if (!comm->finalized) return kInvalidUsage;
  release(comm);
  return kSuccess;
}

EXPORT int ncclCommAbort(ncclComm* comm) {
  comm->aborted.store(true);
  release(comm);
  return kSuccess;
}

EXPORT int ncclCommRevoke(ncclComm* comm, int) {
  comm->aborted.store(true);
  return kSuccess;
}

EXPORT const char* ncclGetErrorString(int) { return "said by the double of NCCL"; }

EXPORT const char* ncclGetLastError(ncclComm*) { return ""; }

EXPORT int ncclGroupStart() {
  ++group().depth;
  return kSuccess;
}

EXPORT int ncclGroupEnd() { return end_group(); }

EXPORT int ncclAllGather(const void* in, void* out, size_t bytes, int type, ncclComm* comm, Stream stream) {
  Pieces pieces;
  for (int r = 0; r < comm->size; ++r) {
    pieces.push_back({true, r, static_cast<char*>(const_cast<void*>(in)), bytes});
    pieces.push_back({false, r, static_cast<char*>(out) + static_cast<size_t>(r) * bytes, bytes});
  }
  return add(comm, stream, type, pieces);
}

EXPORT int ncclSend(const void* data, size_t bytes, int type, int peer, ncclComm* comm, Stream stream) {
  return add(comm, stream, type, {{true, peer, static_cast<char*>(const_cast<void*>(data)), bytes}});
}

EXPORT int ncclRecv(void* data, size_t bytes, int type, int peer, ncclComm* comm, Stream stream) {
  return add(comm, stream, type, {{false, peer, static_cast<char*>(data), bytes}});
}

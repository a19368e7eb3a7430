// A double of libnccl.so.2 on the CPU, between processes: a unique id names an object of POSIX shared memory, in which
// every pair of ranks has a small mailbox. Ops run as steps of streams of the double of libcuda (CUDA_DOUBLE is its
// path), move their bytes through the mailboxes and wait for each other as NCCL's kernels do; an abort ends them.
//
// Like NCCL it is not ready at once: communicators are always non-blocking, and whatever a call starts has only begun
// once ncclCommGetAsyncError has been asked and says ncclSuccess.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

struct CUstream_st;

namespace {

enum Result {
  kSuccess = 0,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

constexpr int kMaxRanks = 8;
constexpr int kMaxSplits = 64;
constexpr size_t kMailboxBytes = 1 << 14;

using Stream = CUstream_st*;

int number_from(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::atoi(text) : otherwise;
}

std::atomic<int> injected{kSuccess};
std::atomic<bool> launches_stalled{false};
std::atomic<int> live_communicators{0};

// ---- shared memory ---------------------------------------------------------------------------------------------

struct Mailbox {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> read;
  char bytes[kMailboxBytes];
};

struct Split {
  std::atomic<int> arrived;
  int color[kMaxRanks];
  int key[kMaxRanks];
};

struct Shared {
  std::atomic<int> joined;
  Split splits[kMaxSplits];
  Mailbox mailboxes[kMaxRanks][kMaxRanks];  // from, to
};

// Ranks come in any order, and whoever comes last takes the name away; what is mapped stays.
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
  const std::string& name() const { return name_; }

  Shared* shared;

 private:
  std::string name_;
};

// ---- arithmetic ------------------------------------------------------------------------------------------------

float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? __builtin_nanf("") : sign * __builtin_inff();
  if (exponent == 0) return sign * __builtin_ldexpf(static_cast<float>(mantissa), -24);
  return sign * __builtin_ldexpf(static_cast<float>(mantissa + 1024), exponent - 25);
}

uint16_t to_f16(float value) {
  const uint16_t sign = __builtin_signbit(value) ? 0x8000 : 0;
  if (__builtin_isnan(value)) return 0x7e00;
  if (value == 0) return sign;
  const float magnitude = __builtin_fabsf(value);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent = 0;
  __builtin_frexpf(magnitude, &exponent);
  const int shift = exponent - 11 < -24 ? -24 : exponent - 11;  // of the last bit that is kept
  const float rounded = __builtin_rintf(__builtin_ldexpf(magnitude, -shift));
  // A mantissa that rounds up to 2048 carries into the exponent, as it should.
  const int base = shift + 24 == 0 ? 0 : (shift + 24) << 10;
  return static_cast<uint16_t>(sign | (base + static_cast<int>(rounded)));
}

size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return type >= 0 && type < 10 ? sizes[type] : 0;
}

template <typename T>
T combine(T a, T b, int op) {
  return op == 2 ? (a > b ? a : b) : op == 3 ? (a < b ? a : b) : static_cast<T>(a + b);
}

template <typename T, typename Wide, typename Load, typename Store>
void reduce_as(const std::vector<std::vector<char>>& terms, char* out, size_t count, int op, Load load, Store store) {
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, terms[0].data() + i * sizeof(T), sizeof(T));
    Wide total = load(value);
    for (size_t t = 1; t < terms.size(); ++t) {
      std::memcpy(&value, terms[t].data() + i * sizeof(T), sizeof(T));
      total = combine<Wide>(total, load(value), op);
    }
    value = store(total);
    std::memcpy(out + i * sizeof(T), &value, sizeof(T));
  }
}

template <typename T>
void reduce_plain(const std::vector<std::vector<char>>& terms, char* out, size_t count, int op) {
  reduce_as<T, T>(terms, out, count, op, [](T v) { return v; }, [](T v) { return v; });
}

void reduce(const std::vector<std::vector<char>>& terms, char* out, size_t count, int type, int op) {
  switch (type) {
    case 0:
      return reduce_plain<int8_t>(terms, out, count, op);
    case 1:
      return reduce_plain<uint8_t>(terms, out, count, op);
    case 2:
      return reduce_plain<int32_t>(terms, out, count, op);
    case 4:
      return reduce_plain<int64_t>(terms, out, count, op);
    case 6:
      return reduce_as<uint16_t, float>(terms, out, count, op, from_f16, to_f16);
    case 7:
      return reduce_plain<float>(terms, out, count, op);
    case 8:
      return reduce_plain<double>(terms, out, count, op);
    case 9:
      return reduce_as<uint16_t, float>(terms, out, count, op, from_bf16, to_bf16);
    default:
      std::abort();
  }
}

// ---- the double of libcuda -------------------------------------------------------------------------------------

struct Cuda {
  void (*enqueue)(Stream, void (*)(void*), void*);
  int (*capturing)(Stream);
  Cuda() {
    void* library = ::dlopen(CUDA_DOUBLE, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::abort();
    enqueue = reinterpret_cast<decltype(enqueue)>(::dlsym(library, "cuda_double_enqueue"));
    capturing = reinterpret_cast<decltype(capturing)>(::dlsym(library, "cuda_double_capturing"));
  }
};

const Cuda& cuda() {
  static const auto* found = new Cuda();
  return *found;
}

// ---- ops -------------------------------------------------------------------------------------------------------

// A message: how long it is, then that many bytes.
struct Piece {
  int peer;
  char* data;
  uint64_t bytes;
  uint64_t done = 0;  // the 8 bytes of the length included
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Region> region;
  int rank = 0;
  int size = 1;
  std::string name;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{kSuccess};
  std::atomic<int> running{0};  // steps in streams

  // Of the thread that calls.
  bool joined = false;
  bool captured = false;  // graphs hold its steps, so it is never deleted
  bool finalized = false;
  std::vector<std::function<void()>> to_launch;  // at the next question whether all is well
  int questions = 0;
  int splits = 0;
  ncclComm** split_result = nullptr;
};

namespace {

using CommPointer = ncclComm*;

// Moves what there is room for; true once all of it has moved.
bool push(ncclComm& comm, Piece& piece) {
  Mailbox& box = comm.region->shared->mailboxes[comm.rank][piece.peer];
  const uint64_t whole = piece.bytes + 8;
  while (piece.done < whole) {
    const uint64_t written = box.written.load(std::memory_order_relaxed);
    const uint64_t room = kMailboxBytes - (written - box.read.load(std::memory_order_acquire));
    if (room == 0) return false;
    const uint64_t at = written % kMailboxBytes;
    const bool header = piece.done < 8;
    const uint64_t left = header ? 8 - piece.done : whole - piece.done;
    const uint64_t step = std::min({left, room, kMailboxBytes - at});
    const char* from = header ? reinterpret_cast<const char*>(&piece.bytes) + piece.done : piece.data + piece.done - 8;
    std::memcpy(box.bytes + at, from, step);
    box.written.store(written + step, std::memory_order_release);
    piece.done += step;
  }
  return true;
}

bool pull(ncclComm& comm, Piece& piece, uint64_t& length) {
  Mailbox& box = comm.region->shared->mailboxes[piece.peer][comm.rank];
  const uint64_t whole = piece.bytes + 8;
  while (piece.done < whole) {
    const uint64_t read = box.read.load(std::memory_order_relaxed);
    const uint64_t there = box.written.load(std::memory_order_acquire) - read;
    if (there == 0) return false;
    const uint64_t at = read % kMailboxBytes;
    const bool header = piece.done < 8;
    const uint64_t left = header ? 8 - piece.done : whole - piece.done;
    const uint64_t step = std::min({left, there, kMailboxBytes - at});
    char* to = header ? reinterpret_cast<char*>(&length) + piece.done : piece.data + piece.done - 8;
    std::memcpy(to, box.bytes + at, step);
    box.read.store(read + step, std::memory_order_release);
    piece.done += step;
    if (piece.done == 8 && length != piece.bytes) {
      comm.error.store(kInvalidUsage);
      return false;
    }
  }
  return true;
}

// All at once: nothing waits for another of the lists. Between two ranks messages keep their order.
bool exchange(ncclComm& comm, std::vector<Piece> sends, std::vector<Piece> receives) {
  std::vector<uint64_t> lengths(receives.size(), 0);
  std::vector<bool> sent(sends.size(), false), received(receives.size(), false);
  for (int round = 0;; ++round) {
    bool all = true;
    bool blocked[kMaxRanks] = {};
    for (size_t i = 0; i < sends.size(); ++i) {
      if (!sent[i] && !blocked[sends[i].peer]) sent[i] = push(comm, sends[i]);
      if (!sent[i]) all = false, blocked[sends[i].peer] = true;
    }
    std::memset(blocked, 0, sizeof blocked);
    for (size_t i = 0; i < receives.size(); ++i) {
      if (!received[i] && !blocked[receives[i].peer]) received[i] = pull(comm, receives[i], lengths[i]);
      if (!received[i]) all = false, blocked[receives[i].peer] = true;
    }
    if (all) return true;
    if (comm.aborted.load()) return false;
    if (round < 100) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

struct Op {
  enum Kind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kReceive } kind;
  const char* in;
  char* out;
  size_t bytes;  // of one rank's part where ranks have parts
  int type;
  int op;
  int peer;  // root
};

void run_collective(ncclComm& comm, const Op& op) {
  const int size = comm.size;
  std::vector<Piece> sends, receives;
  char* in = const_cast<char*>(op.in);
  if (op.kind == Op::kBroadcast) {
    if (comm.rank == op.peer) {
      for (int r = 0; r < size; ++r)
        if (r != comm.rank) sends.push_back({r, in, op.bytes});
      if (op.out != op.in) std::memmove(op.out, op.in, op.bytes);
    } else {
      receives.push_back({op.peer, op.out, op.bytes});
    }
    exchange(comm, sends, receives);
    return;
  }
  std::vector<std::vector<char>> terms(static_cast<size_t>(size), std::vector<char>(op.bytes));
  for (int r = 0; r < size; ++r) {
    sends.push_back({r, op.kind == Op::kReduceScatter ? in + static_cast<size_t>(r) * op.bytes : in, op.bytes});
    receives.push_back({r, terms[static_cast<size_t>(r)].data(), op.bytes});
  }
  if (!exchange(comm, sends, receives)) return;
  if (op.kind == Op::kAllGather) {
    for (size_t r = 0; r < terms.size(); ++r) std::memcpy(op.out + r * op.bytes, terms[r].data(), op.bytes);
  } else {
    reduce(terms, op.out, op.bytes / size_of(op.type), op.type, op.op);
  }
}

void run(ncclComm& comm, const std::vector<Op>& ops) {
  std::vector<Piece> sends, receives;
  for (const Op& op : ops) {
    if (op.kind == Op::kSend) {
      sends.push_back({op.peer, const_cast<char*>(op.in), op.bytes});
    } else if (op.kind == Op::kReceive) {
      receives.push_back({op.peer, op.out, op.bytes});
    } else if (!comm.aborted.load()) {
      run_collective(comm, op);
    }
  }
  if (!comm.aborted.load()) exchange(comm, sends, receives);
}

struct Step {
  ncclComm* comm;
  std::vector<Op> ops;
  bool captured;  // it may run any number of times
};

void launch(ncclComm* comm, Stream stream, std::vector<Op> ops) {
  auto* step = new Step{comm, std::move(ops), cuda().capturing(stream) != 0};
  if (step->captured) {
    comm->captured = true;
  } else {
    ++comm->running;
  }
  cuda().enqueue(
      stream,
      [](void* argument) {
        auto* one = static_cast<Step*>(argument);
        ncclComm* its = one->comm;
        if (one->captured) ++its->running;
        run(*its, one->ops);
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
    std::vector<Op> ops;
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
    member.comm->to_launch.push_back([member] { launch(member.comm, member.stream, member.ops); });
    member.comm->questions = 2;
  }
  return members.empty() ? kSuccess : kInProgress;
}

int add(ncclComm* comm, Stream stream, Op op) {
  if (comm == nullptr || size_of(op.type) == 0) return kInvalidArgument;
  if (!comm->joined || comm->finalized || !comm->to_launch.empty()) return kInvalidUsage;
  Group& current = group();
  ++current.depth;
  bool found = false;
  for (auto& member : current.members)
    if (member.comm == comm && member.stream == stream) member.ops.push_back(op), found = true;
  if (!found) current.members.push_back({comm, stream, {op}});
  return end_group();
}

ncclComm* new_comm(const std::string& name, int rank, int size) {
  auto* comm = new ncclComm();
  comm->region = std::make_shared<Region>(name);
  comm->name = name;
  comm->rank = rank;
  comm->size = size;
  if (++comm->region->shared->joined == size) comm->region->forget_name();
  ++live_communicators;
  return comm;
}

int progress_split(ncclComm* comm) {
  Split& split = comm->region->shared->splits[comm->splits % kMaxSplits];
  if (split.arrived.load(std::memory_order_acquire) < comm->size) return kInProgress;
  const int color = split.color[comm->rank];
  if (color >= 0) {
    int rank = 0, size = 0;
    for (int r = 0; r < comm->size; ++r) {
      if (split.color[r] != color) continue;
      ++size;
      if (split.key[r] < split.key[comm->rank] || (split.key[r] == split.key[comm->rank] && r < comm->rank)) ++rank;
    }
    *comm->split_result =
        new_comm(comm->name + "_" + std::to_string(comm->splits) + "_" + std::to_string(color), rank, size);
  }
  comm->split_result = nullptr;
  ++comm->splits;
  return kSuccess;
}

void release(ncclComm* comm) {
  while (comm->running.load() > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  comm->region->forget_name();  // in case some rank never came
  --live_communicators;
  if (!comm->captured) delete comm;
}

struct Config {  // what all versions share
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

// From now on every communicator of this process reports that error.
EXPORT void nccl_double_inject(int error) { injected.store(error); }

// From now on nothing that is started gets further than ncclInProgress, as when a connection is not made.
EXPORT void nccl_double_stall_launches(int on) { launches_stalled.store(on != 0); }

EXPORT int nccl_double_live_communicators() { return live_communicators.load(); }

// ---- NCCL's functions ------------------------------------------------------------------------------------------

EXPORT int ncclGetVersion(int* version) {
  *version = number_from("NCCL_DOUBLE_VERSION", 23000);
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

EXPORT int ncclCommSplit(ncclComm* comm, int color, int key, CommPointer* made, const Config* config) {
  if (wrong(config) || !comm->joined) return kInvalidArgument;
  Split& split = comm->region->shared->splits[comm->splits % kMaxSplits];
  split.color[comm->rank] = color;
  split.key[comm->rank] = key;
  comm->split_result = made;
  *made = nullptr;
  split.arrived.fetch_add(1, std::memory_order_acq_rel);
  return kSuccess;  // as NCCL does
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
  } else if (comm->split_result != nullptr) {
    *error = progress_split(comm);
  } else if (!comm->to_launch.empty()) {
    if (--comm->questions > 0) {
      *error = kInProgress;
    } else {
      const auto launches = std::move(comm->to_launch);
      comm->to_launch.clear();
      for (const auto& one : launches) one();
    }
  } else if (comm->finalized && (comm->running.load() > 0 || comm->captured)) {  // graphs are never known to end here
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

EXPORT int ncclCommCount(const ncclComm* comm, int* size) {
  *size = comm->size;
  return kSuccess;
}

EXPORT int ncclCommUserRank(const ncclComm* comm, int* rank) {
  *rank = comm->rank;
  return kSuccess;
}

EXPORT const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kSystemError:
      return "unhandled system error";
    case kInvalidArgument:
      return "invalid argument";
    case kInvalidUsage:
      return "invalid usage";
    case kRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "internal error";
  }
}

EXPORT const char* ncclGetLastError(ncclComm*) { return ""; }

EXPORT int ncclMemAlloc(void** data, size_t bytes) {
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *data ? kSuccess : kSystemError;
}

EXPORT int ncclMemFree(void* data) {
  std::free(data);
  return kSuccess;
}

EXPORT int ncclCommWindowRegister(ncclComm* comm, void* data, size_t, void** window, int flags) {
  if (flags != 1 || reinterpret_cast<uintptr_t>(data) % 4096 != 0) return kInvalidArgument;
  comm->to_launch.push_back([window, data] { *window = data; });
  comm->questions = 2;
  return kSuccess;
}

EXPORT int ncclCommWindowDeregister(ncclComm*, void* window) { return window ? kSuccess : kInvalidArgument; }

EXPORT int ncclGroupStart() {
  ++group().depth;
  return kSuccess;
}

EXPORT int ncclGroupEnd() { return end_group(); }

EXPORT int ncclAllReduce(const void* in, void* out, size_t count, int type, int op, ncclComm* comm, Stream stream) {
  return add(
      comm, stream,
      {Op::kAllReduce, static_cast<const char*>(in), static_cast<char*>(out), count * size_of(type), type, op, 0});
}

EXPORT int ncclReduceScatter(const void* in, void* out, size_t count, int type, int op, ncclComm* comm, Stream stream) {
  return add(
      comm, stream,
      {Op::kReduceScatter, static_cast<const char*>(in), static_cast<char*>(out), count * size_of(type), type, op, 0});
}

EXPORT int ncclAllGather(const void* in, void* out, size_t count, int type, ncclComm* comm, Stream stream) {
  return add(
      comm, stream,
      {Op::kAllGather, static_cast<const char*>(in), static_cast<char*>(out), count * size_of(type), type, 0, 0});
}

EXPORT int ncclBroadcast(const void* in, void* out, size_t count, int type, int root, ncclComm* comm, Stream stream) {
  return add(
      comm, stream,
      {Op::kBroadcast, static_cast<const char*>(in), static_cast<char*>(out), count * size_of(type), type, 0, root});
}

EXPORT int ncclSend(const void* data, size_t count, int type, int peer, ncclComm* comm, Stream stream) {
  return add(comm, stream, {Op::kSend, static_cast<const char*>(data), nullptr, count * size_of(type), type, 0, peer});
}

EXPORT int ncclRecv(void* data, size_t count, int type, int peer, ncclComm* comm, Stream stream) {
  return add(comm, stream, {Op::kReceive, nullptr, static_cast<char*>(data), count * size_of(type), type, 0, peer});
}

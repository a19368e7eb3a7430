// A double of libcuda.so.1 on the CPU: device memory is host memory and streams are threads, so concurrency is that of
// a GPU. The default stream, which CPU tensors use, runs everything immediately on the calling thread.
//
// Graphs are supported as far as tests need them: a capture records the steps, and a replay runs them in that order.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct CUctx_st {
  int device;
};

struct CUstream_st;

namespace {

enum Error {
  kSuccess = 0,
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNotReady = 600,
  kIllegalAddress = 700,
  kCapturedEvent = 907,
};

constexpr int kDevices = 8;

struct Graph {
  std::vector<std::function<void()>> steps;
  std::vector<CUstream_st*> drawn;  // streams that joined the capture by an event
};

// State of one record of an event.
struct Recorded {
  std::atomic<bool> done{false};
  std::shared_ptr<Graph> graph;  // set if recorded in a capture of this graph
};

std::mutex stall_mutex;
std::condition_variable stall_changed;
std::atomic<bool> stalled{false};

template <typename Condition>
void wait_until(Condition&& condition) {
  for (int round = 0; !condition(); ++round)
    round < 100 ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(20));
}

void pass_stall() {
  if (!stalled.load()) return;
  std::unique_lock<std::mutex> lock(stall_mutex);
  stall_changed.wait(lock, [] { return !stalled.load(); });
}

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Recorded> latest;
};

struct CUstream_st {
  CUstream_st() : shared(std::make_shared<Shared>()) {
    // Detached, as a stream that is destroyed with pending work continues until the work has ended.
    std::thread([shared = shared] { run(*shared); }).detach();
  }
  ~CUstream_st() {
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->destroyed = true;
    shared->changed.notify_all();
  }

  void add(std::function<void()> step) {
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->steps.push_back(std::move(step));
    shared->changed.notify_all();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(shared->mutex);
    return shared->steps.empty();
  }

  std::shared_ptr<Graph> capture;  // used only by the capturing thread

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> steps;
    bool destroyed = false;
  };

  static void run(Shared& shared) {
    std::unique_lock<std::mutex> lock(shared.mutex);
    while (true) {
      shared.changed.wait(lock, [&] { return !shared.steps.empty() || shared.destroyed; });
      if (shared.steps.empty()) return;
      const std::function<void()> step = shared.steps.front();
      lock.unlock();
      pass_stall();
      step();
      lock.lock();
      shared.steps.pop_front();  // after the step, because `idle` checks for an empty queue
    }
  }

  std::shared_ptr<Shared> shared;
};

namespace {

using Context = CUctx_st*;
using Stream = CUstream_st*;
using Event = CUevent_st*;
using DeviceAddress = unsigned long long;

bool is_default(Stream stream) { return reinterpret_cast<uintptr_t>(stream) <= 2; }  // also legacy and per-thread ones

void enqueue(Stream stream, std::function<void()> step) {
  if (is_default(stream)) {
    step();
  } else if (stream->capture) {
    stream->capture->steps.push_back(std::move(step));
  } else {
    stream->add(std::move(step));
  }
}

std::vector<Context>& context_stack() {
  thread_local std::vector<Context> stack;
  return stack;
}

Context primary_context(int device) {
  static auto* contexts = new std::map<int, CUctx_st>();
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  return &contexts->emplace(device, CUctx_st{device}).first->second;
}

std::mutex fault_mutex;
auto& faults = *new std::map<std::string, int>();  // error code that a call returns once, by name
std::atomic<bool> any_fault{false};

int fault_of(const char* call) {
  if (!any_fault.load()) return kSuccess;
  std::lock_guard<std::mutex> lock(fault_mutex);
  const auto found = faults.find(call);
  return found == faults.end() ? static_cast<int>(kSuccess) : faults.extract(found).mapped();
}

}  // namespace

// Number of calls that enqueue into a stream; a graph launch counts as one, and captured calls count, too.
std::atomic<long> stream_calls{0};

std::atomic<long> streams_made{0};

#define FAULT(call) \
  if (const int code = fault_of(#call)) return code
#define NEED_CONTEXT \
  if (context_stack().empty()) return kInvalidContext

// ---- knobs of the double ---------------------------------------------------------------------------------------

// Makes all streams begin no further step until it is called with 0.
EXPORT void cuda_double_stall(int on) {
  std::lock_guard<std::mutex> lock(stall_mutex);
  stalled.store(on != 0);
  stall_changed.notify_all();
}

// Makes the call of that name return `code`, once. For cuStreamQuery, cuEventRecord and cuEventQuery.
EXPORT void cuda_double_fail(const char* call, int code) {
  std::lock_guard<std::mutex> lock(fault_mutex);
  faults[call] = code;
  any_fault.store(true);
}

// Number of calls that have enqueued into a stream.
EXPORT long cuda_double_stream_calls() { return stream_calls.load(); }

// Number of streams created by the driver.
EXPORT long cuda_double_streams_made() { return streams_made.load(); }

// Creates a stream for a test; it exists until the process ends.
EXPORT Stream cuda_double_stream() { return new CUstream_st(); }

// Enqueues a step of a test, or of the double of NCCL, into a stream.
EXPORT void cuda_double_enqueue(Stream stream, void (*step)(void*), void* argument) {
  enqueue(stream, [step, argument] { step(argument); });
}

EXPORT int cuda_double_capturing(Stream stream) { return !is_default(stream) && stream->capture != nullptr; }

EXPORT int cuda_double_begin_capture(Stream stream) {
  if (is_default(stream)) return kInvalidValue;
  stream->capture = std::make_shared<Graph>();
  return kSuccess;
}

// Streams that joined the capture by an event must have been joined back, and leave it, too.
EXPORT void* cuda_double_end_capture(Stream stream) {
  auto* graph = new std::shared_ptr<Graph>(stream->capture);
  stream->capture = nullptr;
  for (Stream drawn : (*graph)->drawn) drawn->capture = nullptr;
  return graph;
}

EXPORT void cuda_double_replay(void* graph, Stream stream) {
  enqueue(stream, [steps = *static_cast<std::shared_ptr<Graph>*>(graph)] {
    for (const auto& step : steps->steps) {
      pass_stall();
      step();
    }
  });
}

EXPORT void cuda_double_free_graph(void* graph) { delete static_cast<std::shared_ptr<Graph>*>(graph); }

// ---- the driver's functions ------------------------------------------------------------------------------------

EXPORT int cuInit(unsigned) { return kSuccess; }

EXPORT int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

EXPORT int cuGetErrorName(int error, const char** name) {
  *name = error == kInvalidDevice    ? "CUDA_ERROR_INVALID_DEVICE"
          : error == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                     : "another error";
  return kSuccess;
}

EXPORT int cuGetErrorString(int, const char** text) {
  *text = "said by the double of the driver";
  return kSuccess;
}

EXPORT int cuDeviceGetCount(int* found) {
  *found = kDevices;
  return kSuccess;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 122;  // memory operations of streams
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(Context* context, int device) {
  *context = primary_context(device);
  return kSuccess;
}

EXPORT int cuCtxPushCurrent_v2(Context context) {
  context_stack().push_back(context);
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(Context* context) {
  NEED_CONTEXT;
  *context = context_stack().back();
  context_stack().pop_back();
  return kSuccess;
}

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  NEED_CONTEXT;
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int current = 0;
  std::swap(current, *mode);
  return kSuccess;
}

EXPORT int cuStreamCreateWithPriority(Stream* made, unsigned, int) {
  NEED_CONTEXT;
  ++streams_made;
  *made = new CUstream_st();
  return kSuccess;
}

EXPORT int cuStreamDestroy_v2(Stream stream) {
  delete stream;
  return kSuccess;
}

EXPORT int cuStreamQuery(Stream stream) {
  FAULT(cuStreamQuery);
  return is_default(stream) || stream->idle() ? kSuccess : kNotReady;
}

EXPORT int cuStreamSynchronize(Stream stream) {
  if (!is_default(stream)) wait_until([&] { return stream->idle(); });
  return kSuccess;
}

EXPORT int cuStreamIsCapturing(Stream stream, int* status) {
  *status = cuda_double_capturing(stream);
  return kSuccess;
}

EXPORT int cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  ++stream_calls;
  std::shared_ptr<Recorded> recorded;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    recorded = event->latest;
  }
  if (!recorded) return kSuccess;
  if (recorded->graph) {  // the stream joins the capture, whose steps run one after the other
    if (is_default(stream)) return kInvalidValue;
    stream->capture = recorded->graph;
    recorded->graph->drawn.push_back(stream);
    return kSuccess;
  }
  enqueue(stream, [recorded] { wait_until([&] { return recorded->done.load(std::memory_order_acquire); }); });
  return kSuccess;
}

EXPORT int cuStreamWaitValue64_v2(Stream stream, DeviceAddress address, uint64_t value, unsigned flags) {
  const unsigned kind = flags & 3;
  if (kind > 1) return kInvalidValue;
  enqueue(stream, [address, value, kind] {
    const auto* word = reinterpret_cast<const std::atomic<uint64_t>*>(address);
    wait_until([&] {
      const uint64_t now = word->load();
      return kind == 1 ? now == value : static_cast<int64_t>(now - value) >= 0;
    });
  });
  return kSuccess;
}

struct MemoryOp {  // CUstreamBatchMemOpParams for waits and writes
  unsigned operation;
  DeviceAddress address;
  uint64_t value;
  unsigned flags;
  DeviceAddress alias;
  uint64_t rest;
};

EXPORT int cuStreamBatchMemOp_v2(Stream stream, unsigned count, MemoryOp* ops, unsigned) {
  ++stream_calls;
  constexpr unsigned kWaitValue64 = 4, kWriteValue64 = 5;
  if (count >= 256) return kInvalidValue;  // limit of cuda.h: "Must be less than 256"
  for (unsigned i = 0; i < count; ++i) {
    const MemoryOp op = ops[i];
    if (op.operation == kWaitValue64) {
      if (const int code = cuStreamWaitValue64_v2(stream, op.address, op.value, op.flags)) return code;
    } else if (op.operation == kWriteValue64) {
      enqueue(stream, [op] { reinterpret_cast<std::atomic<uint64_t>*>(op.address)->store(op.value); });
    } else {
      return kInvalidValue;
    }
  }
  return kSuccess;
}

// Captured and executable graphs have the same type.
using GraphHandle = std::shared_ptr<Graph>*;

EXPORT int cuStreamBeginCapture_v2(Stream stream, int) { return cuda_double_begin_capture(stream); }

EXPORT int cuStreamEndCapture(Stream stream, GraphHandle* made) {
  *made = static_cast<GraphHandle>(cuda_double_end_capture(stream));
  return kSuccess;
}

EXPORT int cuGraphInstantiateWithFlags(GraphHandle* made, GraphHandle graph, unsigned long long) {
  *made = new std::shared_ptr<Graph>(*graph);
  return kSuccess;
}

EXPORT int cuGraphDestroy(GraphHandle graph) {
  delete graph;
  return kSuccess;
}

EXPORT int cuGraphExecDestroy(GraphHandle graph) {
  delete graph;
  return kSuccess;
}

EXPORT int cuGraphLaunch(GraphHandle graph, Stream stream) {
  ++stream_calls;
  cuda_double_replay(graph, stream);
  return kSuccess;
}

EXPORT int cuEventCreate(Event* made, unsigned) {
  NEED_CONTEXT;
  *made = new CUevent_st();
  return kSuccess;
}

EXPORT int cuEventDestroy_v2(Event event) {
  delete event;
  return kSuccess;
}

EXPORT int cuEventRecord(Event event, Stream stream) {
  ++stream_calls;
  FAULT(cuEventRecord);
  auto recorded = std::make_shared<Recorded>();
  const bool captured = cuda_double_capturing(stream) != 0;
  if (captured) recorded->graph = stream->capture;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->latest = recorded;
  }
  if (!captured) enqueue(stream, [recorded] { recorded->done.store(true, std::memory_order_release); });
  return kSuccess;
}

EXPORT int cuEventQuery(Event event) {
  FAULT(cuEventQuery);
  std::lock_guard<std::mutex> lock(event->mutex);
  if (event->latest && event->latest->graph) return kCapturedEvent;
  return !event->latest || event->latest->done.load(std::memory_order_acquire) ? kSuccess : kNotReady;
}

EXPORT int cuMemcpyAsync(DeviceAddress to, DeviceAddress from, size_t bytes, Stream stream) {
  ++stream_calls;
  enqueue(stream, [=] { std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  return kSuccess;
}

// The only use of a fill races on purpose with data that a failed op still receives (`poison` in
// csrc/nccl/communicator.cpp): on a GPU one of the two writes wins. So this write is hidden from ThreadSanitizer;
// volatile keeps the loop from becoming a memset, which it intercepts.
__attribute__((no_sanitize("thread"))) static void fill(volatile unsigned char* to, unsigned char byte, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) to[i] = byte;
}

EXPORT int cuMemsetD8Async(DeviceAddress to, unsigned char byte, size_t bytes, Stream stream) {
  ++stream_calls;
  enqueue(stream, [=] { fill(reinterpret_cast<unsigned char*>(to), byte, bytes); });
  return kSuccess;
}

EXPORT int cuMemHostAlloc(void** made, size_t bytes, unsigned) {
  NEED_CONTEXT;
  *made = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *made ? kSuccess : 2;
}

EXPORT int cuMemHostGetDevicePointer_v2(DeviceAddress* address, void* host, unsigned) {
  *address = reinterpret_cast<DeviceAddress>(host);
  return kSuccess;
}

// Like the driver, waits for the device before it frees pinned memory.
EXPORT int cuMemFreeHost(void* host) {
  pass_stall();
  std::free(host);
  return kSuccess;
}

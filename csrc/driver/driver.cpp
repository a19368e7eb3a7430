#include "driver/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "driver/api.h"

namespace fused_tp::driver {

using Clock = std::chrono::steady_clock;

// In methods of Driver: calls a driver function and throws if it fails.
#define FUSED_TP_CALL(name, ...) check(functions_->name(__VA_ARGS__), #name)

template <typename Function>
static void bind(void* library, const std::string& path, const char* symbol, Function& function) {
  void* address = ::dlsym(library, symbol);
  if (address == nullptr)
    throw DriverError(path + " has no " + symbol + ": this CUDA driver is too old; fused_tp needs 12.0 or later", -1);
  function = reinterpret_cast<Function>(address);
}

std::shared_ptr<const Driver> Driver::open(const std::string& path) {
  // Leaked on purpose, and the library is never unloaded: streams and events may outlive static objects.
  static auto* drivers = new std::map<std::string, std::shared_ptr<const Driver>>();
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<const Driver>& driver = (*drivers)[path];
  if (!driver) driver.reset(new Driver(path));
  return driver;
}

Driver::Driver(const std::string& path) : path_(path), fork_count_(count_forks()), functions_(new Functions()) {
  library_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) {
    const char* why = ::dlerror();
    throw DriverError(std::string("the CUDA driver could not be loaded: ") + (why ? why : path.c_str()), -1);
  }
#define FUSED_TP_BIND(name, symbol, parameters) bind(library_, path_, #symbol, functions_->name);
  FUSED_TP_DRIVER_FUNCTIONS(FUSED_TP_BIND)
#undef FUSED_TP_BIND
  int version = 0, devices = 0;
  FUSED_TP_CALL(cuInit, 0);
  FUSED_TP_CALL(cuDriverGetVersion, &version);
  if (version < kMinDriverVersion)
    throw DriverError("the CUDA driver has version " + std::to_string(version / 1000) + "." +
                          std::to_string(version % 1000 / 10) + "; fused_tp needs 12.0 or later",
                      -1);
  FUSED_TP_CALL(cuDeviceGetCount, &devices);
  contexts_.resize(static_cast<size_t>(devices), nullptr);
}

Driver::~Driver() = default;

Driver::ContextGuard::ContextGuard(const Driver& driver, int ordinal) : driver_(driver) {
  driver.check(driver.functions_->cuCtxPushCurrent(driver.primary_context(ordinal)), "cuCtxPushCurrent");
}

Driver::ContextGuard::~ContextGuard() {
  Context context = nullptr;
  driver_.functions_->cuCtxPopCurrent(&context);
}

Context Driver::primary_context(int device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (device < 0 || static_cast<size_t>(device) >= contexts_.size())
    throw DriverError("device " + std::to_string(device) + " does not exist: this process sees " +
                          std::to_string(contexts_.size()) + (contexts_.size() == 1 ? " device" : " devices"),
                      -1);
  Context& context = contexts_[static_cast<size_t>(device)];
  if (context == nullptr) {
    int handle = 0;
    FUSED_TP_CALL(cuDeviceGet, &handle, device);
    FUSED_TP_CALL(cuDevicePrimaryCtxRetain, &context, handle);
  }
  return context;
}

std::string Driver::describe(int code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (functions_->cuGetErrorName(code, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (functions_->cuGetErrorString(code, &text) != kSuccess || text == nullptr) text = "no description";
  return std::string(name) + " (" + std::to_string(code) + "): " + text;
}

void Driver::check(int code, const char* call) const {
  if (code != kSuccess) throw DriverError(std::string(call) + " failed with " + describe(code), code);
}

bool Driver::has_stream_memory_ops(int device) const {
  int handle = 0;
  int value = 0;
  FUSED_TP_CALL(cuDeviceGet, &handle, device);
  FUSED_TP_CALL(cuDeviceGetAttribute, &value, kHasStreamMemoryOps, handle);
  return value != 0;
}

void Driver::record(Event event, Stream stream) const { FUSED_TP_CALL(cuEventRecord, event, stream); }

template <typename Handle>
bool Driver::query_completed(int (*query)(Handle), Handle handle, const char* call) const {
  int mode = kCaptureModeRelaxed;  // in the default mode the query would invalidate a capture in another thread
  FUSED_TP_CALL(cuThreadExchangeStreamCaptureMode, &mode);
  const int code = query(handle);
  functions_->cuThreadExchangeStreamCaptureMode(&mode);  // restore the previous mode
  if (code != kErrorNotReady) check(code, call);
  return code != kErrorNotReady;
}

bool Driver::is_done(Event event) const { return query_completed(functions_->cuEventQuery, event, "cuEventQuery"); }

bool Driver::is_idle(Stream stream) const {
  return query_completed(functions_->cuStreamQuery, stream, "cuStreamQuery");
}

void Driver::wait(Stream stream, Event event) const { FUSED_TP_CALL(cuStreamWaitEvent, stream, event, 0); }

void Driver::copy(DeviceAddress to, DeviceAddress from, size_t bytes, Stream stream) const {
  if (bytes > 0) FUSED_TP_CALL(cuMemcpyAsync, to, from, bytes, stream);
}

void Driver::fill(DeviceAddress to, unsigned char byte, size_t bytes, Stream stream) const {
  if (bytes > 0) FUSED_TP_CALL(cuMemsetD8Async, to, byte, bytes, stream);
}

void Driver::enqueue_memory_ops(Stream stream, const std::vector<MemoryOp>& ops) const {
  BatchMemOp batch[kMaxMemoryOps] = {};
  for (size_t first = 0; first < ops.size(); first += kMaxMemoryOps) {
    const size_t count = std::min<size_t>(kMaxMemoryOps, ops.size() - first);
    for (size_t i = 0; i < count; ++i) {
      const MemoryOp& op = ops[first + i];
      auto& batch_op = batch[i].op;
      batch_op.operation = op.kind == MemoryOp::kWrite ? kWriteValue64 : kWaitValue64;
      batch_op.address = op.word;
      batch_op.value = op.value;
      // 0 is kWaitUntilAtLeast for a wait and the default for a write: a memory barrier at system scope precedes it.
      batch_op.flags = op.kind == MemoryOp::kWait ? kWaitUntilEqual : kWaitUntilAtLeast;
    }
    FUSED_TP_CALL(cuStreamBatchMemOp, stream, static_cast<unsigned>(count), batch, 0);
  }
}

bool Driver::is_capturing(Stream stream) const {
  int status = kCaptureNone;
  FUSED_TP_CALL(cuStreamIsCapturing, stream, &status);
  return status != kCaptureNone;
}

bool Driver::synchronize(Stream stream, double seconds) const {
  // Not cuStreamSynchronize, which has no timeout: the stream may wait for a peer that never arrives.
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  for (auto sleep_time = std::chrono::microseconds(10);;
       sleep_time = std::min(2 * sleep_time, std::chrono::microseconds(1000))) {
    if (is_idle(stream)) return true;
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(sleep_time);
  }
}

void Driver::relax_capture_mode() const {
  int mode = kCaptureModeRelaxed;
  FUSED_TP_CALL(cuThreadExchangeStreamCaptureMode, &mode);
}

template <typename Handle>
OwnedHandle<Handle>::OwnedHandle(std::shared_ptr<const Driver> driver, int device, Destroy Functions::* destroy)
    : driver_(std::move(driver)), device_(device), destroy_(destroy) {}

template <typename Handle>
OwnedHandle<Handle>::~OwnedHandle() {
  if (driver_->is_forked_child() || handle_ == nullptr) return;
  try {
    Driver::ContextGuard guard(*driver_, device_);
    (driver_->functions().*destroy_)(handle_);
  } catch (const DriverError&) {
  }
}

template class OwnedHandle<Stream>;
template class OwnedHandle<Event>;
template class OwnedHandle<GraphExec>;
template class OwnedHandle<void*>;

OwnedStream::OwnedStream(std::shared_ptr<const Driver> driver, int device, Priority priority)
    : OwnedHandle(std::move(driver), device, &Functions::cuStreamDestroy) {
  Driver::ContextGuard guard(*driver_, device_);
  const Functions& functions = driver_->functions();
  int least = 0;
  int greatest = 0;  // numerically lower than `least`
  driver_->check(functions.cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
  int level = least;
  if (priority == Priority::kGreatest) level = greatest;
  if (priority == Priority::kHigh) level = std::min(greatest + 1, least);
  driver_->check(functions.cuStreamCreateWithPriority(&handle_, kStreamNonBlocking, level),
                 "cuStreamCreateWithPriority");
}

OwnedEvent::OwnedEvent(std::shared_ptr<const Driver> driver, int device)
    : OwnedHandle(std::move(driver), device, &Functions::cuEventDestroy) {
  Driver::ContextGuard guard(*driver_, device_);
  driver_->check(driver_->functions().cuEventCreate(&handle_, kEventDisableTiming), "cuEventCreate");
}

PinnedMemory::PinnedMemory(std::shared_ptr<const Driver> driver, int device, size_t bytes)
    : OwnedHandle(std::move(driver), device, &Functions::cuMemFreeHost), bytes_(bytes) {
  Driver::ContextGuard guard(*driver_, device_);
  const Functions& functions = driver_->functions();
  driver_->check(functions.cuMemHostAlloc(&handle_, bytes, kHostPortable | kHostDeviceMap), "cuMemHostAlloc");
  std::memset(handle_, 0, bytes);
  // If this throws, ~OwnedHandle frees the memory.
  driver_->check(functions.cuMemHostGetDevicePointer(&device_address_, handle_, 0), "cuMemHostGetDevicePointer");
}

Graph::Graph(std::shared_ptr<const Driver> driver, int device)
    : OwnedHandle(std::move(driver), device, &Functions::cuGraphExecDestroy) {}

void Graph::begin_capture(Stream stream) const {
  // Relaxed mode: other threads, and this one, may make any CUDA call during the capture.
  driver_->check(driver_->functions().cuStreamBeginCapture(stream, kCaptureModeRelaxed), "cuStreamBeginCapture");
}

void Graph::end_capture(Stream stream, bool must_instantiate) {
  const Functions& functions = driver_->functions();
  GraphHandle graph = nullptr;
  const int end_code = functions.cuStreamEndCapture(stream, &graph);
  const int instantiate_code =
      end_code == kSuccess && must_instantiate ? functions.cuGraphInstantiate(&handle_, graph, 0) : kSuccess;
  if (graph != nullptr) functions.cuGraphDestroy(graph);
  if (!must_instantiate) return;
  driver_->check(end_code, "cuStreamEndCapture");
  driver_->check(instantiate_code, "cuGraphInstantiate");
}

void Graph::launch(Stream stream) const {
  driver_->check(driver_->functions().cuGraphLaunch(handle_, stream), "cuGraphLaunch");
}

struct EventPool::FreeList {
  std::mutex mutex;
  std::vector<std::unique_ptr<const OwnedEvent>> events;
};

EventPool::EventPool(std::shared_ptr<const Driver> driver, int device)
    : driver_(std::move(driver)), device_(device), free_events_(std::make_shared<FreeList>()) {}

SharedEvent EventPool::take() {
  std::unique_ptr<const OwnedEvent> event;
  {
    std::lock_guard<std::mutex> lock(free_events_->mutex);
    if (!free_events_->events.empty()) {
      event = std::move(free_events_->events.back());
      free_events_->events.pop_back();
    }
  }
  if (!event) event = std::make_unique<const OwnedEvent>(driver_, device_);
  // The deleter returns the event to the pool, if the pool still exists. In a forked child it does nothing, because the
  // pool's mutex may be locked by a thread that does not exist there.
  return SharedEvent(event.release(), [free_list = std::weak_ptr<FreeList>(free_events_),
                                       forks = count_forks()](const OwnedEvent* returned_event) {
    if (forks != count_forks()) return;
    std::unique_ptr<const OwnedEvent> owned(returned_event);
    if (const std::shared_ptr<FreeList> pool = free_list.lock()) {
      std::lock_guard<std::mutex> lock(pool->mutex);
      pool->events.push_back(std::move(owned));
    }
  });
}

}  // namespace fused_tp::driver

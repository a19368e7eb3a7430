// Driver: the CUDA driver, loaded at run time. The build needs no CUDA headers, and the module loads without a driver.
//
// Streams and events are driver handles, so those of torch (stream.cuda_stream) can be passed too. Every call is
// checked and throws a DriverError with the name of the call and the driver's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "forks.h"

// The same declarations as in cuda.h, so that a file can include both.
struct CUctx_st;
struct CUevent_st;
struct CUgraphExec_st;
struct CUstream_st;

namespace fused_tp::driver {

using Context = CUctx_st*;
using Event = CUevent_st*;
using GraphExec = CUgraphExec_st*;
using Stream = CUstream_st*;  // null: the default stream
using DeviceAddress = unsigned long long;

struct Functions;

// A stream memory operation on a 64-bit word (cuStreamBatchMemOp).
struct MemoryOp {
  enum Kind : unsigned { kWait, kWaitAtLeast, kWrite };
  Kind kind;
  DeviceAddress word;
  uint64_t value;
};

struct DriverError : std::runtime_error {
  DriverError(const std::string& message, int error_code) : std::runtime_error(message), code(error_code) {}
  int code;  // the CUresult; -1 if no driver call failed
};

class Driver {
 public:
  // Loads the library and initializes the driver. Later calls with the same path return the same object. Throws
  // DriverError if there is no such library or no device, or if the driver is older than CUDA 12.
  static std::shared_ptr<const Driver> open(const std::string& path = "libcuda.so.1");
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Scope in which the device's primary context is current in this thread. torch and NCCL use the primary context too.
  // It stays retained until the process exits.
  class ContextGuard {
   public:
    ContextGuard(const Driver& driver, int ordinal);
    ~ContextGuard();
    ContextGuard(const ContextGuard&) = delete;
    ContextGuard& operator=(const ContextGuard&) = delete;

   private:
    const Driver& driver_;
  };

  // True if the device's streams can write 64-bit words and wait for them.
  bool has_stream_memory_ops(int device) const;
  // Returns the name of an error and the driver's description.
  std::string describe(int code) const;

  // All functions below need a current context (ContextGuard). Only `synchronize` waits for the device.
  void record(Event event, Stream stream) const;
  bool is_done(Event event) const;              // cuEventQuery; true if the event was never recorded
  bool is_idle(Stream stream) const;            // cuStreamQuery
  void wait(Stream stream, Event event) const;  // cuStreamWaitEvent
  void copy(DeviceAddress to, DeviceAddress from, size_t bytes, Stream stream) const;  // the devices may differ
  void fill(DeviceAddress to, unsigned char byte, size_t bytes, Stream stream) const;
  void enqueue_memory_ops(Stream stream,
                          const std::vector<MemoryOp>& ops) const;  // executed in order; one call per kMaxMemoryOps
  void write_value(Stream stream, DeviceAddress word, uint64_t value) const {
    enqueue_memory_ops(stream, {{MemoryOp::kWrite, word, value}});
  }
  bool is_capturing(Stream stream) const;
  // Waits until all work in the stream has completed, for at most `seconds`. Returns true if it has.
  bool synchronize(Stream stream, double seconds) const;

  // Sets this thread's capture mode to relaxed, so that its calls do not invalidate a capture in another thread. For
  // threads of this module only. is_done and is_idle set the mode themselves, since any thread may call them.
  void relax_capture_mode() const;

  const Functions& functions() const { return *functions_; }
  void check(int code, const char* call) const;
  // True if this process is a forked child of the one that opened the driver.
  bool is_forked_child() const { return fork_count_ != count_forks(); }

 private:
  explicit Driver(const std::string& path);
  Context primary_context(int device) const;
  template <typename Handle>
  bool query_completed(int (*query)(Handle), Handle handle, const char* call) const;

  std::string path_;
  uint32_t fork_count_;
  void* library_ = nullptr;
  std::unique_ptr<Functions> functions_;
  mutable std::mutex mutex_;
  mutable std::vector<Context> contexts_;  // by device; null before its first use
};

// Owner of a driver handle. The destructor ignores errors, because at process exit the driver may already have shut
// down and freed the handle. In a forked child it does nothing.
template <typename Handle>
class OwnedHandle {
 public:
  ~OwnedHandle();
  OwnedHandle(const OwnedHandle&) = delete;
  OwnedHandle& operator=(const OwnedHandle&) = delete;
  Handle get() const { return handle_; }
  // Gives up ownership without destroying the handle, for handles that a stuck device may use forever.
  void release() { handle_ = nullptr; }

 protected:
  using Destroy = int (*)(Handle);
  OwnedHandle(std::shared_ptr<const Driver> driver, int device, Destroy Functions::* destroy);

  std::shared_ptr<const Driver> driver_;
  int device_;
  Destroy Functions::* destroy_;
  Handle handle_ = nullptr;
};

// Priority of a CUDA stream.
enum class Priority {
  kLeast,     // default priority of CUDA streams
  kHigh,      // one level below the greatest, if the device has more than two levels
  kGreatest,  // for work that running kernels wait for, because it is scheduled before kernels that wait for free SMs
};

// A non-blocking stream: it does not synchronize with the legacy default stream.
class OwnedStream : public OwnedHandle<Stream> {
 public:
  OwnedStream(std::shared_ptr<const Driver> driver, int device, Priority priority);
};

// An event without timing (kEventDisableTiming).
class OwnedEvent : public OwnedHandle<Event> {
 public:
  OwnedEvent(std::shared_ptr<const Driver> driver, int device);
};

using SharedEvent = std::shared_ptr<const OwnedEvent>;

// Executable CUDA graph of the work that `enqueue_work` enqueues in `stream`, and in streams that it forks from and
// joins to `stream` by events.
class Graph : public OwnedHandle<GraphExec> {
 public:
  template <typename Work>
  Graph(std::shared_ptr<const Driver> driver, int device, Stream stream, Work&& enqueue_work)
      : Graph(std::move(driver), device) {
    const Driver::ContextGuard guard(*driver_, device_);
    begin_capture(stream);
    try {
      enqueue_work();
    } catch (...) {
      end_capture(stream, false);
      throw;
    }
    end_capture(stream, true);
  }
  // Runs the graph once in `stream`. The driver serializes launches of the same graph.
  void launch(Stream stream) const;

 private:
  Graph(std::shared_ptr<const Driver> driver, int device);
  void begin_capture(Stream stream) const;
  void end_capture(Stream stream, bool must_instantiate);
};

// Pool of events of a device. An event returns to the pool when its last owner releases it. It may then be recorded
// again although streams still wait for it: cuStreamWaitEvent waits for the latest record at the time of the call, not
// for later ones. Any thread may take and return events.
class EventPool {
 public:
  EventPool(std::shared_ptr<const Driver> driver, int device);
  SharedEvent take();

 private:
  struct FreeList;
  std::shared_ptr<const Driver> driver_;
  int device_;
  std::shared_ptr<FreeList> free_events_;
};

// Pinned host memory, zeroed, which the device accesses through device_address().
class PinnedMemory : public OwnedHandle<void*> {
 public:
  PinnedMemory(std::shared_ptr<const Driver> driver, int device, size_t bytes);
  void* data() const { return get(); }
  DeviceAddress device_address() const { return device_address_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  DeviceAddress device_address_ = 0;
};

}  // namespace fused_tp::driver

// The CUDA driver, bound at run time: no CUDA header is needed to build, and no driver to load this module.
//
// Streams and events are the driver's own handles, so torch's (tensor.cuda_stream) can be used like ours. Every call is
// checked; an error is thrown as a DriverError that names the call and the driver's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "forks.h"

// As in cuda.h, so that both can be included.
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

// An operation of a stream on a 64-bit word of memory.
struct MemoryOp {
  enum Kind : unsigned { kWait, kWaitAtLeast, kWrite };
  Kind kind;
  DeviceAddress word;
  uint64_t value;
};

struct DriverError : std::runtime_error {
  DriverError(const std::string& sentence, int number) : std::runtime_error(sentence), code(number) {}
  int code;  // a CUresult
};

class Driver {
 public:
  // Loads the library and initialises the driver; the same path returns the same object again. Throws DriverError if
  // there is no such library or no device, or if the driver is older than CUDA 12.
  static std::shared_ptr<const Driver> open(const std::string& path = "libcuda.so.1");
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // During its lifetime this thread's current context is the device's primary one, which torch and NCCL use too.
  // Primary contexts stay retained until the process ends.
  class Device {
   public:
    Device(const Driver& driver, int ordinal);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

   private:
    const Driver& driver_;
  };

  // True if the device's streams can write and wait for 64-bit words.
  bool has_stream_memory_ops(int device) const;
  // The error's name and the driver's description of it.
  std::string describe(int code) const;

  // All functions below need a current context (see Device), and only `synchronize` waits for the device.
  void record(Event event, Stream stream) const;
  bool done(Event event) const;  // everything before the last record has ended; never recorded: true
  bool idle(Stream stream) const;
  void wait(Stream stream, Event event) const;                                         // the stream waits
  void copy(DeviceAddress to, DeviceAddress from, size_t bytes, Stream stream) const;  // also between devices
  void fill(DeviceAddress to, unsigned char byte, size_t bytes, Stream stream) const;
  void memory_ops(Stream stream, const std::vector<MemoryOp>& ops) const;  // in order; in one call, unless very many
  void write_value(Stream stream, DeviceAddress word, uint64_t value) const {
    memory_ops(stream, {{MemoryOp::kWrite, word, value}});
  }
  bool capturing(Stream stream) const;  // into a CUDA graph
  // True once all work of the stream has ended, false if it has not after that many seconds.
  bool synchronize(Stream stream, double seconds) const;

  // Lets this thread make any call while another thread captures a CUDA graph. For our own threads; the queries above
  // do the same for their own calls, which would otherwise end that capture.
  void ignore_captures() const;

  const Functions& functions() const { return *functions_; }
  void check(int code, const char* call) const;
  // True if this process is a forked child of the one that opened the driver.
  bool forked() const { return forks_ != count_forks(); }

 private:
  explicit Driver(const std::string& path);
  Context primary_context(int device) const;
  template <typename Handle>
  bool ready(int (*query)(Handle), Handle handle, const char* call) const;

  std::string path_;
  uint32_t forks_;
  void* library_ = nullptr;
  std::unique_ptr<Functions> functions_;
  mutable std::mutex mutex_;
  mutable std::vector<Context> contexts_;  // by device, null until first used
};

// A driver handle that this object owns. Destruction ignores errors: at process exit the driver may have shut down
// already, and has then freed the handle. A forked child does not destroy it.
template <typename Handle>
class Owned {
 public:
  ~Owned();
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Handle get() const { return handle_; }
  // Gives up the handle without destroying it: the device may use it for ever.
  void leave() { handle_ = nullptr; }

 protected:
  using Destroy = int (*)(Handle);
  Owned(std::shared_ptr<const Driver> driver, int device, Destroy Functions::* destroy);

  std::shared_ptr<const Driver> driver_;
  int device_;
  Destroy Functions::* destroy_;
  Handle handle_ = nullptr;
};

// Priority of a stream's work if several streams have work that is ready.
enum class Priority {
  kLeast,     // the default of streams
  kHigh,      // below the greatest, if the device has a level between
  kGreatest,  // for work that running kernels wait for: it overtakes kernels that find no room
};

// A stream that does not wait for the default stream.
class OwnStream : public Owned<Stream> {
 public:
  OwnStream(std::shared_ptr<const Driver> driver, int device, Priority priority);
};

// An event without timing.
class OwnEvent : public Owned<Event> {
 public:
  OwnEvent(std::shared_ptr<const Driver> driver, int device);
};

using SharedEvent = std::shared_ptr<const OwnEvent>;

// A replayable graph of the work that `give` enqueues in `stream`, and in streams that fork from it and join it again.
class Graph : public Owned<GraphExec> {
 public:
  template <typename Give>
  Graph(std::shared_ptr<const Driver> driver, int device, Stream stream, Give&& give)
      : Graph(std::move(driver), device) {
    const Driver::Device guard(*driver_, device_);
    begin(stream);
    try {
      give();
    } catch (...) {
      end(stream, false);
      throw;
    }
    end(stream, true);
  }
  // Runs it once in `stream`. The driver serializes launches of one graph.
  void launch(Stream stream) const;

 private:
  Graph(std::shared_ptr<const Driver> driver, int device);
  void begin(Stream stream) const;
  void end(Stream stream, bool whole);
};

// Events of a device, reused once they have no owner. A stream's wait for an event is not affected by a later record:
// it is for the last record before it. Any thread may take and return events.
class EventPool {
 public:
  EventPool(std::shared_ptr<const Driver> driver, int device);
  SharedEvent take();

 private:
  struct Free;
  std::shared_ptr<const Driver> driver_;
  int device_;
  std::shared_ptr<Free> free_;
};

// Zeroed host memory that the device reads and writes in place.
class PinnedMemory : public Owned<void*> {
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

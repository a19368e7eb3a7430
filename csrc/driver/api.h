// Declarations of the functions of cuda.h that this module uses, so that it builds without CUDA. A test compares them
// with the real header.
//
// dlsym looks up each function by the exact symbol below. Where cuda.h maps a name to a newer version
// (`#define cuX cuX_v2`), the symbol includes the version: later drivers keep it unchanged. cuGetProcAddress was
// rejected because its result depends on the requested version.
#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.h"

struct CUgraph_st;

namespace fused_tp::driver {

using GraphHandle = CUgraph_st*;

constexpr int kSuccess = 0;
constexpr int kErrorDeinitialized = 4;  // the driver is shutting down with the process
constexpr int kErrorNotReady = 600;

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostPortable = 1;
constexpr unsigned kHostDeviceMap = 2;
constexpr int kCaptureNone = 0;
constexpr int kCaptureModeRelaxed = 2;
constexpr unsigned kWaitUntilAtLeast = 0;
constexpr unsigned kWaitUntilEqual = 1;
constexpr unsigned kWaitValue64 = 4;
constexpr unsigned kWriteValue64 = 5;
constexpr unsigned kMaxMemoryOps = 255;  // per call of cuStreamBatchMemOp, which requires fewer than 256
constexpr int kHasStreamMemoryOps = 122;
constexpr int kMinDriverVersion = 12000;

// CUstreamBatchMemOpParams, reduced to the members for waits and writes. Both have the same layout.
union BatchMemOp {
  struct {
    unsigned operation;
    DeviceAddress address;
    uint64_t value;
    unsigned flags;
    DeviceAddress alias;
  } op;
  uint64_t pad[6];
};

// X(name, symbol, parameters)
#define FUSED_TP_DRIVER_FUNCTIONS(X)                                                                                  \
  X(cuInit, cuInit, (unsigned flags))                                                                                 \
  X(cuDriverGetVersion, cuDriverGetVersion, (int* version))                                                           \
  X(cuGetErrorName, cuGetErrorName, (int error, const char** name))                                                   \
  X(cuGetErrorString, cuGetErrorString, (int error, const char** text))                                               \
  X(cuDeviceGetCount, cuDeviceGetCount, (int* count))                                                                 \
  X(cuDeviceGet, cuDeviceGet, (int* device, int ordinal))                                                             \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute, (int* value, int attribute, int device))                              \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (Context * context, int device))                              \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, (Context context))                                                         \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2, (Context * context))                                                         \
  X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int* least, int* greatest))                            \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (int* mode))                                \
  X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, (Stream * stream, unsigned flags, int priority))          \
  X(cuStreamDestroy, cuStreamDestroy_v2, (Stream stream))                                                             \
  X(cuStreamQuery, cuStreamQuery, (Stream stream))                                                                    \
  X(cuStreamIsCapturing, cuStreamIsCapturing, (Stream stream, int* status))                                           \
  X(cuStreamWaitEvent, cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                               \
  X(cuStreamBatchMemOp, cuStreamBatchMemOp_v2, (Stream stream, unsigned count, BatchMemOp* ops, unsigned flags))      \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (Stream stream, int mode))                                         \
  X(cuStreamEndCapture, cuStreamEndCapture, (Stream stream, GraphHandle * graph))                                     \
  X(cuGraphInstantiate, cuGraphInstantiateWithFlags, (GraphExec * exec, GraphHandle graph, unsigned long long flags)) \
  X(cuGraphDestroy, cuGraphDestroy, (GraphHandle graph))                                                              \
  X(cuGraphLaunch, cuGraphLaunch, (GraphExec graph, Stream stream))                                                   \
  X(cuGraphExecDestroy, cuGraphExecDestroy, (GraphExec graph))                                                        \
  X(cuEventCreate, cuEventCreate, (Event * event, unsigned flags))                                                    \
  X(cuEventDestroy, cuEventDestroy_v2, (Event event))                                                                 \
  X(cuEventRecord, cuEventRecord, (Event event, Stream stream))                                                       \
  X(cuEventQuery, cuEventQuery, (Event event))                                                                        \
  X(cuMemcpyAsync, cuMemcpyAsync, (DeviceAddress to, DeviceAddress from, size_t bytes, Stream stream))                \
  X(cuMemsetD8Async, cuMemsetD8Async, (DeviceAddress to, unsigned char byte, size_t bytes, Stream stream))            \
  X(cuMemHostAlloc, cuMemHostAlloc, (void** memory, size_t bytes, unsigned flags))                                    \
  X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, (DeviceAddress * address, void* host, unsigned flags))   \
  X(cuMemFreeHost, cuMemFreeHost, (void* host))

struct Functions {
#define FUSED_TP_MEMBER(name, symbol, parameters) int(*name) parameters = nullptr;
  FUSED_TP_DRIVER_FUNCTIONS(FUSED_TP_MEMBER)
#undef FUSED_TP_MEMBER
};

}  // namespace fused_tp::driver

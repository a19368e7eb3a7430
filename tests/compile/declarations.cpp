// Compiles only if what csrc/nccl/api.h and csrc/driver/api.h declare is what nccl.h and cuda.h do. Ours are types of
// their own, so functions are compared by what a call looks like to the machine: how many parameters, and of each its
// size and whether it is a pointer (to how large a thing, constant or not), a number, or a struct.
#include <cstddef>
#include <type_traits>

#ifdef WITH_NCCL
#include <nccl.h>

#include "nccl/api.h"
#endif
#ifdef WITH_CUDA
#include <cuda.h>

#include "driver/api.h"
#endif

namespace {

template <typename T>
constexpr bool is_number = std::is_integral_v<T> || std::is_enum_v<T>;

template <typename T>
constexpr size_t size_of() {
  if constexpr (std::is_void_v<T> || std::is_function_v<T>) {
    return 0;
  } else {
    return sizeof(T);
  }
}

template <typename T, typename = void>
struct IsComplete : std::false_type {};
template <typename T>
struct IsComplete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

template <typename Ours, typename Theirs>
constexpr bool alike() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) {
    using To = std::remove_pointer_t<Ours>;
    using ToTheirs = std::remove_pointer_t<Theirs>;
    if constexpr (std::is_const_v<To> != std::is_const_v<ToTheirs>) {
      return false;
    } else if constexpr (IsComplete<To>::value && IsComplete<ToTheirs>::value && std::is_class_v<To>) {
      // A Config is compared member by member, and may be the beginning of theirs.
      return std::is_class_v<ToTheirs> && size_of<To>() <= size_of<ToTheirs>();
    } else {
      return alike<std::remove_cv_t<To>, std::remove_cv_t<ToTheirs>>();
    }
  } else if constexpr (is_number<Ours> && is_number<Theirs>) {
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  } else if constexpr ((std::is_class_v<Ours> && std::is_class_v<Theirs>) ||
                       (std::is_union_v<Ours> && std::is_union_v<Theirs>)) {
    return sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);
  } else {
    return false;
  }
}

template <typename Ours, typename Theirs>
struct Same : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct Same<R (*)(A...), S (*)(B...)> {
  static constexpr bool check() {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return alike<R, S>() && (alike<A, B>() && ...);
    }
  }
  static constexpr bool value = check();
};

}  // namespace

#ifdef WITH_NCCL
#define SAME_FUNCTION(ours, theirs) \
  static_assert(Same<decltype(fused_tp::nccl::Functions::ours), decltype(&theirs)>::value, #theirs)
SAME_FUNCTION(get_version, ncclGetVersion);
SAME_FUNCTION(get_unique_id, ncclGetUniqueId);
SAME_FUNCTION(comm_init_rank_config, ncclCommInitRankConfig);
SAME_FUNCTION(comm_finalize, ncclCommFinalize);
SAME_FUNCTION(comm_destroy, ncclCommDestroy);
SAME_FUNCTION(comm_abort, ncclCommAbort);
SAME_FUNCTION(comm_get_async_error, ncclCommGetAsyncError);
SAME_FUNCTION(get_error_string, ncclGetErrorString);
SAME_FUNCTION(get_last_error, ncclGetLastError);
SAME_FUNCTION(group_start, ncclGroupStart);
SAME_FUNCTION(group_end, ncclGroupEnd);
SAME_FUNCTION(all_gather, ncclAllGather);
SAME_FUNCTION(send, ncclSend);
SAME_FUNCTION(recv, ncclRecv);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
SAME_FUNCTION(comm_revoke, ncclCommRevoke);
#endif
#define SAME_NUMBER(ours, theirs) \
  static_assert(static_cast<long>(fused_tp::nccl::ours) == static_cast<long>(theirs), #theirs)
SAME_NUMBER(Result::kSuccess, ncclSuccess);
SAME_NUMBER(Result::kUnhandledCudaError, ncclUnhandledCudaError);
SAME_NUMBER(Result::kSystemError, ncclSystemError);
SAME_NUMBER(Result::kInternalError, ncclInternalError);
SAME_NUMBER(Result::kInvalidArgument, ncclInvalidArgument);
SAME_NUMBER(Result::kInvalidUsage, ncclInvalidUsage);
SAME_NUMBER(Result::kRemoteError, ncclRemoteError);
SAME_NUMBER(Result::kInProgress, ncclInProgress);
SAME_NUMBER(kInt8, ncclInt8);
SAME_NUMBER(kUndefined, NCCL_CONFIG_UNDEF_INT);
SAME_NUMBER(kMagic, NCCL_API_MAGIC);
static_assert(sizeof(fused_tp::nccl::UniqueId) == sizeof(ncclUniqueId));

#define SAME_MEMBER(ours, theirs)                                                           \
  static_assert(offsetof(fused_tp::nccl::Config, ours) == offsetof(ncclConfig_t, theirs) && \
                    sizeof(fused_tp::nccl::Config::ours) == sizeof(ncclConfig_t::theirs),   \
                #theirs)
SAME_MEMBER(size, size);
SAME_MEMBER(magic, magic);
SAME_MEMBER(version, version);
SAME_MEMBER(blocking, blocking);
SAME_MEMBER(cga_cluster_size, cgaClusterSize);
SAME_MEMBER(min_ctas, minCTAs);
SAME_MEMBER(max_ctas, maxCTAs);
SAME_MEMBER(net_name, netName);
SAME_MEMBER(split_share, splitShare);
#endif

#ifdef WITH_CUDA
#undef SAME_NUMBER
#define TEXT(word) #word
#define EXPANDED(word) TEXT(word)
constexpr bool equal(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}
// cuda.h defines a plain name as the version of the function that it declares: that is the symbol to look up.
#define SAME_FUNCTION_OF_DRIVER(name, symbol, parameters)                                            \
  static_assert(Same<decltype(fused_tp::driver::Functions::name), decltype(&::name)>::value, #name); \
  static_assert(equal(EXPANDED(name), #symbol), #symbol);
FUSED_TP_DRIVER_FUNCTIONS(SAME_FUNCTION_OF_DRIVER)

#define SAME_NUMBER(ours, theirs) \
  static_assert(static_cast<long>(fused_tp::driver::ours) == static_cast<long>(theirs), #theirs)
SAME_NUMBER(kSuccess, CUDA_SUCCESS);
SAME_NUMBER(kErrorDeinitialized, CUDA_ERROR_DEINITIALIZED);
SAME_NUMBER(kErrorNotReady, CUDA_ERROR_NOT_READY);
SAME_NUMBER(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME_NUMBER(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME_NUMBER(kHostPortable, CU_MEMHOSTALLOC_PORTABLE);
SAME_NUMBER(kHostDeviceMap, CU_MEMHOSTALLOC_DEVICEMAP);
SAME_NUMBER(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
SAME_NUMBER(kCaptureModeRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME_NUMBER(kHasStreamMemoryOps, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
SAME_NUMBER(kWaitUntilAtLeast, CU_STREAM_WAIT_VALUE_GEQ);
SAME_NUMBER(kWaitUntilEqual, CU_STREAM_WAIT_VALUE_EQ);
SAME_NUMBER(kWaitValue64, CU_STREAM_MEM_OP_WAIT_VALUE_64);
SAME_NUMBER(kWriteValue64, CU_STREAM_MEM_OP_WRITE_VALUE_64);
static_assert(CU_STREAM_WRITE_VALUE_DEFAULT == 0);

#define SAME_PLACE(ours, theirs)                                                                                 \
  static_assert(offsetof(fused_tp::driver::BatchMemOp, op.ours) == offsetof(CUstreamBatchMemOpParams, theirs) && \
                    sizeof(fused_tp::driver::BatchMemOp::op.ours) == sizeof(CUstreamBatchMemOpParams::theirs),   \
                #theirs)
SAME_PLACE(operation, waitValue.operation);
SAME_PLACE(address, waitValue.address);
SAME_PLACE(value, waitValue.value64);
SAME_PLACE(flags, waitValue.flags);
SAME_PLACE(operation, writeValue.operation);
SAME_PLACE(address, writeValue.address);
SAME_PLACE(value, writeValue.value64);
SAME_PLACE(flags, writeValue.flags);
#endif

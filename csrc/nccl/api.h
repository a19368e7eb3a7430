// Declarations of the functions of nccl.h that this module uses, so that it builds without NCCL. A test compares them
// with the real header.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct ncclComm;  // the same declaration as in nccl.h, so that a file can include both

namespace fused_tp::nccl {

using Comm = ncclComm*;

struct UniqueId {
  char internal[128];
};

enum class Result : int32_t {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

constexpr int32_t kInt8 = 0;  // ncclInt8

constexpr int kUndefined = INT_MIN;      // NCCL_CONFIG_UNDEF_INT
constexpr unsigned kMagic = 0xcafebeef;  // NCCL_API_MAGIC

// The first members of ncclConfig_t, those of the oldest supported version. Later versions of NCCL add members at the
// end; they read only the first `size` bytes and interpret them by `version`, so all versions accept this struct.
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;  // the last member in NCCL 2.19
};

// X(name, symbol, result, parameters)
#define FUSED_TP_NCCL_FUNCTIONS(X)                                                                        \
  X(get_version, ncclGetVersion, Result, (int* version))                                                  \
  X(get_unique_id, ncclGetUniqueId, Result, (UniqueId * id))                                              \
  X(comm_init_rank_config, ncclCommInitRankConfig, Result,                                                \
    (Comm * comm, int ranks, UniqueId id, int rank, Config* config))                                      \
  X(comm_finalize, ncclCommFinalize, Result, (Comm comm))                                                 \
  X(comm_destroy, ncclCommDestroy, Result, (Comm comm))                                                   \
  X(comm_abort, ncclCommAbort, Result, (Comm comm))                                                       \
  X(comm_get_async_error, ncclCommGetAsyncError, Result, (Comm comm, Result * error))                     \
  X(get_error_string, ncclGetErrorString, const char*, (Result result))                                   \
  X(get_last_error, ncclGetLastError, const char*, (Comm comm))                                           \
  X(group_start, ncclGroupStart, Result, ())                                                              \
  X(group_end, ncclGroupEnd, Result, ())                                                                  \
  X(all_gather, ncclAllGather, Result,                                                                    \
    (const void* in, void* out, size_t count, int32_t type, Comm comm, CUstream_st* stream))              \
  X(send, ncclSend, Result, (const void* data, size_t count, int32_t type, int peer, Comm, CUstream_st*)) \
  X(recv, ncclRecv, Result, (void* data, size_t count, int32_t type, int peer, Comm, CUstream_st*))

struct Functions {
#define FUSED_TP_MEMBER(name, symbol, result, parameters) result(*name) parameters = nullptr;
  FUSED_TP_NCCL_FUNCTIONS(FUSED_TP_MEMBER)
#undef FUSED_TP_MEMBER
  Result (*comm_revoke)(Comm comm, int flags) = nullptr;  // null before NCCL 2.29
};

}  // namespace fused_tp::nccl

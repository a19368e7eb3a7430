// What we use of nccl.h, declared by us: no NCCL is needed to build. A test compares it with the real header.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

struct CUstream_st;
struct ncclComm;  // as in nccl.h, so that both can be included
struct ncclWindow_vidmem;

namespace fused_tp::nccl {

using Comm = ncclComm*;
using Window = ncclWindow_vidmem*;

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

enum class RedOp : int32_t { kSum = 0, kMax = 2, kMin = 3 };

enum class DataType : int32_t {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kInt64 = 4,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

constexpr int kUndefined = INT_MIN;        // NCCL_CONFIG_UNDEF_INT
constexpr unsigned kMagic = 0xcafebeef;    // NCCL_API_MAGIC
constexpr int kSplitNoColor = -1;          // NCCL_SPLIT_NOCOLOR
constexpr int kWindowSymmetric = 0x01;     // NCCL_WIN_COLL_SYMMETRIC
constexpr int kCtaPolicyZero = 0x02;       // NCCL_CTA_POLICY_ZERO
constexpr size_t kWindowAlignment = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT

// ncclConfig_t grows at its end. A library takes the first `size` bytes of it and goes by `version` for what they hold,
// so each is given the part that the oldest library of its kind knows (config_for).
struct Config {
  size_t size;
  unsigned magic;
  unsigned version;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;  // the last in 2.19
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;  // the last in 2.27
};

Config config_for(int library_version);

struct Functions {
  Result (*get_version)(int* version);
  Result (*get_unique_id)(UniqueId* id);
  Result (*comm_init_rank_config)(Comm* comm, int ranks, UniqueId id, int rank, Config* config);
  Result (*comm_split)(Comm comm, int color, int key, Comm* made, Config* config);
  Result (*comm_finalize)(Comm comm);
  Result (*comm_destroy)(Comm comm);
  Result (*comm_abort)(Comm comm);
  Result (*comm_count)(Comm comm, int* count);
  Result (*comm_user_rank)(Comm comm, int* rank);
  Result (*comm_get_async_error)(Comm comm, Result* error);
  const char* (*get_error_string)(Result result);
  const char* (*get_last_error)(Comm comm);
  Result (*mem_alloc)(void** data, size_t bytes);
  Result (*mem_free)(void* data);
  Result (*group_start)();
  Result (*group_end)();
  Result (*all_reduce)(const void* in, void* out, size_t count, DataType, RedOp, Comm, CUstream_st*);
  Result (*reduce_scatter)(const void* in, void* out, size_t count, DataType, RedOp, Comm, CUstream_st*);
  Result (*all_gather)(const void* in, void* out, size_t count, DataType, Comm, CUstream_st*);
  Result (*broadcast)(const void* in, void* out, size_t count, DataType, int root, Comm, CUstream_st*);
  Result (*send)(const void* data, size_t count, DataType, int peer, Comm, CUstream_st*);
  Result (*recv)(void* data, size_t count, DataType, int peer, Comm, CUstream_st*);
  // Null in libraries that lack them.
  Result (*comm_revoke)(Comm comm, int flags);                                                   // 2.29
  Result (*comm_window_register)(Comm comm, void* data, size_t bytes, Window* made, int flags);  // 2.27
  Result (*comm_window_deregister)(Comm comm, Window window);
};

}  // namespace fused_tp::nccl

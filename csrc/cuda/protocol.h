// Layout of the words shared by the kernels of all ranks and the host. triton_kernels/comm/signals.py has the same
// numbers and defines the protocol: CUDA and Triton kernels use the same workspaces.
#pragma once

#include <cstdint>

namespace fused_tp::cuda {

// int64 words of a workspace's state, in this rank's private memory.
constexpr int kEpoch = 0;          // number of calls that have ended; negative once this rank has given up
constexpr int kEndedPrograms = 1;  // number of blocks of the current call that have ended
constexpr int kExpired = 3;  // call number of the wait that timed out; 0: none; -1: the host has aborted this rank
constexpr int kUnreachableRanks = 4;  // bit s: set by the host if rank s will not arrive; waits for it then end at once

// int64 words of the error record. The host may read them once the word kErrorSet is not 0.
constexpr int kErrorSet = 0;
constexpr int kErrorOp = 1;
constexpr int kErrorCall = 2;
constexpr int kErrorRank = 3;
constexpr int kErrorTile = 4;    // tile (here: block) of the wait; -1: the wait for the call to begin
constexpr int kErrorSource = 5;  // rank for which the kernel waited
constexpr int kErrorAbsent = 6;  // bit s: set if rank s has not begun the call
constexpr int kErrorGaveUp = 7;  // 1: the source rank has given up

// Number of an op in the error record.
enum class Op : int32_t {
  kBarrier = 0,
  kAllReduce = 4,
  kReduceScatter = 5,
  kAllGather = 6,
  kAllToAll = 7,
  kAllReduceRmsNorm = 8,
};

constexpr int kMaxWorldSize = 63;        // kErrorAbsent has one bit per rank in a signed word
constexpr int64_t kDataAlignment = 128;  // alignment of slots, in bytes
constexpr int64_t kFlagShare = 64;       // each half of a workspace starts with 1 / kFlagShare of its bytes for flags

}  // namespace fused_tp::cuda

// Layout of the words shared by the kernels of all ranks and the host. triton_kernels/comm/signals.py has the same
// numbers and defines the protocol: CUDA and Triton kernels use the same workspaces.
#pragma once

#include <cstdint>

namespace fused_tp::cuda {

// Words of a workspace's state, int64, in this rank's private memory.
constexpr int kEpoch = 0;    // calls ended; negative once this rank has given up
constexpr int kEnded = 1;    // blocks of this call that have ended
constexpr int kExpired = 3;  // number of the call whose wait timed out; 0: none; -1: the host has aborted this rank
constexpr int kStop = 4;     // bit s: the host knows that rank s will not arrive, so waits for it end at once

// Words of the error record, int64. The host may read them once the first is not 0.
constexpr int kErrorSet = 0;
constexpr int kErrorOp = 1;
constexpr int kErrorCall = 2;
constexpr int kErrorRank = 3;
constexpr int kErrorTile = 4;    // -1: the wait was for the call to begin, not for a tile
constexpr int kErrorSource = 5;  // the rank that was waited for
constexpr int kErrorAbsent = 6;  // bit s: rank s has not begun the call
constexpr int kErrorGaveUp = 7;  // 1: the source has given up itself

// Ops by their number in an error record.
enum class Op : int32_t {
  kBarrier = 0,
  kAllReduce = 4,
  kReduceScatter = 5,
  kAllGather = 6,
  kAllToAll = 7,
  kAllReduceRmsNorm = 8,
};

constexpr int kMaxWorldSize = 63;        // one bit each in a word of the error record
constexpr int64_t kDataAlignment = 128;  // data begins at a multiple of it
constexpr int64_t kFlagShare = 64;       // the front of a half, one part in kFlagShare, is reserved for flags

}  // namespace fused_tp::cuda

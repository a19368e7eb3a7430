// begin, put, wait and end of a call; the protocol of triton_kernels/comm/signals.py, where each is explained, in CUDA
// C++.
//
// A block is a program. What orders what:
//
//   put    all threads of a block store; __syncthreads; one thread for each peer does st.release.sys on its flag there.
//          The barrier orders the stores before the release, which is cumulative: who sees the flag sees all of them.
//   wait   one thread for each peer polls a flag in its own memory with ld.acquire.sys; __syncthreads_and: no thread's
//          loads run ahead of any of the polls, and all threads leave with one verdict, so they part nowhere.
//   begin  Call e+1 of a rank begins after its call e has ended (one stream for a workspace), and block 0 ends a call
//   end    only when all ranks have begun it. So a rank that begins call e+2 knows that every rank has ended call e,
//   reads
//          and all, and may write that half of the workspace again. It holds for blocks that had no work in either
//          call, and for calls of different numbers of blocks, since it is about kernels, which end as a whole.
//
// Flags only grow, but for those of ranks that have given up, so one that a call of other shape has left in its place
// is smaller than this call's number, and is taken for not set.
//
// Blocks wait only for those of the same number, and not for their own rank's: they may run all at once, or in order.
#pragma once

#include "memory.cuh"
#include "plan.h"
#include "protocol.h"

namespace fused_tp::cuda {

// Threads of a block. Those of a warp exchange values without a barrier.
#ifdef __CUDACC__
constexpr int kThreads = 512;
constexpr int kWarpSize = 32;
#else
constexpr int kThreads = 16;  // each of them costs a switch at each barrier
constexpr int kWarpSize = 1;
#endif

constexpr int kPollsPerClock = 32;
constexpr int kBeginning = -1;  // in the place of a block's number: the wait is for the call to begin

// One call as its kernel sees it; made by `begin`.
struct Call {
  const Workspace& workspace;
  Op op;
  int64_t epoch;  // number of this call; negative if this rank has given up in an earlier one

  // Whether this rank may touch its peers, and its results will mean anything.
  __device__ bool alive() const { return epoch > 0; }
  __device__ int rank() const { return workspace.rank; }
  __device__ int world() const { return workspace.world; }
};

// The half of a rank's workspace that this call uses.
__device__ __forceinline__ char* half_at(const Call& call, int rank) {
  return reinterpret_cast<char*>(call.workspace.addresses[rank]) + (call.epoch & 1) * call.workspace.half_bytes;
}

__device__ __forceinline__ int64_t* flag_at(const Call& call, int rank, int64_t index) {
  return reinterpret_cast<int64_t*>(half_at(call, rank)) + index;
}

// Where slots begin.
__device__ __forceinline__ char* data_at(const Call& call, int rank) {
  return half_at(call, rank) + flag_bytes(call.workspace.half_bytes);
}

// Starts the call on this rank and tells all ranks so; every thread does this first.
__device__ __forceinline__ Call begin(const Workspace& workspace, Op op) {
  const int64_t ended = load_relaxed_system(workspace.state + kEpoch);
  const int64_t epoch = (ended < 0 ? -ended : ended) + 1;
  const int64_t expired = load_relaxed_system(workspace.state + kExpired);
  // A wait of this very call may expire before its last thread begins: all threads must decide the same.
  Call call{workspace, op, expired != 0 && expired < epoch ? -epoch : epoch};
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int peer = threadIdx.x; peer < workspace.world; peer += kThreads) {
      store_release_system(flag_at(call, peer, workspace.rank), call.epoch);
    }
  }
  return call;
}

// Release: what this block has stored is visible to its namesakes at the peers once they have waited for this phase.
// `good` false says that it was made of something that did not arrive.
__device__ __forceinline__ void put(const Call& call, const Plan& plan, int phase, bool good) {
  const int64_t value = good ? call.epoch : -call.epoch;
  __syncthreads();
#pragma unroll 1
  for (int peer = threadIdx.x; peer < call.world(); peer += kThreads) {
    if (peer == call.rank()) continue;
    store_release_system(flag_at(call, peer, plan.flag(phase, blockIdx.x, call.rank())), value);
  }
}

// Whether a wait has expired already, or the host has ended those for `source`.
__device__ __forceinline__ bool hopeless(const Call& call, int source) {
  return load_relaxed_system(call.workspace.state + kExpired) != 0 ||
         (load_relaxed_system(call.workspace.state + kStop) >> source & 1) != 0;
}

// What a flag of this rank holds once it is set or the deadline has passed; negative if `source` has given up.
__device__ __forceinline__ int64_t poll(const Call& call, const int64_t* flag, int source, int64_t seen) {
  const int64_t start = now_ns();
  bool waiting = seen >= 0 && !hopeless(call, source);
  for (int polls = 1; waiting; ++polls) {
    pause();
    seen = load_acquire_system(flag);
    waiting = seen < call.epoch && seen >= 0;
    if (!waiting || polls % kPollsPerClock != 0) continue;
    if (load_acquire_system(flag_at(call, call.rank(), source)) < 0) {
      // It has given up. What it did before, in this call too, can be seen by now.
      seen = load_acquire_system(flag);
      if (seen < call.epoch) seen = -call.epoch;
      waiting = false;
    } else {
      waiting = now_ns() - start < call.workspace.timeout_ns && !hopeless(call, source);
    }
  }
  return seen;
}

// Writes the error record, unless there is one: the first wait to expire is the one to tell of.
__device__ __forceinline__ void record(const Call& call, int source, int block, bool gave_up) {
  const Workspace& workspace = call.workspace;
  if (compare_and_swap_gpu(workspace.state + kExpired, 0, call.epoch) != 0) return;
  int64_t absent = 0;
#pragma unroll 1
  for (int peer = 0; peer < workspace.world; ++peer) {
    const int64_t begun = load_acquire_system(flag_at(call, workspace.rank, peer));
    if (begun >= 0 && begun < call.epoch) absent |= int64_t{1} << peer;
  }
  int64_t* error = workspace.error;
  store_relaxed_system(error + kErrorOp, static_cast<int64_t>(call.op));
  store_relaxed_system(error + kErrorCall, call.epoch);
  store_relaxed_system(error + kErrorRank, workspace.rank);
  store_relaxed_system(error + kErrorTile, block);
  store_relaxed_system(error + kErrorSource, source);
  store_relaxed_system(error + kErrorAbsent, absent);
  store_relaxed_system(error + kErrorGaveUp, gave_up ? 1 : 0);
  // A store, not an atomic: not every host takes those of a GPU in its own memory.
  store_release_system(error + kErrorSet, 1);
}

// One thread's part of a wait: acquire; whether the flag came.
__device__ __forceinline__ bool arrived(const Call& call, int64_t index, int source, int block) {
  const int64_t* flag = flag_at(call, call.rank(), index);
  int64_t seen = load_acquire_system(flag);
  if (seen < call.epoch) {
    seen = poll(call, flag, source, seen);
    if (seen < call.epoch) record(call, source, block, seen < 0);
  }
  return seen >= call.epoch;
}

// Acquire: true once this block's namesakes at all peers have put this phase; false when some will not, which is then
// on record. The same for all threads.
__device__ __forceinline__ bool wait(const Call& call, const Plan& plan, int phase) {
  bool good = call.alive();
#pragma unroll 1
  for (int source = threadIdx.x; source < call.world(); source += kThreads) {
    if (source != call.rank()) good &= arrived(call, plan.flag(phase, blockIdx.x, source), source, blockIdx.x);
  }
  return __syncthreads_and(good) != 0;
}

// Ends the call on this rank, once all ranks have begun it; every thread does this last.
__device__ __forceinline__ void end(const Call& call) {
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int source = threadIdx.x; source < call.world(); source += kThreads) {
      if (source != call.rank()) arrived(call, source, source, kBeginning);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && add_acquire_release_gpu(call.workspace.state + kEnded, 1) == gridDim.x - 1) {
    store_relaxed_system(call.workspace.state + kEnded, 0);
    store_relaxed_system(call.workspace.state + kEpoch, call.epoch);
  }
}

}  // namespace fused_tp::cuda

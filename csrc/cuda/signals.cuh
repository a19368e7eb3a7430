// begin, put, wait and end of a call: the protocol of triton_kernels/comm/signals.py, which explains them, in CUDA C++.
//
// A block is a program. Memory order:
//
//   put    all threads of a block store; __syncthreads; one thread per peer does st.release.sys on its flag there. The
//          barrier orders the stores before the release, which is cumulative: a reader of the flag sees all of them.
//   wait   one thread per peer polls a flag in its own memory with ld.acquire.sys; __syncthreads_and: no thread's loads
//          run ahead of any of the polls, and all threads get the same result, so they cannot diverge.
//   begin  Call e+1 of a rank begins after its call e has ended (one stream per workspace), and block 0 ends a call
//   end    only when all ranks have begun it. So a rank that begins call e+2 knows that every rank has ended call e,
//          including its reads, and may write that half of the workspace again. This holds for blocks without work in
//          either call, and for calls with different numbers of blocks, since kernels end as a whole.
//
// Flags only grow, except those of ranks that have given up. So a flag that a call of another shape has left at the
// same address is smaller than this call's number, and counts as not set.
//
// Blocks wait only for blocks of the same number on other ranks: they may run all at once, or in order.
#pragma once

#include "memory.cuh"
#include "plan.h"
#include "protocol.h"

namespace fused_tp::cuda {

// Threads of a block. Threads of a warp exchange values without a barrier.
#ifdef __CUDACC__
constexpr int kThreads = 512;
constexpr int kWarpSize = 32;
#else
constexpr int kThreads = 16;  // each of them costs a switch at each barrier
constexpr int kWarpSize = 1;
#endif

constexpr int kPollsPerClock = 32;
constexpr int kBeginning = -1;  // instead of a block's number: the wait is for the call to begin

// One call in a kernel; made by `begin`.
struct Call {
  const Workspace& workspace;
  Op op;
  int64_t epoch;  // number of this call; negative if this rank gave up in an earlier call

  // True if this rank may write to its peers, and its results are valid.
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

// Address of the first slot.
__device__ __forceinline__ char* data_at(const Call& call, int rank) {
  return half_at(call, rank) + flag_bytes(call.workspace.half_bytes);
}

// Begins the call on this rank and notifies all ranks; every thread does this first.
__device__ __forceinline__ Call begin(const Workspace& workspace, Op op) {
  const int64_t ended = load_relaxed_system(workspace.state + kEpoch);
  const int64_t epoch = (ended < 0 ? -ended : ended) + 1;
  const int64_t expired = load_relaxed_system(workspace.state + kExpired);
  // A wait of this call may expire before its last thread begins, and all threads must decide the same.
  Call call{workspace, op, expired != 0 && expired < epoch ? -epoch : epoch};
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int peer = threadIdx.x; peer < workspace.world; peer += kThreads) {
      store_release_system(flag_at(call, peer, workspace.rank), call.epoch);
    }
  }
  return call;
}

// Release: this block's earlier stores are visible to the same block of the peers once it has waited for this phase.
// `good` false: the stores are invalid, because some of their input did not arrive.
__device__ __forceinline__ void put(const Call& call, const Plan& plan, int phase, bool good) {
  const int64_t value = good ? call.epoch : -call.epoch;
  __syncthreads();
#pragma unroll 1
  for (int peer = threadIdx.x; peer < call.world(); peer += kThreads) {
    if (peer == call.rank()) continue;
    store_release_system(flag_at(call, peer, plan.flag(phase, blockIdx.x, call.rank())), value);
  }
}

// True if a wait has expired already, or the host has ended the waits for `source`.
__device__ __forceinline__ bool hopeless(const Call& call, int source) {
  return load_relaxed_system(call.workspace.state + kExpired) != 0 ||
         (load_relaxed_system(call.workspace.state + kStop) >> source & 1) != 0;
}

// Value of a flag of this rank once it is set or the deadline has passed; negative if `source` has given up.
__device__ __forceinline__ int64_t poll(const Call& call, const int64_t* flag, int source, int64_t seen) {
  const int64_t start = now_ns();
  bool waiting = seen >= 0 && !hopeless(call, source);
  for (int polls = 1; waiting; ++polls) {
    pause();
    seen = load_acquire_system(flag);
    waiting = seen < call.epoch && seen >= 0;
    if (!waiting || polls % kPollsPerClock != 0) continue;
    if (load_acquire_system(flag_at(call, call.rank(), source)) < 0) {
      // `source` has given up. All that it put before, in this call too, is visible by now.
      seen = load_acquire_system(flag);
      if (seen < call.epoch) seen = -call.epoch;
      waiting = false;
    } else {
      waiting = now_ns() - start < call.workspace.timeout_ns && !hopeless(call, source);
    }
  }
  return seen;
}

// Writes the error record unless there is one: only the first wait to expire is reported.
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
  // A store, not an atomic: not every host supports GPU atomics on its memory.
  store_release_system(error + kErrorSet, 1);
}

// One thread's part of a wait: acquire; true if the flag arrived.
__device__ __forceinline__ bool arrived(const Call& call, int64_t index, int source, int block) {
  const int64_t* flag = flag_at(call, call.rank(), index);
  int64_t seen = load_acquire_system(flag);
  if (seen < call.epoch) {
    seen = poll(call, flag, source, seen);
    if (seen < call.epoch) record(call, source, block, seen < 0);
  }
  return seen >= call.epoch;
}

// Acquire: true once the same block of all peers has put this phase; false, with an error record, if one of them will
// not. The same for all threads.
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

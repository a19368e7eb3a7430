// begin, put, wait and end of a call: the protocol of triton_kernels/comm/signals.py in CUDA C++. A block here
// corresponds to a program of Triton. Memory order:
//
//   put    All threads of a block store data; __syncthreads; one thread per peer stores the flag with st.release.sys.
//          The barrier orders the data before the release, and releases are cumulative, so a reader of the flag sees
//          all data.
//   wait   One thread per peer polls the flag in its own memory with ld.acquire.sys; then __syncthreads_and. So no
//          thread loads data before all flags have arrived, and all threads get the same result and do not diverge.
//   begin, end
//          Call e+1 of a rank begins after its call e has ended (one stream per workspace), and block 0 ends a call
//          only after all ranks have begun it. So when a rank begins call e+2, every rank has ended call e with all its
//          reads, and this rank may overwrite that half of the workspace. This also holds for blocks without work and
//          for calls with different numbers of blocks, because a kernel ends as a whole.
//
// Flags only grow, except those of ranks that have given up. A flag that a call of another shape has left at the same
// address is smaller than this call's number, so it counts as not set.
//
// A block waits only for the block of the same index on other ranks, so blocks may run concurrently or in order.
#pragma once

#include "memory.cuh"
#include "plan.h"
#include "protocol.h"

namespace fused_tp::cuda {

// Threads per block and per warp. On a CPU a warp is one thread, since nothing emulates warp shuffles.
#ifdef __CUDACC__
constexpr int kThreads = 512;
constexpr int kWarpSize = 32;
#else
constexpr int kThreads = 16;  // few, because the CPU emulator switches between all of them at every barrier
constexpr int kWarpSize = 1;
#endif

constexpr int kPollsPerClock = 32;
constexpr int kBeginTile = -1;  // kErrorTile for the wait for peers to begin the call

// The current call; `begin` creates it.
struct Call {
  const Workspace& workspace;
  Op op;
  int64_t epoch;  // number of this call; negative if this rank has given up in an earlier call

  // True if this rank has not given up: it may write to its peers, and its results are valid.
  __device__ bool is_alive() const { return epoch > 0; }
  __device__ int rank() const { return workspace.rank; }
  __device__ int world() const { return workspace.world; }
};

// Returns the half of a rank's workspace that this call uses.
__device__ __forceinline__ char* half_at(const Call& call, int rank) {
  return reinterpret_cast<char*>(call.workspace.addresses[rank]) + (call.epoch & 1) * call.workspace.half_bytes;
}

__device__ __forceinline__ int64_t* flag_at(const Call& call, int rank, int64_t index) {
  return reinterpret_cast<int64_t*>(half_at(call, rank)) + index;
}

// Returns the address of a rank's first slot.
__device__ __forceinline__ char* data_at(const Call& call, int rank) {
  return half_at(call, rank) + flag_bytes(call.workspace.half_bytes);
}

// Begins the call on this rank and notifies all ranks. Every thread of the kernel calls it first.
__device__ __forceinline__ Call begin(const Workspace& workspace, Op op) {
  const int64_t ended = load_relaxed_system(workspace.state + kEpoch);
  const int64_t epoch = (ended < 0 ? -ended : ended) + 1;
  const int64_t expired = load_relaxed_system(workspace.state + kExpired);
  // Ignore a timeout of this same call: it may be recorded before the last thread gets here, and all threads must take
  // the same decision.
  Call call{workspace, op, expired != 0 && expired < epoch ? -epoch : epoch};
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int peer = threadIdx.x; peer < workspace.world; peer += kThreads) {
      store_release_system(flag_at(call, peer, workspace.rank), call.epoch);
    }
  }
  return call;
}

// Releases this block's earlier stores: they are visible to the same block of the peers once it has waited for this
// phase. is_valid: false if the stores are invalid because an input did not arrive.
__device__ __forceinline__ void put(const Call& call, const Plan& plan, int phase, bool is_valid) {
  const int64_t value = is_valid ? call.epoch : -call.epoch;
  __syncthreads();
#pragma unroll 1
  for (int peer = threadIdx.x; peer < call.world(); peer += kThreads) {
    if (peer == call.rank()) continue;
    store_release_system(flag_at(call, peer, plan.flag_index(phase, blockIdx.x, call.rank())), value);
  }
}

// True if `source` will not arrive: an earlier wait of this rank has timed out, or the host has marked the source in
// kUnreachableRanks.
__device__ __forceinline__ bool cannot_arrive(const Call& call, int source) {
  return load_relaxed_system(call.workspace.state + kExpired) != 0 ||
         (load_relaxed_system(call.workspace.state + kUnreachableRanks) >> source & 1) != 0;
}

// Polls a flag of this rank until it is set or the deadline has passed. Returns its value, which is negative if
// `source` has given up. `seen`: the value that the caller has loaded.
__device__ __forceinline__ int64_t poll(const Call& call, const int64_t* flag, int source, int64_t seen) {
  const int64_t start = now_ns();
  bool waiting = seen >= 0 && !cannot_arrive(call, source);
  for (int polls = 1; waiting; ++polls) {
    pause();
    seen = load_acquire_system(flag);
    waiting = seen < call.epoch && seen >= 0;
    if (!waiting || polls % kPollsPerClock != 0) continue;
    if (load_acquire_system(flag_at(call, call.rank(), source)) < 0) {
      // `source` has given up. Flags that it had set before, also in this call, are visible now: load the flag again.
      seen = load_acquire_system(flag);
      if (seen < call.epoch) seen = -call.epoch;
      waiting = false;
    } else {
      waiting = now_ns() - start < call.workspace.timeout_ns && !cannot_arrive(call, source);
    }
  }
  return seen;
}

// Writes the error record, unless an earlier wait has written one: only the first timeout is reported.
__device__ __forceinline__ void record_error(const Call& call, int source, int block, bool gave_up) {
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
  // A plain store, not an atomic, because not every platform supports GPU atomics on host memory.
  store_release_system(error + kErrorSet, 1);
}

// Waits for one flag, by one thread, with acquire semantics. Returns true if it has arrived; else records the error.
__device__ __forceinline__ bool wait_for_flag(const Call& call, int64_t index, int source, int block) {
  const int64_t* flag = flag_at(call, call.rank(), index);
  int64_t seen = load_acquire_system(flag);
  if (seen < call.epoch) {
    seen = poll(call, flag, source, seen);
    if (seen < call.epoch) record_error(call, source, block, seen < 0);
  }
  return seen >= call.epoch;
}

// Waits until the same block of all peers has put this phase, with acquire semantics. Returns false, with an error
// record, if a peer has not arrived in time. The result is the same for all threads of the block.
__device__ __forceinline__ bool wait(const Call& call, const Plan& plan, int phase) {
  bool is_valid = call.is_alive();
#pragma unroll 1
  for (int source = threadIdx.x; source < call.world(); source += kThreads) {
    if (source != call.rank())
      is_valid &= wait_for_flag(call, plan.flag_index(phase, blockIdx.x, source), source, blockIdx.x);
  }
  return __syncthreads_and(is_valid) != 0;
}

// Ends the call on this rank once all ranks have begun it. Every thread of the kernel calls it last.
__device__ __forceinline__ void end(const Call& call) {
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int source = threadIdx.x; source < call.world(); source += kThreads) {
      if (source != call.rank()) wait_for_flag(call, source, source, kBeginTile);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && add_acquire_release_gpu(call.workspace.state + kEndedPrograms, 1) == gridDim.x - 1) {
    store_relaxed_system(call.workspace.state + kEndedPrograms, 0);
    store_relaxed_system(call.workspace.state + kEpoch, call.epoch);
  }
}

}  // namespace fused_tp::cuda

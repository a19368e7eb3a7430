// All inline PTX of this folder: loads and stores with memory order and scope, the clock, and multimem (NVLink SHARP).
//
// Everything else is CUDA C++ that a host compiler can compile too. tests/native/gpu_on_cpu implements the functions of
// this header with std::atomic, so tests run the kernels, also under ThreadSanitizer, without a GPU.
//
// All asm statements are volatile, so the compiler keeps them in source order. Stores, releases and acquires also have
// a "memory" clobber, so the compiler does not move other memory accesses across them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "packet.cuh"

namespace fused_tp::cuda {

// The workspaces of all ranks. `address` is their multicast address, `addresses` their separate ones.
struct Multicast {
  uint64_t address;
  const uint64_t* addresses;
  int world;
};

}  // namespace fused_tp::cuda

#ifndef __CUDACC__
#include <gpu_on_cpu/memory.h>
#else

namespace fused_tp::cuda {

__device__ __forceinline__ int64_t load_acquire_system(const int64_t* word) {
  int64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ int64_t load_relaxed_system(const int64_t* word) {
  int64_t value;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(int64_t* word, int64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_system(int64_t* word, int64_t value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ int64_t add_acquire_release_gpu(int64_t* word, int64_t value) {
  int64_t old_value;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(old_value) : "l"(word), "l"(value) : "memory");
  return old_value;
}

__device__ __forceinline__ int64_t compare_and_swap_gpu(int64_t* word, int64_t expected, int64_t value) {
  int64_t old_value;
  asm volatile("atom.cas.relaxed.gpu.global.b64 %0, [%1], %2, %3;"
               : "=l"(old_value)
               : "l"(word), "l"(expected), "l"(value)
               : "memory");
  return old_value;
}

// Orders accesses to the same memory by its own address and by its multicast address.
__device__ __forceinline__ void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// %globaltimer, in nanoseconds: one clock for all SMs of a GPU.
__device__ __forceinline__ int64_t now_ns() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Pause between two polls of a flag. It is short because a flag usually arrives within a few round trips to L2.
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 20;" ::: "memory"); }

// Does not allocate a line in L1, because the data is read once. Never ld.global.nc: peers write the data while the
// kernel runs.
__device__ __forceinline__ Packet load_packet(const void* from) {
  Packet packet;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.words[0]), "=r"(packet.words[1]), "=r"(packet.words[2]), "=r"(packet.words[3])
               : "l"(from));
  return packet;
}

__device__ __forceinline__ void store_packet(void* to, Packet packet) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(packet.words[0]), "r"(packet.words[1]),
               "r"(packet.words[2]), "r"(packet.words[3])
               : "memory");
}

// Returns the sum over ranks of the packets at `offset` in their workspaces. The switch adds in fp32 and rounds to T.
template <class T>
__device__ __forceinline__ Packet multimem_sum(const Multicast& ranks, int64_t offset) {
  Packet sum = {};
#if __CUDA_ARCH__ >= 900
#define FUSED_TP_MULTIMEM_SUM(type)                                                             \
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add." type " {%0, %1, %2, %3}, [%4];"     \
               : "=r"(sum.words[0]), "=r"(sum.words[1]), "=r"(sum.words[2]), "=r"(sum.words[3]) \
               : "l"(ranks.address + offset)                                                    \
               : "memory")
  if constexpr (sizeof(T) == 4) {
    FUSED_TP_MULTIMEM_SUM("v4.f32");
  } else if constexpr (std::is_same_v<T, __half>) {
    FUSED_TP_MULTIMEM_SUM("acc::f32.v4.f16x2");
  } else {
    FUSED_TP_MULTIMEM_SUM("acc::f32.v4.bf16x2");
  }
#undef FUSED_TP_MULTIMEM_SUM
#else
  __trap();  // never reached: the launcher returns an error on these architectures
#endif
  return sum;
}

// Stores a packet at `offset` in the workspaces of all ranks.
__device__ __forceinline__ void multimem_store(const Multicast& ranks, int64_t offset, Packet packet) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(ranks.address + offset),
               "r"(packet.words[0]), "r"(packet.words[1]), "r"(packet.words[2]), "r"(packet.words[3])
               : "memory");
#else
  __trap();
#endif
}

}  // namespace fused_tp::cuda

#endif

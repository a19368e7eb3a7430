// csrc/cuda/memory.cuh on std::atomic: CPU implementation of the functions that are PTX on a GPU.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "fibers.h"

namespace fused_tp::cuda {

inline std::atomic<int64_t>& as_atomic(const int64_t* word) {
  static_assert(sizeof(std::atomic<int64_t>) == 8 && std::atomic<int64_t>::is_always_lock_free);
  return *reinterpret_cast<std::atomic<int64_t>*>(const_cast<int64_t*>(word));
}

inline int64_t load_acquire_system(const int64_t* word) { return as_atomic(word).load(std::memory_order_acquire); }
inline int64_t load_relaxed_system(const int64_t* word) { return as_atomic(word).load(std::memory_order_relaxed); }
inline void store_release_system(int64_t* word, int64_t value) {
  as_atomic(word).store(value, std::memory_order_release);
}
inline void store_relaxed_system(int64_t* word, int64_t value) {
  as_atomic(word).store(value, std::memory_order_relaxed);
}
inline int64_t add_acquire_release_gpu(int64_t* word, int64_t value) {
  return as_atomic(word).fetch_add(value, std::memory_order_acq_rel);
}
inline int64_t compare_and_swap_gpu(int64_t* word, int64_t expected, int64_t value) {
  as_atomic(word).compare_exchange_strong(expected, value, std::memory_order_relaxed);
  return expected;
}

inline void fence_aliases() {}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

inline void pause() { gpu_on_cpu::pause(); }

inline Packet load_packet(const void* from) {
  Packet packet;
  std::memcpy(&packet, __builtin_assume_aligned(from, 16), 16);
  return packet;
}
inline void store_packet(void* to, Packet packet) { std::memcpy(__builtin_assume_aligned(to, 16), &packet, 16); }

// Emulates the switch: the reader sums in rank order, and a store writes to one rank after the other.
template <class T>
Packet multimem_sum(const Multicast& ranks, int64_t offset) {
  float total[kPacketElements<T>];
  for (float& element : total) element = -0.0f;
  for (int rank = 0; rank < ranks.world; ++rank) {
    float term[kPacketElements<T>];
    unpack<T>(load_packet(reinterpret_cast<const char*>(ranks.addresses[rank]) + offset), term);
    for (int k = 0; k < kPacketElements<T>; ++k) total[k] += term[k];
  }
  return pack<T>(total);
}
inline void multimem_store(const Multicast& ranks, int64_t offset, Packet packet) {
  for (int rank = 0; rank < ranks.world; ++rank) {
    store_packet(reinterpret_cast<char*>(ranks.addresses[rank]) + offset, packet);
  }
}

}  // namespace fused_tp::cuda

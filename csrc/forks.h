// Whether this process is a forked child of the one that made something.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace fused_tp {

// How often this process is a fork of another. A forked child has its parent's memory and runs its exit handlers: it
// must neither speak for the parent's rank nor touch the parent's CUDA handles, also not in destructors.
inline uint32_t count_forks() {
  static std::atomic<uint32_t> forks{0};
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

}  // namespace fused_tp

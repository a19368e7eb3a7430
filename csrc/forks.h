// count_forks: detection of forked child processes, in which objects of the parent must not be used.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace fused_tp {

// Number of forks between the first process and this one. A forked child inherits its parent's memory and exit
// handlers. It must neither act for the parent's rank nor touch the parent's CUDA handles, not even in destructors.
inline uint32_t count_forks() {
  static std::atomic<uint32_t> forks{0};
  static const int error = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
  (void)error;
  return forks.load(std::memory_order_relaxed);
}

}  // namespace fused_tp

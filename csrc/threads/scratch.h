// Memory of the calling thread for the duration of one call, aligned to a cache line; up to kKept bytes are kept for
// the next call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace fused_tp {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* at_least(size_t bytes) {
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      data_ = static_cast<char*>(std::aligned_alloc(kAlignment, bytes_));
      if (data_ == nullptr) {
        bytes_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }
  void trim() {
    if (bytes_ <= kKept) return;
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
  }

 private:
  static constexpr size_t kAlignment = 64, kKept = size_t{64} << 20;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

inline Scratch& scratch_memory() {
  thread_local Scratch mine;
  return mine;
}

}  // namespace fused_tp

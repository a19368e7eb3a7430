// Scratch memory of the calling thread for one call of an op, aligned to a cache line. Up to kKeptBytes stay allocated
// for the next call.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

namespace fused_tp {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  // Returns at least `bytes` of memory, valid until the next call. Earlier pointers and contents may be lost.
  char* reserve(size_t bytes) {
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
  // Frees the memory if it exceeds kKeptBytes. Call this at the end of the op.
  void trim() {
    if (bytes_ <= kKeptBytes) return;
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
  }

 private:
  static constexpr size_t kAlignment = 64, kKeptBytes = size_t{64} << 20;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

inline Scratch& scratch_memory() {
  thread_local Scratch scratch;
  return scratch;
}

}  // namespace fused_tp

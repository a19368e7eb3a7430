// Heap: best-fit allocator of ranges in one rank's segment. The ranks' heaps differ, so a call publishes the offset of
// its workspace (Slot::workspace_offset).
//
// Released ranges are merged with free neighbours. Of several free ranges of one size, the last released one is reused
// first: its pages exist already, and its lines are likely still in cache.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fused_tp::shm {

class Heap {
 public:
  Heap(size_t begin, size_t end);

  // Returns the offset of a free range, aligned to 64 bytes. Throws GroupError if no free range is large enough.
  size_t allocate(size_t bytes);
  // Like `allocate`, but returns false instead of throwing.
  bool try_allocate(size_t bytes, size_t* offset);
  void release(size_t offset);

  size_t bytes_in_use() const;
  size_t high_water() const;  // largest end of a range so far, in bytes from the start of the heap

 private:
  void insert_free(size_t offset, size_t bytes);
  void erase_free(std::map<size_t, size_t>::iterator range);

  mutable std::mutex mutex_;
  size_t begin_;
  size_t end_;
  size_t high_water_;
  size_t in_use_ = 0;
  std::map<size_t, size_t> free_by_offset_;             // offset -> bytes
  std::map<size_t, std::vector<size_t>> free_by_size_;  // bytes -> offsets, in order of release
  std::unordered_map<size_t, size_t> allocated_;        // offset -> bytes
};

}  // namespace fused_tp::shm

// Allocator of ranges of one rank's segment. Offsets differ between ranks; ops exchange them (group.h).
//
// Best fit over free ranges, neighbours joined on release. The most recently released range of a size is reused first:
// its pages exist and its lines are likely still in cache, so a reused pool is faster than fresh memory.
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

  // Throws GroupError if the segment is full. Aligned to 64 bytes.
  size_t allocate(size_t bytes);
  // False if it is full.
  bool try_allocate(size_t bytes, size_t* offset);
  void release(size_t offset);

  size_t bytes_in_use() const;
  size_t high_water() const;

 private:
  void insert_free(size_t offset, size_t bytes);
  void erase_free(std::map<size_t, size_t>::iterator range);

  mutable std::mutex mutex_;
  size_t begin_;
  size_t end_;
  size_t high_water_;
  size_t in_use_ = 0;
  std::map<size_t, size_t> free_by_offset_;             // offset -> bytes
  std::map<size_t, std::vector<size_t>> free_by_size_;  // bytes -> offsets, last released last
  std::unordered_map<size_t, size_t> used_;             // offset -> bytes
};

}  // namespace fused_tp::shm

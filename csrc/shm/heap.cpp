#include "heap.h"

#include <algorithm>
#include <string>

#include "errors.h"

namespace fused_tp::shm {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kPageBytes = 4096;

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

Heap::Heap(size_t begin, size_t end) : begin_(round_up(begin, kPageBytes)), end_(end), high_water_(begin_) {
  insert_free(begin_, end_ - begin_);
}

size_t Heap::allocate(size_t bytes) {
  size_t offset;
  if (try_allocate(bytes, &offset)) return offset;
  std::lock_guard<std::mutex> lock(mutex_);
  throw GroupError("the shared-memory pool of this rank is full: " + std::to_string(bytes) + " bytes requested, " +
                   std::to_string(in_use_) + " of " + std::to_string(end_ - begin_) +
                   " in use; raise FUSED_TP_SHM_RESERVE (bytes) or keep fewer outputs alive");
}

bool Heap::try_allocate(size_t bytes, size_t* offset) {
  if (bytes > end_ - begin_) return false;  // also keeps the rounding below from overflowing
  bytes = round_up(std::max<size_t>(bytes, 1), bytes >= kPageBytes ? kPageBytes : kCacheLine);
  std::lock_guard<std::mutex> lock(mutex_);
  auto fit = free_by_size_.lower_bound(bytes);
  if (fit == free_by_size_.end()) return false;
  *offset = fit->second.back();
  const size_t available = fit->first;
  erase_free(free_by_offset_.find(*offset));
  if (available > bytes) insert_free(*offset + bytes, available - bytes);
  allocated_[*offset] = bytes;
  in_use_ += bytes;
  high_water_ = std::max(high_water_, *offset + bytes);
  return true;
}

void Heap::release(size_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto allocation = allocated_.find(offset);
  if (allocation == allocated_.end())
    throw GroupError("the range at offset " + std::to_string(offset) + " of the shared-memory pool is not allocated");
  size_t bytes = allocation->second;
  in_use_ -= bytes;
  allocated_.erase(allocation);
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.end() && next->first == offset + bytes) {
    bytes += next->second;
    auto joined = next++;
    erase_free(joined);
  }
  if (next != free_by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      erase_free(previous);
    }
  }
  insert_free(offset, bytes);
}

size_t Heap::bytes_in_use() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return in_use_;
}

size_t Heap::high_water() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return high_water_ - begin_;
}

void Heap::insert_free(size_t offset, size_t bytes) {
  free_by_offset_[offset] = bytes;
  free_by_size_[bytes].push_back(offset);
}

void Heap::erase_free(std::map<size_t, size_t>::iterator range) {
  auto same_size = free_by_size_.find(range->second);
  auto& offsets = same_size->second;
  offsets.erase(std::find(offsets.begin(), offsets.end(), range->first));
  if (offsets.empty()) free_by_size_.erase(same_size);
  free_by_offset_.erase(range);
}

}  // namespace fused_tp::shm

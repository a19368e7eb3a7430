// Test double of segment.cpp: ranks are threads of one process that share one mapping. ThreadSanitizer then sees both
// sides of every access (it compares addresses, and could not relate two mappings of one memfd).
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "errors.h"
#include "shm/segment.h"

namespace fused_tp::shm {
namespace {
std::mutex mutex;
std::map<int, std::weak_ptr<Segment>> segments;
int next_id = 1;
}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Segment> segment(new Segment);
  segment->data_ = static_cast<char*>(std::aligned_alloc(4096, bytes = (bytes + 4095) / 4096 * 4096));
  std::memset(segment->data_, 0, bytes);
  segment->bytes_ = bytes;
  segment->address_.pid = ::getpid();
  segment->address_.fd = next_id++;
  segment->address_.bytes = bytes;
  segments[segment->address_.fd] = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentAddress& address) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = segments[address.fd].lock();
  if (!found) throw GroupError("no such segment");
  return found;
}

Segment::~Segment() { std::free(data_); }
}  // namespace fused_tp::shm

// Segment: the shared memory of one rank, a memfd that the peers of the group map.
//
// A memfd has no name in /dev/shm, so it is freed however the process dies. Named POSIX segments were rejected because
// a SIGKILL between shm_open and shm_unlink leaks them. Peers open the memfd through /proc/<pid>/fd. The kernel allows
// that to the same user only, and it fails on another host or in another PID namespace; the group then falls back to
// plain collectives. A random token detects a pid or fd number that was reused.
//
// A segment reserves much address space, and the kernel allocates pages when they are first written. So it never needs
// to grow, which would require another exchange between the ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace fused_tp::shm {

struct SegmentAddress {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t bytes = 0;
  uint64_t token[2] = {0, 0};
};

class Segment {
 public:
  // Creates a segment of this process. `bytes` is rounded up to whole pages. Throws GroupError with the reason.
  static std::shared_ptr<Segment> create(size_t bytes);
  // Maps a peer's segment. Throws GroupError if it cannot be opened, or if its size or token differs from `address`.
  static std::shared_ptr<Segment> open(const SegmentAddress& address);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const SegmentAddress& address() const { return address_; }

  // Bytes that are reserved for the token at the start of a segment.
  static constexpr size_t kTokenBytes = 64;

 private:
  Segment() = default;

  SegmentAddress address_;
  int fd_ = -1;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace fused_tp::shm

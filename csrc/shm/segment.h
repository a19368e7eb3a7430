// One rank's shared memory: a memfd that the peers of the group map.
//
// A memfd has no name in /dev/shm, so nothing is left behind however a process dies; named POSIX segments were rejected
// because a SIGKILL between shm_open and shm_unlink leaks them. Peers open it through /proc/<pid>/fd, which the kernel
// allows to the same user only, and which fails on another host or in another PID namespace: then the group falls back
// to plain collectives. A random token guards against a reused pid or fd number.
//
// The segment is reserved large and sparse: pages exist once touched, so growing needs no new rendezvous.
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
  // A new segment of this process. `bytes` is rounded up to whole pages. Throws GroupError with the reason.
  static std::shared_ptr<Segment> create(size_t bytes);
  // A peer's segment. Throws GroupError if it is not reachable, or is another segment than `address` describes.
  static std::shared_ptr<Segment> open(const SegmentAddress& address);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const SegmentAddress& address() const { return address_; }

  // Bytes of the token at the start of a segment; the owner uses the rest.
  static constexpr size_t kTokenBytes = 64;

 private:
  Segment() = default;

  SegmentAddress address_;
  int fd_ = -1;
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace fused_tp::shm

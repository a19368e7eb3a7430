#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "errors.h"

namespace fused_tp::shm {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void throw_errno(const std::string& message) { throw GroupError(message + ": " + std::strerror(errno)); }

char* map(int fd, size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) throw_errno("cannot map " + std::to_string(bytes) + " bytes of shared memory");
  ::madvise(data, bytes, MADV_DONTDUMP);  // keeps core dumps small; an error does no harm
  return static_cast<char*>(data);
}

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  std::shared_ptr<Segment> segment(new Segment);
  segment->fd_ = ::memfd_create("fused_tp", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (segment->fd_ < 0) throw_errno("cannot create shared memory (memfd_create)");
  if (::fchmod(segment->fd_, 0600) != 0) throw_errno("cannot restrict shared memory to this user");
  if (::ftruncate(segment->fd_, static_cast<off_t>(bytes)) != 0)
    throw_errno("cannot reserve " + std::to_string(bytes) + " bytes of shared memory");
  // Without seals any process that can open the memfd could truncate it, and a rank that accesses a missing page is
  // killed by SIGBUS.
  if (::fcntl(segment->fd_, F_ADD_SEALS, kSeals) != 0) throw_errno("cannot seal the size of shared memory");
  segment->data_ = map(segment->fd_, bytes);
  segment->bytes_ = bytes;
  SegmentAddress& address = segment->address_;
  address.pid = static_cast<int32_t>(::getpid());
  address.fd = segment->fd_;
  address.bytes = bytes;
  if (::getrandom(address.token, sizeof address.token, 0) != sizeof address.token)
    throw_errno("cannot draw a token for shared memory");
  std::memcpy(segment->data_, address.token, sizeof address.token);
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentAddress& address) {
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  std::shared_ptr<Segment> segment(new Segment);
  segment->fd_ = ::open(
      path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);  // if the fd was reused, the file may be of any kind
  if (segment->fd_ < 0) throw_errno("cannot open the shared memory of process " + std::to_string(address.pid));
  struct stat status;
  if (::fstat(segment->fd_, &status) != 0)
    throw_errno("cannot stat the shared memory of process " + std::to_string(address.pid));
  if (!S_ISREG(status.st_mode) || static_cast<uint64_t>(status.st_size) != address.bytes)
    throw GroupError("fd " + std::to_string(address.fd) + " of process " + std::to_string(address.pid) +
                     " is not its shared memory; the ranks are likely on different hosts or containers");
  if ((::fcntl(segment->fd_, F_GET_SEALS) & kSeals) != kSeals)
    throw GroupError("the shared memory of process " + std::to_string(address.pid) +
                     " may shrink; install the same version of fused_tp on all ranks");
  segment->data_ = map(segment->fd_, address.bytes);
  segment->bytes_ = address.bytes;
  segment->address_ = address;
  if (std::memcmp(segment->data_, address.token, sizeof address.token) != 0)
    throw GroupError("the shared memory of process " + std::to_string(address.pid) +
                     " has another token; the ranks are likely on different hosts or containers");
  // The mapping keeps the memory alive. An open descriptor per peer would be up to 63 for each group.
  ::close(segment->fd_);
  segment->fd_ = -1;
  return segment;
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace fused_tp::shm

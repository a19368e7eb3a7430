// Library: NCCL, loaded at run time. The build does not need NCCL, and the process uses one copy of it, the one that
// torch has loaded.
#pragma once

#include <memory>
#include <string>

#include "nccl/api.h"

namespace fused_tp::nccl {

class Library {
 public:
  // Oldest supported version. The oldest supported torch, 2.10, has NCCL 2.27; older versions come from elsewhere.
  static constexpr int kMinVersion = 21900;

  // Opens the library at `path`. If it is empty: the library that this process has loaded already, else the
  // libnccl.so.2 that the dynamic loader finds. Later calls for the same library return the same object. Throws
  // GroupError if there is no such library, or if it is too old.
  static std::shared_ptr<const Library> open(const std::string& path = "");
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // such as 22703 for 2.27.3
  std::string version_text() const;

  bool has_shared_devices() const { return version_ >= 23000; }          // allows several ranks on one GPU
  bool has_revoke() const { return functions_.comm_revoke != nullptr; }  // stops ops without freeing memory

  const Functions& functions() const { return functions_; }
  // Returns the id of a new communicator, which the caller passes to all ranks. Opens a socket in this process to which
  // the ranks connect.
  UniqueId make_id() const;
  // Returns NCCL's name of the result and its text about the last error.
  std::string describe(Result result, Comm comm = nullptr) const;

 private:
  explicit Library(void* library);

  void* library_;
  std::string path_;
  int version_ = 0;
  Functions functions_{};
};

}  // namespace fused_tp::nccl

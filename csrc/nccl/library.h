// NCCL, bound at run time: it is not needed to build, and the process has one copy of it, the one that torch loaded.
#pragma once

#include <memory>
#include <string>

#include "nccl/api.h"

namespace fused_tp::nccl {

class Library {
 public:
  // The oldest supported version: torch 2.10, the oldest that we support, has 2.27.
  static constexpr int kOldest = 21900;

  // An empty path selects the one that this process has loaded already, else the one that the loader finds as
  // libnccl.so.2. The same library returns the same object again. Throws GroupError if there is none, or it is too old.
  static std::shared_ptr<const Library> open(const std::string& path = "");
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  const std::string& path() const { return path_; }
  int version() const { return version_; }  // 22703 for 2.27.3
  std::string version_text() const;

  bool has_shared_devices() const { return version_ >= 23000; }          // several ranks on one GPU
  bool has_revoke() const { return functions_.comm_revoke != nullptr; }  // stops a communicator and frees nothing

  const Functions& functions() const { return functions_; }
  // An id that one rank makes and all ranks receive. Opens a socket that listens for them in this process.
  UniqueId make_id() const;
  // NCCL's name of the result, and its description of the last error.
  std::string describe(Result result, Comm comm = nullptr) const;

 private:
  explicit Library(void* library);

  void* library_;
  std::string path_;
  int version_ = 0;
  Functions functions_{};
};

}  // namespace fused_tp::nccl

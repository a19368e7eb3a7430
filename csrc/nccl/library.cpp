#include "nccl/library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "errors.h"

namespace fused_tp::nccl {
namespace {

constexpr const char* kSoname = "libnccl.so.2";

void* load(const std::string& path) {
  if (!path.empty()) return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  // Prefer the loaded copy: a second copy would have its own threads and its own state.
  if (void* loaded = ::dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  return ::dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
}

template <typename Function>
bool bind(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, symbol));
  return function != nullptr;
}

std::string version_to_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

std::shared_ptr<const Library> Library::open(const std::string& path) {
  // Leaked on purpose, and the library is never unloaded, because it runs threads.
  static auto* libraries = new std::map<void*, std::shared_ptr<const Library>>();
  static auto* mutex = new std::mutex();
  std::lock_guard<std::mutex> lock(*mutex);
  void* handle = load(path);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    throw GroupError("NCCL could not be loaded: " + std::string(why ? why : "no reason given") +
                     ". CUDA builds of torch bring it; otherwise install nvidia-nccl-cu12 or nvidia-nccl-cu13.");
  }
  std::shared_ptr<const Library>& library = (*libraries)[handle];
  if (!library) library.reset(new Library(handle));
  return library;
}

Library::Library(void* library) : library_(library) {
  void* get_version = ::dlsym(library_, "ncclGetVersion");
  Dl_info info{};
  if (get_version != nullptr && ::dladdr(get_version, &info) != 0 && info.dli_fname != nullptr) path_ = info.dli_fname;
  bool has_all_functions = bind(library_, "ncclGetVersion", functions_.get_version);
  if (!has_all_functions || functions_.get_version(&version_) != Result::kSuccess)
    throw GroupError("the library at " + path_ + " is not NCCL: ncclGetVersion is missing or failed");
  if (version_ < kMinVersion)
    throw GroupError("the NCCL at " + path_ + " is version " +
                     version_to_text(version_ < 10000 ? version_ * 10 : version_) + "; fused_tp needs " +
                     version_to_text(kMinVersion) + " or later: install a newer nvidia-nccl-cu12 or " +
                     "nvidia-nccl-cu13, or a newer torch");
#define FUSED_TP_BIND(name, symbol, result, parameters) has_all_functions &= bind(library_, #symbol, functions_.name);
  FUSED_TP_NCCL_FUNCTIONS(FUSED_TP_BIND)
#undef FUSED_TP_BIND
  if (version_ >= 22900) has_all_functions &= bind(library_, "ncclCommRevoke", functions_.comm_revoke);
  if (!has_all_functions)
    throw GroupError("the NCCL at " + path_ + ", version " + version_text() +
                     ", lacks functions of this version; reinstall NCCL");
}

Library::~Library() = default;

std::string Library::version_text() const { return version_to_text(version_); }

UniqueId Library::make_id() const {
  UniqueId id{};
  const Result result = functions_.get_unique_id(&id);
  if (result != Result::kSuccess) throw GroupError("NCCL could not create a unique id: " + describe(result));
  return id;
}

std::string Library::describe(Result result, Comm comm) const {
  std::string text = functions_.get_error_string(result);
  const char* last_error = functions_.get_last_error(comm);
  if (last_error != nullptr && *last_error != '\0') text += std::string(" (") + last_error + ")";
  return text;
}

}  // namespace fused_tp::nccl

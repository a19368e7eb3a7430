// GPUs: the CUDA driver, NCCL, copy engines and the library of device kernels, all of them loaded on demand.
// Streams are the driver's handles, as ints; 0 is the default stream.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "copy_engine/workspace.h"
#include "cuda/launchers.h"
#include "cuda/plan.h"
#include "cuda/protocol.h"
#include "driver/driver.h"
#include "nccl/communicator.h"
#include "nccl/library.h"

namespace fused_tp::bindings {

using Range = std::pair<Address, size_t>;  // address and bytes

template <>
struct From<copy_engine::Memory> {
  using Given = Range;
  static copy_engine::Memory value(const Range& given) {
    return {static_cast<driver::DeviceAddress>(given.first), given.second};
  }
};
template <>
struct From<std::vector<copy_engine::Memory>> {
  using Given = std::vector<Range>;
  static std::vector<copy_engine::Memory> value(const Given& given) {
    std::vector<copy_engine::Memory> found;
    for (const Range& range : given) found.push_back(From<copy_engine::Memory>::value(range));
    return found;
  }
};
template <>
struct From<const std::vector<copy_engine::Memory>&> : From<std::vector<copy_engine::Memory>> {};
template <>
struct From<std::optional<driver::Stream>> {
  using Given = std::optional<Address>;
  static std::optional<driver::Stream> value(Given given) {
    return given ? std::optional(pointer<CUstream_st>(*given)) : std::nullopt;
  }
};
template <>
struct From<copy_engine::Op> {
  using Given = int;
  static copy_engine::Op value(int given) { return static_cast<copy_engine::Op>(given); }
};

namespace {

using driver::Driver;
using driver::Stream;

Stream to_stream(Address handle) { return pointer<CUstream_st>(handle); }

// ---- the driver ------------------------------------------------------------------------------------------------

// True if everything in the stream has ended after at most that many seconds. Waits in slices, for Ctrl-C.
bool synchronize(const Driver& driver, int device, Address stream, double seconds) {
  const auto begun = std::chrono::steady_clock::now();
  while (true) {
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    const double slice = std::min(0.05, seconds - waited);
    {
      const Driver::Device current(driver, device);
      if (driver.synchronize(to_stream(stream), slice)) return true;
    }
    if (slice < 0.05) return false;
    check_signals();
  }
}

void bind_driver(py::module_& m) {
  py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver", "The CUDA driver, bound at run time.")
      .def(py::init([](const std::string& path) { return std::const_pointer_cast<Driver>(Driver::open(path)); }),
           "path"_a = "libcuda.so.1", NoGil(), "RuntimeError where there is no driver, or one older than CUDA 12.0.")
      .def("has_stream_memory_ops", &Driver::has_stream_memory_ops, "device"_a,
           "Whether the device's streams can write and wait for 64-bit words.")
      .def("synchronize", &synchronize, "device"_a, "stream"_a, "seconds"_a, NoGil(),
           "Whether everything in the stream has ended, after at most that many seconds.");
}

// ---- NCCL ------------------------------------------------------------------------------------------------------

using nccl::Communicator;
using nccl::Ticket;
using nccl::Transfer;

// Destruction may take as long as the ops in flight, so the last owner waits without the GIL, whether it held the GIL
// or not.
std::shared_ptr<Communicator> ending_without_gil(std::shared_ptr<Communicator> made) {
  Communicator* const raw = made.get();
  return std::shared_ptr<Communicator>(raw, [kept = std::move(made)](Communicator*) mutable {
    if (Py_IsInitialized() && PyGILState_Check()) {
      py::gil_scoped_release release;
      kept.reset();
    } else {
      kept.reset();
    }
  });
}

void close_at_exit() {
  static const bool registered = [] {
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
      py::gil_scoped_release release;
      Communicator::close_all();
    }));
    return true;
  }();
  (void)registered;
}

std::shared_ptr<Communicator> join(const std::shared_ptr<nccl::Library>& library, const std::shared_ptr<Driver>& driver,
                                   int device, const py::bytes& unique_id, int rank, int size, double timeout_seconds) {
  const auto id = unpacked<nccl::UniqueId>(unique_id, "a unique id");
  close_at_exit();
  Communicator::Options options;
  options.timeout_seconds = timeout_seconds;
  options.interrupted = [] {
    if (Py_IsInitialized()) check_signals();  // else the interpreter has ended before the communicator
  };
  py::gil_scoped_release release;
  return ending_without_gil(Communicator::create(library, driver, device, id, rank, size, std::move(options)));
}

using Transfers = std::vector<std::tuple<int, Address, size_t>>;  // (peer, address, bytes) each

std::vector<Transfer> to_transfers(const Transfers& sends, const Transfers& receives) {
  std::vector<Transfer> found;
  const auto add = [&](const Transfers& transfers, Transfer::Kind kind) {
    for (const auto& [peer, address, bytes] : transfers)
      if (bytes > 0) found.push_back({kind, peer, pointer<>(address), bytes});
  };
  add(sends, Transfer::kSend);
  add(receives, Transfer::kReceive);
  return found;
}

void bind_communicator(py::module_& m) {
  using nccl::Library;
  py::class_<Library, std::shared_ptr<Library>>(m, "NcclLibrary", "NCCL, bound at run time.")
      .def(py::init([](const std::string& path) { return std::const_pointer_cast<Library>(Library::open(path)); }),
           "path"_a = "",
           "The library at `path`; without one, that which this process has loaded already, else what the loader "
           "finds. FusedTPError where there is none, or one too old.")
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version", &Library::version, "22703 for 2.27.3.")
      .def_property_readonly("version_text", &Library::version_text)
      .def_property_readonly("has_revoke", &Library::has_revoke, "Stops a communicator and keeps it (2.29).")
      .def_property_readonly("has_shared_devices", &Library::has_shared_devices, "Several ranks on one GPU (2.30).")
      .def(
          "make_id",
          [](const Library& library) {
            const nccl::UniqueId id = library.make_id();
            return py::bytes(id.internal, sizeof id.internal);
          },
          "The unique id of a communicator: one rank makes it and gives it to all.");

  py::class_<Ticket>(m, "NcclTicket", "An op that a communicator has enqueued.")
      .def_readonly("captured", &Ticket::captured, "It is part of a CUDA graph.");
  py::class_<Communicator, std::shared_ptr<Communicator>>(
      m, "Communicator",
      "A NCCL communicator with a stream of its own, whose ops have deadlines: `check`, and every op, raises what it "
      "has failed with, a CollectiveTimeoutError, PeerLostError or FusedTPError.")
      .def(py::init(&join), "library"_a, "driver"_a, "device"_a, "unique_id"_a, "rank"_a, "size"_a, "timeout_seconds"_a,
           "Joins the ranks that have the same id; waits for all of them, at most `timeout_seconds`.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("device", &Communicator::device)
      .def_property_readonly(
          "stream", [](const Communicator& communicator) { return reinterpret_cast<Address>(communicator.stream()); })
      .def_property_readonly("calls", &Communicator::calls, "How many ops there have been.")
      .def_property("timeout_seconds", &Communicator::timeout, &Communicator::set_timeout,
                    "The deadline of ops from now on.")
      .def("all_gather", bound(&Communicator::all_gather), "in"_a, "out"_a, "bytes_per_rank"_a, "after"_a, NoGil())
      .def(
          "exchange",
          [](Communicator& communicator, const Transfers& sends, const Transfers& receives,
             std::optional<Address> after) {
            return communicator.exchange(to_transfers(sends, receives), From<std::optional<Stream>>::value(after));
          },
          "sends"_a, "receives"_a, "after"_a, NoGil(),
          "All at once: (peer, address, bytes) each, behind what is in the stream `after`, if given.")
      .def("wait", bound(&Communicator::wait), "ticket"_a, "stream"_a, NoGil(),
           "`stream` goes on once the op has ended.")
      .def("has_begun", &Communicator::has_begun, "ticket"_a, NoGil(), "Whether it waits for nothing but peers.")
      .def("has_ended", &Communicator::has_ended, "ticket"_a, NoGil())
      .def_property_readonly("failure", &Communicator::failure, "Why it is unusable; empty while it is not.")
      .def("check", &Communicator::check, NoGil(), "Raises what it has failed with, if it has.")
      .def("lose", &Communicator::lose, "rank"_a, "how"_a, NoGil(),
           "That rank's process has ended. Ops in flight are aborted, and everything raises PeerLostError.")
      .def("abort", &Communicator::abort, "why"_a, NoGil(),
           "Ops in flight are aborted, and everything raises FusedTPError.")
      .def("close", py::overload_cast<>(&Communicator::close), NoGil(),
           "Waits for what is in flight, within the deadline, and gives everything back.");
}

// ---- copy engines ----------------------------------------------------------------------------------------------

// A forked child has no watchdog thread, and the condition variable of that thread can never be destroyed there: the
// workspace is leaked.
struct NotInForks {
  void operator()(copy_engine::Workspace* workspace) const {
    if (!workspace->forked()) delete workspace;
  }
};

// All without the GIL: in the tests' fake driver the default stream runs everything at once, including waits for peers.
void bind_copy_engine(py::module_& m) {
  using copy_engine::Workspace;
  using Holder = std::unique_ptr<Workspace, NotInForks>;
  py::class_<Workspace::Call>(m, "CopyEngineCall", "One call of an op, from its first message to its gates.");
  py::class_<Workspace, Holder>(m, "CopyEngineWorkspace", "Gathers and scatters of one group by copy engines.")
      .def(py::init([](const std::string& library, int device, int rank, const std::vector<Address>& addresses,
                       int64_t gather_bytes, int64_t scatter_bytes, const std::vector<Address>& streams,
                       const py::object&) {
             require(rank >= 0 && rank < static_cast<int>(addresses.size()),
                     "rank must be one of those that addresses is for");
             require(gather_bytes >= 0 && scatter_bytes >= 0, "sizes must not be negative");
             require(streams.empty() || streams.size() >= (addresses.size() > 1 ? 3 : 2),
                     "streams must be the watchdog's, one that sends, and one or more that fetch; or none");
             std::vector<Stream> given;
             for (const Address stream : streams) given.push_back(to_stream(stream));
             auto driver = Driver::open(library);
             require(driver->has_stream_memory_ops(device), "this device's streams cannot wait for a word of memory");
             return Holder(new Workspace(std::move(driver), device, rank,
                                         std::vector<driver::DeviceAddress>(addresses.begin(), addresses.end()),
                                         gather_bytes, scatter_bytes, std::move(given)));
           }),
           "library"_a, "device"_a, "rank"_a, "addresses"_a, "gather_bytes"_a, "scatter_bytes"_a,
           "streams"_a = std::vector<Address>(), "owner"_a = py::none(), NoGil(), py::keep_alive<1, 9>(),
           "`streams`: handles of the watchdog's, of one that sends and of those that fetch, kept by `owner`; none: it "
           "makes its own.")
      .def_static(
          "bytes",
          [](int world, int64_t gather_bytes, int64_t scatter_bytes) {
            return copy_engine::Layout(world, gather_bytes, scatter_bytes).bytes();
          },
          "world"_a, "gather_bytes"_a, "scatter_bytes"_a, "What a rank's workspace takes.")
      .def("begin", bound(&Workspace::begin), "op"_a, "stream"_a, "timeout_seconds"_a, NoGil())
      .def("gather", bound(&Workspace::gather), "call"_a, "stream"_a, "shard"_a, "to"_a, NoGil(),
           "Starts to gather (address, bytes) of this rank; `to` is where those of the others go, by rank.")
      .def("wait_for", bound(&Workspace::wait_for), "call"_a, "stream"_a, "peer"_a, NoGil())
      .def("offer", bound(&Workspace::offer), "call"_a, "stream"_a, "op"_a, "shard"_a, "to"_a, NoGil(),
           "The same for a kernel that waits for shards itself; returns the channel, for the following.")
      .def(
          "arrived", [](Workspace& self, int index) { return self.layout().arrived(index, 0); }, "channel"_a,
          "The first of W words of this rank's workspace, which become 1.")
      .def(
          "order", [](Workspace& self, int index) { return self.layout().order(index); }, "channel"_a,
          "The first of W words of this rank's workspace for the kernel's own use, which are 0 when it begins.")
      .def_property_readonly(
          "expired",
          [](Workspace& self) { return self.watchdog().progress(copy_engine::expired_word(self.layout().world())); },
          "The address of a word that a kernel sets where it has waited in vain.")
      .def("scatter", bound(&Workspace::scatter), NoGil(), "The number of a new scatter.")
      .def("push", bound(&Workspace::push), "call"_a, "stream"_a, "scatter"_a, "peer"_a, "block"_a, NoGil())
      .def("receive", bound(&Workspace::receive), "call"_a, "stream"_a, "scatter"_a, NoGil())
      .def("release", bound(&Workspace::release), "stream"_a, "scatter"_a, NoGil())
      .def("finish", bound(&Workspace::finish), "call"_a, "stream"_a, "results"_a, NoGil(),
           "The end of a call; results as (address, bytes) become NaN where it does not come to a good one.")
      .def("quiet", bound(&Workspace::quiet), "seconds"_a, NoGil(),
           "Whether all that was enqueued has ended, after waiting that long at most.")
      .def(
          "slot", [](Workspace& self, int scatter, int sender) { return self.layout().slot(scatter, sender); },
          "scatter"_a, "sender"_a, "Where a block from `sender` is in this rank's workspace.")
      .def_property_readonly("slot_bytes", [](Workspace& self) { return self.layout().slot_bytes(); })
      .def_property_readonly("failure", [](Workspace& self) { return static_cast<int>(self.watchdog().failure()); })
      .def_property_readonly("sentence", [](Workspace& self) { return self.watchdog().sentence(); })
      .def(
          "lose", [](Workspace& self, int rank) { self.watchdog().lose(rank); }, "rank"_a, NoGil())
      .def(
          "abort", [](Workspace& self, const std::string& why) { self.watchdog().abort(why); }, "why"_a, NoGil())
      .def("stop", [](Workspace& self) { self.watchdog().stop(); }, NoGil());
}

// ---- device kernels --------------------------------------------------------------------------------------------

using cuda::Algorithm;
using cuda::Launchers;
using cuda::Workspace;

Algorithm to_algorithm(int number) {
  if (number < static_cast<int>(Algorithm::kOneShot) || number > static_cast<int>(Algorithm::kMultimem))
    throw py::value_error("unknown algorithm number " + std::to_string(number));
  return static_cast<Algorithm>(number);
}

}  // namespace

template <>
struct From<Algorithm> {
  using Given = int;
  static Algorithm value(int given) { return to_algorithm(given); }
};
template <>
struct From<const Workspace*> {
  using Given = const Workspace&;
  static const Workspace* value(const Workspace& given) { return &given; }
};
template <>
struct From<cuda::Bias> {
  using Given = std::pair<Address, int64_t>;
  static cuda::Bias value(const Given& given) { return {pointer<>(given.first), given.second}; }
};

// A struct that lives as long as the call that receives a pointer to it.
template <typename Struct>
struct Held {
  Struct held;
  operator const Struct*() const { return &held; }
};
template <>
struct From<const cuda::AllToAllLayout*> {
  using Given = const std::array<int64_t, 9>&;  // its nine numbers, in order
  static Held<cuda::AllToAllLayout> value(Given l) { return {{l[0], l[1], l[2], l[3], l[4], l[5], l[6], l[7], l[8]}}; }
};
template <>
struct From<const cuda::RmsNorm*> {
  // residual, weight, normed, new_residual, rows, columns, eps
  using Given = const std::tuple<Address, Address, Address, Address, int64_t, int64_t, double>&;
  static Held<cuda::RmsNorm> value(Given n) {
    return {{pointer<>(std::get<0>(n)), pointer<>(std::get<1>(n)), pointer<>(std::get<2>(n)), pointer<>(std::get<3>(n)),
             std::get<4>(n), std::get<5>(n), std::get<6>(n)}};
  }
};

namespace {

// Stays loaded until the process ends: its kernels may run until then, and its CUDA runtime ends if it is unloaded.
class DeviceKernels {
 public:
  explicit DeviceKernels(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error("The device kernels could not be loaded: " + last_error());
    const auto launchers = reinterpret_cast<decltype(&fused_tp_launchers)>(dlsym(library, "fused_tp_launchers"));
    if (launchers == nullptr) throw std::runtime_error(path + " is no library of device kernels: " + last_error());
    launchers_ = launchers();
    if (launchers_->abi_version != cuda::kAbiVersion)
      throw std::runtime_error("The device kernels in " + path + " have interface version " +
                               std::to_string(launchers_->abi_version) + " and this fused_tp needs version " +
                               std::to_string(cuda::kAbiVersion) +
                               ": install fused_tp again, so that both are built alike.");
  }

  // Calls a launcher and throws CUDA's error. Without the GIL: a launch waits for no other rank, but may wait for room
  // in the queue of a GPU.
  template <typename... Parameters>
  static auto launching(const char* op, int32_t (*Launchers::*launcher)(Parameters...)) {
    return [op, launcher](const DeviceKernels& self, typename From<Parameters>::Given... given) {
      const int32_t error = (self.launchers_->*launcher)(From<Parameters>::value(given)...);
      if (error != 0)
        throw std::runtime_error(std::string(op) + " could not be launched: " + self.launchers_->error_string(error) +
                                 " (CUDA error " + std::to_string(error) + ").");
    };
  }

 private:
  static std::string last_error() {
    const char* error = dlerror();
    return error != nullptr ? error : "unknown error";
  }

  const Launchers* launchers_ = nullptr;
};

void bind_kernels(py::module_& m) {
  py::class_<Workspace>(m, "DeviceWorkspace", "One rank's workspace, as device kernels are told of it.")
      .def(py::init([](Address addresses, Address state, Address error, int64_t half_bytes, int64_t timeout_ns,
                       uint64_t multicast, int rank, int world) {
             require(0 <= rank && rank < world && world <= cuda::kMaxWorldSize,
                     "rank and world must be those of 1 to 63 ranks");
             return Workspace{pointer<const uint64_t>(addresses),
                              pointer<int64_t>(state),
                              pointer<int64_t>(error),
                              half_bytes,
                              timeout_ns,
                              multicast,
                              rank,
                              world};
           }),
           "addresses"_a, "state"_a, "error"_a, "half_bytes"_a, "timeout_ns"_a, "multicast"_a, "rank"_a, "world"_a)
      .def_readwrite("timeout_ns", &Workspace::timeout_ns);

  py::class_<DeviceKernels> kernels(m, "DeviceKernels",
                                    "The library of device kernels at a path. Parameters are those of launchers.h: "
                                    "tensors as addresses, structs as tuples of what they hold.");
  kernels.def(py::init<const std::string&>(), "path"_a);
  const auto bind = [&](const char* op, auto launcher) {
    kernels.def(op, DeviceKernels::launching(op, launcher), NoGil());
  };
  bind("preload", &Launchers::preload);
  bind("barrier", &Launchers::barrier);
  bind("all_reduce", &Launchers::all_reduce);
  bind("reduce_scatter", &Launchers::reduce_scatter);
  bind("all_gather", &Launchers::all_gather);
  bind("all_to_all", &Launchers::all_to_all);
  bind("all_reduce_rms_norm", &Launchers::all_reduce_rms_norm);
  bind("sum_terms", &Launchers::sum_terms);
  m.attr("DEVICE_KERNELS_ABI") = cuda::kAbiVersion;
}

// Blocks to launch for an op on data of one size, at most `most`, the same on all ranks, and the smallest workspace for
// them. `count` and `chunk` are those of its launcher: elements if the op sums, else bytes. For
// all_reduce_rms_norm `chunk` is the columns, for all_to_all the bytes of a part.
std::pair<int32_t, int64_t> device_plan(const std::string& op, int algorithm, int64_t count, int64_t chunk, int dtype,
                                        int world, int most) {
  const bool sums = op == "all_reduce" || op == "reduce_scatter" || op == "all_reduce_rms_norm";
  require(sums || op == "all_gather" || op == "all_to_all" || op == "barrier", "op is none of the device kernels'");
  const int64_t element_bytes = sums ? static_cast<int64_t>(element_size(to_dtype(dtype))) : 1;
  const int32_t blocks = cuda::suggested_blocks(count * element_bytes, most);
  cuda::Plan plan{world, blocks};
  if (op == "all_reduce") {
    plan = cuda::all_reduce_plan(to_algorithm(algorithm), count, element_bytes, world, blocks);
  } else if (op == "all_reduce_rms_norm") {
    const int64_t rows = cuda::ceil_div(count, chunk);
    plan = cuda::all_reduce_rms_norm_plan(to_algorithm(algorithm), rows, chunk, element_bytes, world, blocks);
  } else if (op != "barrier") {
    plan = cuda::exchange_plan(chunk * element_bytes, world, blocks);
  }
  return {blocks, plan.workspace_bytes()};
}

}  // namespace

void bind_gpu(py::module_& m) {
  bind_driver(m);
  bind_communicator(m);
  bind_copy_engine(m);
  bind_kernels(m);
  m.def("device_plan", &device_plan, "op"_a, "algorithm"_a, "count"_a, "chunk"_a, "dtype"_a, "world"_a, "most"_a,
        "(blocks to launch, bytes of the smallest workspace for them)");
}

}  // namespace fused_tp::bindings

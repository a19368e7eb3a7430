// GPU bindings: the CUDA driver, NCCL, copy engines and the library of device kernels, each loaded on demand. Python
// passes streams as ints, the driver's handles (torch's stream.cuda_stream); 0 is the default stream.
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

using Range = std::pair<Address, size_t>;  // (address, bytes)

template <>
struct Argument<copy_engine::Memory> {
  using PythonType = Range;
  static copy_engine::Memory convert(const Range& argument) {
    return {static_cast<driver::DeviceAddress>(argument.first), argument.second};
  }
};
template <>
struct Argument<std::vector<copy_engine::Memory>> {
  using PythonType = std::vector<Range>;
  static std::vector<copy_engine::Memory> convert(const PythonType& argument) {
    std::vector<copy_engine::Memory> memories;
    for (const Range& range : argument) memories.push_back(Argument<copy_engine::Memory>::convert(range));
    return memories;
  }
};
template <>
struct Argument<const std::vector<copy_engine::Memory>&> : Argument<std::vector<copy_engine::Memory>> {};
template <>
struct Argument<std::optional<driver::Stream>> {
  using PythonType = std::optional<Address>;
  static std::optional<driver::Stream> convert(PythonType argument) {
    return argument ? std::optional(pointer<CUstream_st>(*argument)) : std::nullopt;
  }
};
template <>
struct Argument<copy_engine::Op> {
  using PythonType = int;
  static copy_engine::Op convert(int argument) { return static_cast<copy_engine::Op>(argument); }
};

namespace {

using driver::Driver;
using driver::Stream;

Stream to_stream(Address handle) { return pointer<CUstream_st>(handle); }

// ---- the driver ------------------------------------------------------------------------------------------------

// Waits until all work in the stream has completed, for at most `seconds`, and returns true if it has. It waits in
// slices of 50 ms so that Ctrl-C can end the wait.
bool synchronize(const Driver& driver, int device, Address stream, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  while (true) {
    const double waited_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const double slice_seconds = std::min(0.05, seconds - waited_seconds);
    {
      const Driver::ContextGuard current(driver, device);
      if (driver.synchronize(to_stream(stream), slice_seconds)) return true;
    }
    if (slice_seconds < 0.05) return false;
    check_signals();
  }
}

void bind_driver(py::module_& m) {
  py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver", "The CUDA driver, loaded at run time.")
      .def(py::init([](const std::string& path) { return std::const_pointer_cast<Driver>(Driver::open(path)); }),
           "path"_a = "libcuda.so.1", NoGil(),
           "Raises RuntimeError if there is no driver, or if it is older than CUDA 12.0.")
      .def("has_stream_memory_ops", &Driver::has_stream_memory_ops, "device"_a,
           "True if the device's streams can write 64-bit words and wait for them.")
      .def("synchronize", &synchronize, "device"_a, "stream"_a, "seconds"_a, NoGil(),
           "Waits for at most `seconds`. Returns True if all work in the stream has completed.");
}

// ---- NCCL ------------------------------------------------------------------------------------------------------

using nccl::Communicator;
using nccl::Ticket;
using nccl::Transfer;

// Returns an owner of the communicator that releases the GIL, if the thread holds it, before it destroys the
// communicator. The destruction waits for ops in flight, and other Python threads must be able to run meanwhile.
std::shared_ptr<Communicator> destroy_without_gil(std::shared_ptr<Communicator> communicator) {
  Communicator* const raw = communicator.get();
  return std::shared_ptr<Communicator>(raw, [owner = std::move(communicator)](Communicator*) mutable {
    if (Py_IsInitialized() && PyGILState_Check()) {
      py::gil_scoped_release release;
      owner.reset();
    } else {
      owner.reset();
    }
  });
}

void close_at_exit() {
  static const bool is_registered = [] {
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
      py::gil_scoped_release release;
      Communicator::close_all();
    }));
    return true;
  }();
  (void)is_registered;
}

std::shared_ptr<Communicator> create_communicator(const std::shared_ptr<nccl::Library>& library,
                                                  const std::shared_ptr<Driver>& driver, int device,
                                                  const py::bytes& unique_id, int rank, int size,
                                                  double timeout_seconds) {
  const auto id = parse_struct<nccl::UniqueId>(unique_id, "a unique id");
  close_at_exit();
  Communicator::Options options;
  options.timeout_seconds = timeout_seconds;
  options.check_interrupt = [] {
    if (Py_IsInitialized()) check_signals();  // the communicator may outlive the interpreter
  };
  py::gil_scoped_release release;
  return destroy_without_gil(Communicator::create(library, driver, device, id, rank, size, std::move(options)));
}

using Transfers = std::vector<std::tuple<int, Address, size_t>>;  // (peer, address, bytes)

std::vector<Transfer> to_transfers(const Transfers& sends, const Transfers& receives) {
  std::vector<Transfer> all_transfers;
  const auto add = [&](const Transfers& transfers, Transfer::Kind kind) {
    for (const auto& [peer, address, bytes] : transfers)
      if (bytes > 0) all_transfers.push_back({kind, peer, pointer<>(address), bytes});
  };
  add(sends, Transfer::kSend);
  add(receives, Transfer::kReceive);
  return all_transfers;
}

void bind_communicator(py::module_& m) {
  using nccl::Library;
  py::class_<Library, std::shared_ptr<Library>>(m, "NcclLibrary", "NCCL, loaded at run time.")
      .def(py::init([](const std::string& path) { return std::const_pointer_cast<Library>(Library::open(path)); }),
           "path"_a = "",
           "Loads the library at `path`. Without a path: the one that this process has loaded already, else the one "
           "that "
           "the dynamic loader finds. Raises FusedTPError if there is none, or if it is too old.")
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version", &Library::version, "Version as a number, such as 22703 for 2.27.3.")
      .def_property_readonly("version_text", &Library::version_text)
      .def_property_readonly("has_revoke", &Library::has_revoke, "True if it has ncclCommRevoke (NCCL 2.29).")
      .def_property_readonly("has_shared_devices", &Library::has_shared_devices,
                             "True if it supports several ranks on one GPU (NCCL 2.30).")
      .def(
          "make_id",
          [](const Library& library) {
            const nccl::UniqueId id = library.make_id();
            return py::bytes(id.internal, sizeof id.internal);
          },
          "Returns the unique id of a new communicator, which the calling rank passes to all ranks.");

  py::class_<Ticket>(m, "NcclTicket", "An op that a communicator has enqueued.")
      .def_readonly("captured", &Ticket::is_captured, "True if the op is part of a CUDA graph.");
  py::class_<Communicator, std::shared_ptr<Communicator>>(
      m, "Communicator",
      "A NCCL communicator with its own stream, whose ops have deadlines. Once it has failed, `check` and every op "
      "raise "
      "the error: CollectiveTimeoutError, PeerLostError or FusedTPError.")
      .def(py::init(&create_communicator), "library"_a, "driver"_a, "device"_a, "unique_id"_a, "rank"_a, "size"_a,
           "timeout_seconds"_a,
           "Joins the ranks that have the same id. Waits for all of them, for at most `timeout_seconds`.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("device", &Communicator::device)
      .def_property_readonly(
          "stream", [](const Communicator& communicator) { return reinterpret_cast<Address>(communicator.stream()); })
      .def_property_readonly("calls", &Communicator::calls, "Number of ops so far.")
      .def_property("timeout_seconds", &Communicator::timeout, &Communicator::set_timeout,
                    "Deadline of ops that are enqueued from now on.")
      .def("all_gather", wrap(&Communicator::all_gather), "in"_a, "out"_a, "bytes_per_rank"_a, "after"_a, NoGil())
      .def(
          "exchange",
          [](Communicator& communicator, const Transfers& sends, const Transfers& receives,
             std::optional<Address> after) {
            return communicator.exchange(to_transfers(sends, receives),
                                         Argument<std::optional<Stream>>::convert(after));
          },
          "sends"_a, "receives"_a, "after"_a, NoGil(),
          "Enqueues all sends and receives, each (peer, address, bytes), as one NCCL group. With a stream `after`, "
          "they "
          "begin after the work already enqueued in it.")
      .def("wait", wrap(&Communicator::wait), "ticket"_a, "stream"_a, NoGil(),
           "Makes `stream` wait for the end of the op.")
      .def("has_begun", &Communicator::has_begun, "ticket"_a, NoGil(),
           "True if the op waits only for peers, no longer for work of this rank.")
      .def("has_ended", &Communicator::has_ended, "ticket"_a, NoGil())
      .def_property_readonly("failure", &Communicator::failure, "Error message; empty if it has not failed.")
      .def("check", &Communicator::check, NoGil(), "Raises the error if it has failed.")
      .def("lose", &Communicator::lose, "rank"_a, "how"_a, NoGil(),
           "Marks a rank as lost: ops in flight are aborted, and every later call raises PeerLostError.")
      .def("abort", &Communicator::abort, "why"_a, NoGil(),
           "Aborts ops in flight; every later call raises FusedTPError.")
      .def("close", py::overload_cast<>(&Communicator::close), NoGil(),
           "Waits for ops in flight, within the deadline, and frees the communicator.");
}

// ---- copy engines ----------------------------------------------------------------------------------------------

// Leaks a workspace in a forked child: the watchdog thread does not exist there, and destroying the condition variable
// on which that thread waited would block.
struct DeleteUnlessForked {
  void operator()(copy_engine::Workspace* workspace) const {
    if (!workspace->is_forked_child()) delete workspace;
  }
};

// Every call releases the GIL: the tests' fake driver runs the default stream synchronously, including waits for peers,
// which may be threads of this process.
void bind_copy_engine(py::module_& m) {
  using copy_engine::Workspace;
  using Holder = std::unique_ptr<Workspace, DeleteUnlessForked>;
  py::class_<Workspace::Call>(m, "CopyEngineCall", "One call of an op, from its first transfer to its gates.");
  py::class_<Workspace, Holder>(m, "CopyEngineWorkspace",
                                "Gathers and scatters of one group by the GPU's copy engines.")
      .def(py::init([](const std::string& library, int device, int rank, const std::vector<Address>& addresses,
                       int64_t gather_bytes, int64_t scatter_bytes, const std::vector<Address>& streams,
                       const py::object&) {
             require(rank >= 0 && rank < static_cast<int>(addresses.size()),
                     "rank must be from 0 to len(addresses) - 1");
             require(gather_bytes >= 0 && scatter_bytes >= 0, "sizes must not be negative");
             require(streams.empty() || streams.size() >= (addresses.size() > 1 ? 3 : 2),
                     "streams must be empty, or the watchdog's stream, a send stream and one or more pull streams");
             std::vector<Stream> stream_handles;
             for (const Address stream : streams) stream_handles.push_back(to_stream(stream));
             auto driver = Driver::open(library);
             require(driver->has_stream_memory_ops(device),
                     "this device does not support 64-bit stream memory operations");
             return Holder(new Workspace(std::move(driver), device, rank,
                                         std::vector<driver::DeviceAddress>(addresses.begin(), addresses.end()),
                                         gather_bytes, scatter_bytes, std::move(stream_handles)));
           }),
           "library"_a, "device"_a, "rank"_a, "addresses"_a, "gather_bytes"_a, "scatter_bytes"_a,
           "streams"_a = std::vector<Address>(), "owner"_a = py::none(), NoGil(), py::keep_alive<1, 9>(),
           "`streams`: handles of the watchdog's stream, the send stream and the pull streams, which `owner` keeps "
           "alive. "
           "Empty: the workspace creates its own.")
      .def_static(
          "bytes",
          [](int world, int64_t gather_bytes, int64_t scatter_bytes) {
            return copy_engine::Layout(world, gather_bytes, scatter_bytes).bytes();
          },
          "world"_a, "gather_bytes"_a, "scatter_bytes"_a, "Size of a rank's workspace, in bytes.")
      .def("begin", wrap(&Workspace::begin), "op"_a, "stream"_a, "timeout_seconds"_a, NoGil())
      .def("gather", wrap(&Workspace::gather), "call"_a, "stream"_a, "shard"_a, "to"_a, NoGil(),
           "Starts a gather of `shard`, (address, bytes), of this rank. `to`: destinations of the shards, by rank.")
      .def("wait_for", wrap(&Workspace::wait_for), "call"_a, "stream"_a, "peer"_a, NoGil())
      .def("offer", wrap(&Workspace::offer), "call"_a, "stream"_a, "op"_a, "shard"_a, "to"_a, NoGil(),
           "Starts a gather for a kernel that waits for shards itself. Returns the channel, for `arrived` and `order`.")
      .def(
          "arrived", [](Workspace& self, int index) { return self.layout().arrived_word(index, 0); }, "channel"_a,
          "Index of the first of W words in this rank's workspace: word r becomes 1 once the shard of rank r has "
          "arrived.")
      .def(
          "order", [](Workspace& self, int index) { return self.layout().order_word(index); }, "channel"_a,
          "Index of the first of W words in this rank's workspace for the kernel's own use; 0 when it begins.")
      .def_property_readonly(
          "expired",
          [](Workspace& self) {
            return self.watchdog().word_address(copy_engine::expired_word(self.layout().world()));
          },
          "Device address of a word that a kernel sets if its wait for a shard has timed out.")
      .def("scatter", wrap(&Workspace::scatter), NoGil(), "Begins a scatter and returns its channel.")
      .def("push", wrap(&Workspace::push), "call"_a, "stream"_a, "scatter"_a, "peer"_a, "block"_a, NoGil())
      .def("receive", wrap(&Workspace::receive), "call"_a, "stream"_a, "scatter"_a, NoGil())
      .def("release", wrap(&Workspace::release), "stream"_a, "scatter"_a, NoGil())
      .def("finish", wrap(&Workspace::finish), "call"_a, "stream"_a, "results"_a, NoGil(),
           "Ends a call. If it fails, `results`, each (address, bytes), become NaN.")
      .def("wait_idle", wrap(&Workspace::wait_idle), "seconds"_a, NoGil(),
           "Waits for at most `seconds`. Returns True if all enqueued work has completed.")
      .def(
          "slot", [](Workspace& self, int scatter, int sender) { return self.layout().slot(scatter, sender); },
          "scatter"_a, "sender"_a, "Byte offset of the block from `sender` in this rank's workspace.")
      .def_property_readonly("slot_bytes", [](Workspace& self) { return self.layout().slot_bytes(); })
      .def_property_readonly("failure", [](Workspace& self) { return static_cast<int>(self.watchdog().failure()); })
      .def_property_readonly("message", [](Workspace& self) { return self.watchdog().message(); })
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
    throw py::value_error("the algorithm number is " + std::to_string(number) + "; it must be 0 to 2");
  return static_cast<Algorithm>(number);
}

}  // namespace

template <>
struct Argument<Algorithm> {
  using PythonType = int;
  static Algorithm convert(int argument) { return to_algorithm(argument); }
};
template <>
struct Argument<const Workspace*> {
  using PythonType = const Workspace&;
  static const Workspace* convert(const Workspace& argument) { return &argument; }
};
template <>
struct Argument<cuda::Bias> {
  using PythonType = std::pair<Address, int64_t>;
  static cuda::Bias convert(const PythonType& argument) { return {pointer<>(argument.first), argument.second}; }
};

// A temporary that converts to a pointer to its struct. It lives until the end of the full expression, so until the
// launcher that receives the pointer returns.
template <typename Struct>
struct TemporaryStruct {
  Struct value;
  operator const Struct*() const { return &value; }
};
template <>
struct Argument<const cuda::AllToAllLayout*> {
  using PythonType = const std::array<int64_t, 9>&;  // the members in order
  static TemporaryStruct<cuda::AllToAllLayout> convert(PythonType l) {
    return {{l[0], l[1], l[2], l[3], l[4], l[5], l[6], l[7], l[8]}};
  }
};
template <>
struct Argument<const cuda::RmsNorm*> {
  // (residual, weight, normed, new_residual, rows, columns, eps)
  using PythonType = const std::tuple<Address, Address, Address, Address, int64_t, int64_t, double>&;
  static TemporaryStruct<cuda::RmsNorm> convert(PythonType n) {
    return {{pointer<>(std::get<0>(n)), pointer<>(std::get<1>(n)), pointer<>(std::get<2>(n)), pointer<>(std::get<3>(n)),
             std::get<4>(n), std::get<5>(n), std::get<6>(n)}};
  }
};

namespace {

// The library of device kernels. It is never unloaded: kernels may still run at process exit, and unloading would shut
// down the CUDA runtime that is linked into it.
class DeviceKernels {
 public:
  explicit DeviceKernels(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error("The device kernels could not be loaded: " + last_error());
    const auto launchers = reinterpret_cast<decltype(&fused_tp_launchers)>(dlsym(library, "fused_tp_launchers"));
    if (launchers == nullptr) throw std::runtime_error(path + " is not a library of device kernels: " + last_error());
    launchers_ = launchers();
    if (launchers_->abi_version != cuda::kAbiVersion)
      throw std::runtime_error("The device kernels in " + path + " have interface version " +
                               std::to_string(launchers_->abi_version) + " and this fused_tp needs version " +
                               std::to_string(cuda::kAbiVersion) + ": reinstall fused_tp, which builds both parts.");
  }

  // Returns a function that calls a launcher and throws its CUDA error. Call it without the GIL: a launch may block
  // while the launch queue of the GPU is full.
  template <typename... Parameters>
  static auto launching(const char* op, int32_t (*Launchers::*launcher)(Parameters...)) {
    return [op, launcher](const DeviceKernels& self, typename Argument<Parameters>::PythonType... arguments) {
      const int32_t error = (self.launchers_->*launcher)(Argument<Parameters>::convert(arguments)...);
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
  py::class_<Workspace>(m, "DeviceWorkspace", "One rank's workspace: the arguments that device kernels take.")
      .def(py::init([](Address addresses, Address state, Address error, int64_t half_bytes, int64_t timeout_ns,
                       uint64_t multicast, int rank, int world) {
             require(0 <= rank && rank < world && world <= cuda::kMaxWorldSize,
                     "world must be 1 to 63, and rank from 0 to world - 1");
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

  py::class_<DeviceKernels> kernels(
      m, "DeviceKernels",
      "The library of device kernels at a path. Methods take the parameters of launchers.h: "
      "tensors as addresses, structs as tuples of their members.");
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

// Returns the number of blocks to launch, at most `max_blocks`, and the bytes of the smallest workspace for them. All
// ranks must use the same numbers. `count` and `chunk` are those of the op's launcher: elements if the op sums, else
// bytes. For all_reduce_rms_norm `chunk` is the number of columns, for all_to_all the bytes of a part.
std::pair<int32_t, int64_t> device_plan(const std::string& op, int algorithm, int64_t count, int64_t chunk, int dtype,
                                        int world, int max_blocks) {
  const bool is_sum = op == "all_reduce" || op == "reduce_scatter" || op == "all_reduce_rms_norm";
  require(is_sum || op == "all_gather" || op == "all_to_all" || op == "barrier",
          "op must be the name of a collective of DeviceKernels");
  const int64_t element_bytes = is_sum ? static_cast<int64_t>(element_size(to_dtype(dtype))) : 1;
  const int32_t blocks = cuda::suggested_blocks(count * element_bytes, max_blocks);
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
  m.def("device_plan", &device_plan, "op"_a, "algorithm"_a, "count"_a, "chunk"_a, "dtype"_a, "world"_a, "max_blocks"_a,
        "Returns (blocks to launch, bytes of the smallest workspace for them).");
}

}  // namespace fused_tp::bindings

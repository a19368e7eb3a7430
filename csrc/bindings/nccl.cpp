// NCCL: the library, and communicators with deadlines.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "nccl/communicator.h"
#include "nccl/library.h"

namespace fused_tp::bindings {

using namespace fused_tp::nccl;  // NOLINT: this file binds that namespace

namespace {

UniqueId to_id(const py::bytes& packed) {
  const std::string text = packed;
  UniqueId id{};
  if (text.size() != sizeof id)
    throw py::value_error("a unique id has " + std::to_string(sizeof id) + " bytes, not " +
                          std::to_string(text.size()));
  std::memcpy(&id, text.data(), sizeof id);
  return id;
}

ReduceOp to_reduce_op(int number) {
  if (number < 0 || number >= kNumReduceOps)
    throw py::value_error("unknown reduction number " + std::to_string(number));
  return static_cast<ReduceOp>(number);
}

After to_after(std::optional<Address> stream, std::optional<Address> event) {
  require(!(stream && event), "an op begins after a stream or after an event, not both");
  if (stream) return After::stream(reinterpret_cast<Stream>(*stream));
  if (event) return After::event(reinterpret_cast<Event>(*event));
  return After::nothing();
}

// Its end may take as long as its ops in flight: whoever lets go of it last, with the GIL or without, waits without it.
std::shared_ptr<Communicator> ending_without_gil(std::shared_ptr<Communicator> made) {
  if (!made) return nullptr;
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

void bind_library(py::module_& m) {
  py::class_<Library, std::shared_ptr<Library>>(m, "NcclLibrary", "NCCL, bound at run time.")
      .def(py::init([](const std::string& path, const std::string& otherwise) {
             return std::const_pointer_cast<Library>(Library::open(path, otherwise));
           }),
           py::arg("path") = "", py::arg("otherwise") = "",
           "The library at `path`; without one, that which this process has loaded already, else that at `otherwise`, "
           "else what the loader finds. Raises FusedTPError where there is none, or one too old.")
      .def_property_readonly("path", &Library::path)
      .def_property_readonly("version", &Library::version, "22703 for 2.27.3.")
      .def_property_readonly("version_text", &Library::version_text)
      .def_property_readonly("has_windows", &Library::has_windows, "Registers memory for zero-copy (2.27).")
      .def_property_readonly("has_zero_cta", &Library::has_zero_cta, "Collectives by the copy engines alone (2.28).")
      .def_property_readonly("has_revoke", &Library::has_revoke, "Stops a communicator and keeps it (2.29).")
      .def_property_readonly("has_shared_devices", &Library::has_shared_devices, "Several ranks on one GPU (2.30).")
      .def(
          "make_id",
          [](const Library& library) {
            UniqueId id{};
            {
              py::gil_scoped_release release;
              id = library.make_id();
            }
            return py::bytes(id.internal, sizeof id.internal);
          },
          "The unique id of a communicator: one rank makes it and gives it to all.");
  m.attr("OLDEST_NCCL") = Library::kOldest;
}

void bind_communicator(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  const auto after_stream = py::arg("after_stream") = py::none();
  const auto after_event = py::arg("after_event") = py::none();

  py::class_<Ticket>(m, "Ticket", "An op that was enqueued.")
      .def_readonly("op", &Ticket::op)
      .def_readonly("number", &Ticket::number, "Of the call, on this communicator.")
      .def_readonly("captured", &Ticket::captured, "It is part of a CUDA graph: the host cannot wait for it.")
      .def_property_readonly(
          "event", [](const Ticket& ticket) { return reinterpret_cast<Address>(ticket.ended->get()); },
          "Done once the op has ended, as long as the ticket is kept.");

  py::class_<Communicator, std::shared_ptr<Communicator>>(
      m, "Communicator",
      "A NCCL communicator with a stream of its own, whose ops have deadlines.\n\n"
      "Ops are enqueued and return a Ticket; none waits on the host. They begin after everything that `after_stream` "
      "holds by then, or after an event, and after the communicator's earlier ops. Addresses and handles are ints.\n\n"
      "Raises, from any op once it has failed: CollectiveTimeoutError, PeerLostError, FusedTPError.")
      .def(py::init([](const std::shared_ptr<Library>& library, const std::shared_ptr<Driver>& driver, int device,
                       const py::bytes& unique_id, int rank, int size, double timeout_seconds, bool zero_cta) {
             const UniqueId id = to_id(unique_id);
             close_at_exit();
             Communicator::Options options;
             options.timeout_seconds = timeout_seconds;
             options.zero_cta = zero_cta;
             options.interrupted = [] {
               if (Py_IsInitialized()) check_signals();  // else the interpreter has gone before the communicator
             };
             py::gil_scoped_release release;
             return ending_without_gil(
                 Communicator::create(library, driver, device, id, rank, size, std::move(options)));
           }),
           py::arg("library"), py::arg("driver"), py::arg("device"), py::arg("unique_id"), py::arg("rank"),
           py::arg("size"), py::arg("timeout_seconds"), py::arg("zero_cta") = false,
           "Joins the ranks that have the same id; waits for all of them, at most `timeout_seconds`.")
      .def(
          "split",
          [](Communicator& communicator, int color, int key) {
            py::gil_scoped_release release;
            return ending_without_gil(communicator.split(color, key));
          },
          py::arg("color"), py::arg("key"),
          "A communicator of the ranks with the same color, ordered by key. All ranks call it; a negative color gives "
          "None.")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("device", &Communicator::device)
      .def_property_readonly(
          "stream", [](const Communicator& communicator) { return reinterpret_cast<Address>(communicator.stream()); })
      .def_property_readonly("calls", &Communicator::calls, "How many ops there have been.")
      .def_property_readonly("zero_cta", &Communicator::zero_cta, "Whether collectives may use the copy engines alone.")
      .def_property("timeout_seconds", &Communicator::timeout, &Communicator::set_timeout,
                    "The deadline of ops from now on.")
      .def_property_readonly("failure", &Communicator::failure, "Why it is unusable; empty while it is not.")
      .def("check", &Communicator::check, release_gil(), "Raises what it has failed with, if it has.")
      .def(
          "all_gather",
          [](Communicator& communicator, Address in, Address out, size_t bytes, std::optional<Address> stream,
             std::optional<Address> event) {
            const After after = to_after(stream, event);
            py::gil_scoped_release release;
            return communicator.all_gather(pointer<>(in), pointer<>(out), bytes, after);
          },
          py::arg("source"), py::arg("out"), py::arg("bytes_per_rank"), after_stream, after_event)
      .def(
          "reduce_scatter",
          [](Communicator& communicator, Address in, Address out, size_t count, int dtype, int op,
             std::optional<Address> stream, std::optional<Address> event) {
            const After after = to_after(stream, event);
            const DType type = to_dtype(dtype);
            const ReduceOp reduction = to_reduce_op(op);
            py::gil_scoped_release release;
            return communicator.reduce_scatter(pointer<>(in), pointer<>(out), count, type, reduction, after);
          },
          py::arg("source"), py::arg("out"), py::arg("count_per_rank"), py::arg("dtype"), py::arg("op") = 0,
          after_stream, after_event)
      .def(
          "all_reduce",
          [](Communicator& communicator, Address in, Address out, size_t count, int dtype, int op,
             std::optional<Address> stream, std::optional<Address> event) {
            const After after = to_after(stream, event);
            const DType type = to_dtype(dtype);
            const ReduceOp reduction = to_reduce_op(op);
            py::gil_scoped_release release;
            return communicator.all_reduce(pointer<>(in), pointer<>(out), count, type, reduction, after);
          },
          py::arg("source"), py::arg("out"), py::arg("count"), py::arg("dtype"), py::arg("op") = 0, after_stream,
          after_event, "The sum (op 0), maximum (1) or minimum (2) over ranks; NCCL's, in an order that it chooses.")
      .def(
          "broadcast",
          [](Communicator& communicator, Address in, Address out, size_t bytes, int root, std::optional<Address> stream,
             std::optional<Address> event) {
            const After after = to_after(stream, event);
            py::gil_scoped_release release;
            return communicator.broadcast(pointer<>(in), pointer<>(out), bytes, root, after);
          },
          py::arg("source"), py::arg("out"), py::arg("bytes"), py::arg("root"), after_stream, after_event)
      .def(
          "exchange",
          [](Communicator& communicator, const std::vector<std::tuple<int, Address, size_t>>& sends,
             const std::vector<std::tuple<int, Address, size_t>>& receives, std::optional<Address> stream,
             std::optional<Address> event) {
            std::vector<Transfer> transfers;
            for (const auto& [peer, data, bytes] : sends)
              transfers.push_back({Transfer::kSend, peer, pointer<>(data), bytes});
            for (const auto& [peer, data, bytes] : receives)
              transfers.push_back({Transfer::kReceive, peer, pointer<>(data), bytes});
            const After after = to_after(stream, event);
            py::gil_scoped_release release;
            return communicator.exchange(transfers, after);
          },
          py::arg("sends"), py::arg("receives"), after_stream, after_event,
          "All at once; each is (peer, address, bytes), and between two ranks they match in order.")
      .def(
          "wait",
          [](Communicator& communicator, const Ticket& ticket, std::optional<Address> stream) {
            py::gil_scoped_release release;
            if (stream) {
              communicator.wait(ticket, reinterpret_cast<Stream>(*stream));
            } else {
              communicator.wait(ticket);
            }
          },
          py::arg("ticket"), py::arg("stream") = py::none(),
          "The stream, or without one the host, goes on once the op has ended. The host waits at most the timeout.")
      .def(
          "allocate",
          [](Communicator& communicator, size_t bytes) {
            return reinterpret_cast<Address>(communicator.allocate(bytes));
          },
          py::arg("bytes"), release_gil(), "Memory of the device that can be registered. Given back by `free`.")
      .def(
          "free", [](Communicator& communicator, Address data) { communicator.free(pointer<>(data)); },
          py::arg("address"), release_gil())
      .def_property_readonly("registers", &Communicator::registers,
                             "Whether the library registers memory; else `register_window` does nothing.")
      .def(
          "register_window",
          [](Communicator& communicator, Address data, size_t bytes) {
            communicator.register_window(pointer<>(data), bytes);
          },
          py::arg("address"), py::arg("bytes"), release_gil(),
          "Zero-copy for memory from `allocate`. All ranks register alike, in the same order.")
      .def(
          "deregister_window",
          [](Communicator& communicator, Address data) { communicator.deregister_window(pointer<>(data)); },
          py::arg("address"), release_gil())
      .def(
          "lose", &Communicator::lose, py::arg("rank"), py::arg("how"), release_gil(),
          "That rank's process is known to have ended. Ops in flight are aborted, and everything raises PeerLostError.")
      .def("abort", &Communicator::abort, py::arg("why"), release_gil(),
           "Ops in flight are aborted, and everything raises FusedTPError.")
      .def("close", py::overload_cast<>(&Communicator::close), release_gil(),
           "Waits for what is in flight, within the deadline, and gives everything back.");
}

}  // namespace

void bind_nccl(py::module_& m) {
  bind_library(m);
  bind_communicator(m);
}

}  // namespace fused_tp::bindings

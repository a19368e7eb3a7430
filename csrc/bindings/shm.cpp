// Ranks of one host: shared memory, signals, collectives.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "shm/collectives.h"
#include "shm/group.h"
#include "shm/kernels.h"

namespace fused_tp::bindings {

using namespace fused_tp::shm;  // NOLINT: this file binds that namespace

namespace {

ReduceOp to_reduce_op(int number) {
  if (number < 0 || number >= kNumReduceOps)
    throw py::value_error("unknown reduction number " + std::to_string(number));
  return static_cast<ReduceOp>(number);
}

// A range of shared memory as a Python buffer; torch.frombuffer keeps it alive as long as the tensor.
class Memory {
 public:
  Memory(std::shared_ptr<Segment> segment, char* data, size_t bytes)
      : segment_(std::move(segment)), data_(data), bytes_(bytes) {}
  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  py::buffer_info buffer() { return {data_, 1, "B", static_cast<py::ssize_t>(bytes_)}; }
  Address address() const { return reinterpret_cast<Address>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Segment> segment_;
  char* data_;
  size_t bytes_;
};

// Memory of this rank's pool; goes back to the pool with the last tensor over it.
class PooledMemory : public Memory {
 public:
  PooledMemory(std::shared_ptr<Group> group, size_t offset, size_t bytes)
      : Memory(group->segment(group->rank()), group->segment(group->rank())->data() + offset, bytes),
        group_(std::move(group)),
        offset_(offset) {}
  ~PooledMemory() override { group_->heap().release(offset_); }
  size_t offset() const { return offset_; }

 private:
  std::shared_ptr<Group> group_;
  size_t offset_;
};

SegmentAddress to_address(const py::bytes& packed) {
  const std::string text = packed;
  SegmentAddress address;
  if (text.size() != sizeof address) throw py::value_error("an address of shared memory has the wrong length");
  std::memcpy(&address, text.data(), sizeof address);
  return address;
}

Signature to_signature(const std::string& op, int dtype, const std::vector<int64_t>& dims) {
  Signature signature{};
  if (op.size() >= sizeof signature.op)
    throw py::value_error("the op name '" + op + "' is longer than " + std::to_string(sizeof signature.op - 1));
  if (dims.size() > kMaxDims)
    throw py::value_error("a signature has at most " + std::to_string(kMaxDims) + " dims, not " +
                          std::to_string(dims.size()));
  std::memcpy(signature.op, op.data(), op.size());
  signature.dtype = static_cast<int32_t>(to_dtype(dtype));
  signature.n_dims = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), signature.dims);
  return signature;
}

void bind_group(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Memory, std::unique_ptr<Memory>>(m, "Memory", py::buffer_protocol())
      .def_buffer(&Memory::buffer)
      .def_property_readonly("address", &Memory::address)
      .def("__len__", &Memory::bytes);
  py::class_<PooledMemory, Memory, std::unique_ptr<PooledMemory>>(m, "PooledMemory")
      .def_property_readonly("offset", &PooledMemory::offset, "Where it starts in this rank's segment, in bytes.");

  py::class_<Call>(m, "Call", "One collective call in flight on this rank.")
      .def_property_readonly("number", &Call::number)
      .def("workspace_address",
           [](Call& call, int rank) {
             py::gil_scoped_release release;
             return reinterpret_cast<Address>(call.workspace(rank));
           })
      .def("workspace",
           [](Call& call, int rank, const std::shared_ptr<Group>& group) {
             char* data = nullptr;
             size_t bytes = 0;
             {
               py::gil_scoped_release release;
               data = call.workspace(rank);
               bytes = call.workspace_bytes(rank);
             }
             return std::make_unique<Memory>(group->segment(rank), data, bytes);
           })
      .def("signal", &Call::signal, py::arg("stage"))
      .def("wait", &Call::wait, py::arg("rank"), py::arg("stage"), release_gil())
      .def("wait_all", &Call::wait_all, py::arg("stage"), release_gil())
      .def("end", &Call::end, release_gil())
      .def("abandon", &Call::abandon);

  py::class_<Group, std::shared_ptr<Group>>(m, "Group", "Ranks of one host that share memory.")
      .def(py::init([](int rank, int size, size_t reserve_bytes, std::function<double()> timeout_seconds) {
             return std::make_shared<Group>(rank, size, reserve_bytes, std::move(timeout_seconds), check_signals);
           }),
           py::arg("rank"), py::arg("size"), py::arg("reserve_bytes"), py::arg("timeout_seconds"))
      .def_property_readonly("address",
                             [](const Group& group) {
                               const SegmentAddress address = group.address();
                               return py::bytes(reinterpret_cast<const char*>(&address), sizeof address);
                             })
      .def("connect",
           [](Group& group, const std::vector<py::bytes>& packed) {
             std::vector<SegmentAddress> addresses;
             for (const py::bytes& address : packed) addresses.push_back(to_address(address));
             group.connect(addresses);
           })
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size)
      .def_property_readonly("calls", &Group::calls, "How many this rank has begun.")
      .def_property_readonly("waited_seconds", &Group::waited_seconds)
      .def_property_readonly("bytes_in_use", [](Group& group) { return group.heap().bytes_in_use(); })
      .def_property_readonly("high_water_bytes", [](Group& group) { return group.heap().high_water(); })
      .def("close", &Group::close)
      .def("give_up", &Group::give_up, py::arg("because"),
           "Leaves the group: later calls of this rank raise, and peers that wait for it are told that it has left.")
      .def("dead_peer", &Group::dead_peer, "A peer whose process has ended, or -1.")
      .def("allocate",
           [](const std::shared_ptr<Group>& group, size_t bytes) {
             size_t offset = 0;
             {
               py::gil_scoped_release release;  // another thread may begin a call, and want the GIL while it waits
               offset = group->allocate(bytes);
             }
             return std::make_unique<PooledMemory>(group, offset, bytes);
           })
      .def(
          "at",
          [](const std::shared_ptr<Group>& group, int rank, size_t offset, size_t bytes) {
            require(rank >= 0 && rank < group->size(), "rank is not one of the group's");
            const auto& segment = group->segment(rank);
            require(offset <= segment->bytes() && bytes <= segment->bytes() - offset,
                    "the range lies outside of the rank's shared memory");
            return std::make_unique<Memory>(segment, segment->data() + offset, bytes);
          },
          py::arg("rank"), py::arg("offset"), py::arg("bytes"))
      .def("put_signal", [](Group& group, Address word) { group.put_signal(pointer<uint32_t>(word)); })
      .def("wait_signal",
           [](Group& group, Address word, uint32_t target, int source, double timeout_seconds) {
             py::gil_scoped_release release;
             group.wait_signal(pointer<uint32_t>(word), target, source, timeout_seconds);
           })
      .def(
          "begin",
          [](Group& group, const std::string& op, int dtype, const std::vector<int64_t>& dims, size_t bytes,
             bool reuse) {
            const Signature signature = to_signature(op, dtype, dims);
            py::gil_scoped_release release;
            return group.begin(signature, bytes, true, reuse);
          },
          py::arg("op"), py::arg("dtype"), py::arg("dims"), py::arg("bytes"), py::arg("reuse") = false,
          "`reuse`: wait for peers that are still in calls which this rank has ended, and use the memory of those.")
      .def("settled", &Group::settled, "Whether `begin` with `reuse` would not wait.", release_gil())
      .def(
          "begin_in",
          [](Group& group, const std::string& op, int dtype, const std::vector<int64_t>& dims,
             const PooledMemory& memory) {
            const Signature signature = to_signature(op, dtype, dims);
            py::gil_scoped_release release;
            return group.begin_in(signature, memory.offset(), memory.bytes());
          },
          py::arg("op"), py::arg("dtype"), py::arg("dims"), py::arg("memory"),
          "`begin` with memory of this rank's pool as its workspace, which stays the caller's.");
}

void bind_collectives(py::module_& m) {
  auto same_size = [](const Group& group, const std::vector<size_t>& counts) {
    require(counts.size() == static_cast<size_t>(group.size()), "one count is needed for each rank");
  };
  // `called` and `dims` are the op and the shape as the user knows them: ranks must agree on those, not on counts
  // alone.
  py::class_<Signature>(m, "Signature", "What a call is: op, dtype and dims, which all ranks compare. Reusable.")
      .def(py::init(&to_signature), py::arg("op"), py::arg("dtype"), py::arg("dims"));
  m.def("all_reduce", [](Group& group, Address in, Address out, size_t count, int op, const Signature& signature) {
    const ReduceOp reduction = to_reduce_op(op);
    py::gil_scoped_release release;
    all_reduce(group, pointer<>(in), pointer<>(out), count, static_cast<DType>(signature.dtype), reduction, &signature);
  });
  m.def(
      "sum_workspaces",
      [](Group& group, Call& call, size_t count, int dtype) {
        const DType type = to_dtype(dtype);
        py::gil_scoped_release release;
        sum_workspaces(group, call, count, type);
      },
      "Replaces the elements at the start of every rank's workspace of `call` by their sum over ranks.");
  m.def("reduce_scatter", [same_size](Group& group, Address in, Address out, const std::vector<size_t>& counts,
                                      int dtype, int op, const std::string& called, const std::vector<int64_t>& dims) {
    same_size(group, counts);
    const Signature signature = to_signature(called, dtype, dims);
    const ReduceOp reduction = to_reduce_op(op);
    py::gil_scoped_release release;
    reduce_scatter(group, pointer<>(in), pointer<>(out), counts, to_dtype(dtype), reduction, &signature);
  });
  m.def("all_gather", [same_size](Group& group, Address in, Address out, const std::vector<size_t>& counts, int dtype) {
    same_size(group, counts);
    const DType type = to_dtype(dtype);
    py::gil_scoped_release release;
    all_gather(group, pointer<>(in), pointer<>(out), counts, type);
  });
  m.def("all_to_all", [same_size](Group& group, Address in, Address out, const std::vector<size_t>& send_counts,
                                  const std::vector<size_t>& receive_counts, int dtype) {
    same_size(group, send_counts);
    same_size(group, receive_counts);
    const DType type = to_dtype(dtype);
    py::gil_scoped_release release;
    all_to_all(group, pointer<>(in), pointer<>(out), send_counts, receive_counts, type);
  });
  m.def("broadcast", [](Group& group, Address data, size_t count, int dtype, int root) {
    require(root >= 0 && root < group.size(), "root is not a rank of the group");
    const DType type = to_dtype(dtype);
    py::gil_scoped_release release;
    broadcast(group, pointer<>(data), count, type, root);
  });
  m.def("ring_shift", [](Group& group, Address in, Address out, size_t count, int dtype, int shift) {
    const DType type = to_dtype(dtype);
    py::gil_scoped_release release;
    ring_shift(group, pointer<>(in), pointer<>(out), count, type, shift);
  });
  m.def("barrier", &barrier, py::call_guard<py::gil_scoped_release>());
  m.def("all_reduce_rms_norm", [](Group& group, Address partial, Address residual, Address weight, Address normed,
                                  Address new_residual, size_t rows, size_t columns, double eps, int dtype) {
    const DType type = to_dtype(dtype);
    py::gil_scoped_release release;
    all_reduce_rms_norm(group,
                        {pointer<>(partial), pointer<>(residual), pointer<>(weight), pointer<>(normed),
                         pointer<>(new_residual), rows, columns, eps},
                        type);
  });
}

void bind_kernels(py::module_& m) {
  m.def("isa", [] { return kernels().isa; }, "The instruction set whose kernels were chosen for this CPU.");
  m.def(
      "reduce_rows",
      [](Address destination, size_t destination_stride, const std::vector<Address>& sources,
         const std::vector<size_t>& source_strides, size_t rows, size_t columns, int dtype, int op) {
        const DType type = to_dtype(dtype);
        const ReduceOp reduction = to_reduce_op(op);
        require(!sources.empty() && sources.size() == source_strides.size(), "one row stride is needed per source");
        const size_t size = element_size(type);
        py::gil_scoped_release release;
        std::vector<const void*> at(sources.size());
        for (size_t row = 0; row < rows; ++row) {
          for (size_t s = 0; s < sources.size(); ++s)
            at[s] = pointer<const char>(sources[s]) + row * source_strides[s] * size;
          char* to = pointer<char>(destination) + row * destination_stride * size;
          kernels().reduce(to, at.data(), static_cast<int>(at.size()), columns, type, reduction);
        }
      },
      py::arg("destination"), py::arg("destination_stride"), py::arg("sources"), py::arg("source_strides"),
      py::arg("rows"), py::arg("columns"), py::arg("dtype"), py::arg("op") = 0,
      "destination[row, :] = op over s of sources[s][row, :]; strides in elements.");
  m.def(
      "rms_norm_rows",
      [](const std::vector<Address>& partials, Address residual, Address weight, Address normed, Address new_residual,
         size_t rows, size_t columns, double eps, int dtype) {
        const DType type = to_dtype(dtype);
        const size_t row_bytes = columns * element_size(type);
        py::gil_scoped_release release;
        std::vector<const void*> at(partials.size());
        for (size_t row = 0; row < rows; ++row) {
          const size_t offset = row * row_bytes;
          for (size_t s = 0; s < partials.size(); ++s) at[s] = pointer<const char>(partials[s]) + offset;
          kernels().rms_norm_row(
              {at.data(), static_cast<int>(at.size()), residual ? pointer<const char>(residual) + offset : nullptr,
               pointer<>(weight), pointer<char>(new_residual) + offset, pointer<char>(normed) + offset, columns, eps},
              type);
        }
      },
      "new_residual = residual + sum(partials); normed = new_residual / rms(new_residual) * weight; rows are dense.");
}

}  // namespace

void bind_shm(py::module_& m) {
  bind_group(m);
  bind_collectives(m);
  bind_kernels(m);
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("MAX_CALLS_IN_FLIGHT") = kSlots;
}

}  // namespace fused_tp::bindings

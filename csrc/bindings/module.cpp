// The extension module fused_tp._core: shared memory, matmul and attention on CPUs. gpu.cpp binds the GPU part.
#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "attention/kernels.h"
#include "bindings/bindings.h"
#include "isa.h"
#include "matmul/few_rows.h"
#include "matmul/kernels.h"
#include "matmul/packed.h"
#include "shm/collectives.h"
#include "shm/group.h"
#include "shm/kernels.h"
#include "threads/openmp.h"
#include "threads/thread_pool.h"

namespace fused_tp::bindings {

DType to_dtype(int number) {
  if (number < 0 || number >= kNumDTypes)
    throw py::value_error("the dtype number is " + std::to_string(number) + "; it must be 0 to " +
                          std::to_string(kNumDTypes - 1));
  return static_cast<DType>(number);
}

void require(bool condition, const char* message) {
  if (!condition) throw py::value_error(message);
}

void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

namespace {

void translate_errors(std::exception_ptr pending) {
  const auto raise = [](const char* python_class, const std::exception& error) {
    py::set_error(py::module_::import("fused_tp.core.errors").attr(python_class), error.what());
  };
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const CollectiveTimeoutError& error) {
    raise("CollectiveTimeoutError", error);
  } catch (const PeerLostError& error) {
    raise("PeerLostError", error);
  } catch (const RankMismatchError& error) {
    raise("RankMismatchError", error);
  } catch (const GroupError& error) {
    raise("FusedTPError", error);
  }
}

// ---- shared memory ---------------------------------------------------------------------------------------------

using shm::Group;

// A range of shared memory as a Python buffer. Tensors that torch.frombuffer creates from it keep it alive.
class Memory {
 public:
  Memory(std::shared_ptr<shm::Segment> segment, char* data, size_t bytes)
      : segment_(std::move(segment)), data_(data), bytes_(bytes) {}
  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  py::buffer_info buffer() { return {data_, 1, "B", static_cast<py::ssize_t>(bytes_)}; }
  Address address() const { return reinterpret_cast<Address>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<shm::Segment> segment_;
  char* data_;
  size_t bytes_;
};

// Memory of this rank's heap, released when the last tensor that uses it is freed. It keeps only this rank's segment
// alive, not the group with the segments of all peers, because results may outlive the group.
class PooledMemory : public Memory {
 public:
  PooledMemory(Group& group, size_t offset, size_t bytes)
      : Memory(group.segment(group.rank()), group.segment(group.rank())->data() + offset, bytes),
        heap_(group.heap()),
        offset_(offset) {}
  ~PooledMemory() override { heap_->release(offset_); }
  size_t offset() const { return offset_; }

 private:
  std::shared_ptr<shm::Heap> heap_;
  size_t offset_;
};

shm::Signature to_signature(const std::string& op, int dtype, const std::vector<int64_t>& dims) {
  shm::Signature signature{};
  if (op.size() >= sizeof signature.op)
    throw py::value_error("the op name '" + op + "' is longer than " + std::to_string(sizeof signature.op - 1));
  if (dims.size() > shm::kMaxDims)
    throw py::value_error("a signature has at most " + std::to_string(shm::kMaxDims) + " dims, not " +
                          std::to_string(dims.size()));
  std::memcpy(signature.op, op.data(), op.size());
  signature.dtype = static_cast<int32_t>(to_dtype(dtype));
  signature.n_dims = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), signature.dims);
  return signature;
}

void bind_group(py::module_& m) {
  using shm::Call;
  py::class_<shm::Signature>(m, "Signature",
                             "Description of a call that all ranks compare: op, dtype and dims. May be reused.")
      .def(py::init(&to_signature), "op"_a, "dtype"_a, "dims"_a);
  py::class_<Memory>(m, "Memory", py::buffer_protocol())
      .def_buffer(&Memory::buffer)
      .def_property_readonly("address", &Memory::address);
  py::class_<PooledMemory, Memory>(m, "PooledMemory")
      .def_property_readonly("offset", &PooledMemory::offset, "Offset in this rank's segment, in bytes.");

  py::class_<Call>(m, "Call", "One collective call in flight on this rank.")
      .def_property_readonly("number", &Call::number)
      .def(
          "workspace_address", [](Call& call, int rank) { return reinterpret_cast<Address>(call.workspace(rank)); },
          NoGil())
      .def(
          "workspace",
          [](Call& call, int rank, const std::shared_ptr<Group>& group) {
            char* data = call.workspace(rank);
            return std::make_unique<Memory>(group->segment(rank), data, call.workspace_bytes(rank));
          },
          NoGil())
      .def("signal", &Call::signal, "stage"_a)
      .def("wait", &Call::wait, "rank"_a, "stage"_a, NoGil())
      .def("wait_all", &Call::wait_all, "stage"_a, NoGil())
      .def("end", &Call::end, NoGil())
      .def("abandon", &Call::abandon);

  py::class_<Group, std::shared_ptr<Group>>(m, "Group", "Group of ranks on one host that share memory.")
      .def(py::init([](int rank, int size, size_t reserve_bytes, std::function<double()> timeout_seconds) {
             return std::make_shared<Group>(rank, size, reserve_bytes, std::move(timeout_seconds), check_signals);
           }),
           "rank"_a, "size"_a, "reserve_bytes"_a, "timeout_seconds"_a)
      .def_property_readonly("address",
                             [](const Group& group) {
                               const shm::SegmentAddress address = group.address();
                               return py::bytes(reinterpret_cast<const char*>(&address), sizeof address);
                             })
      .def("connect",
           [](Group& group, const std::vector<py::bytes>& packed_addresses) {
             std::vector<shm::SegmentAddress> addresses;
             for (const py::bytes& packed : packed_addresses)
               addresses.push_back(parse_struct<shm::SegmentAddress>(packed, "an address of shared memory"));
             group.connect(addresses);
           })
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size)
      .def_property_readonly("calls", &Group::calls, "Number of calls that this rank has begun.")
      .def_property_readonly("waited_seconds", &Group::waited_seconds)
      .def_property_readonly("bytes_in_use", [](Group& group) { return group.heap()->bytes_in_use(); })
      .def_property_readonly("high_water_bytes", [](Group& group) { return group.heap()->high_water(); })
      .def("close", &Group::close)
      .def("give_up", &Group::give_up, "because"_a,
           "Leaves the group: later calls of this rank raise, and peers that wait for it raise PeerLostError.")
      .def("dead_peer", &Group::dead_peer, "Returns a peer whose process has exited, or -1.")
      .def(
          "allocate",
          [](Group& group, size_t bytes) {
            return std::make_unique<PooledMemory>(group, group.allocate(bytes), bytes);
          },
          NoGil())  // `allocate` waits for the group's mutex, whose owner may need the GIL
      .def(
          "at",
          [](const std::shared_ptr<Group>& group, int rank, size_t offset, size_t bytes) {
            require(rank >= 0 && rank < group->size(), "rank must be from 0 to size - 1");
            const auto& segment = group->segment(rank);
            require(offset <= segment->bytes() && bytes <= segment->bytes() - offset,
                    "offset and bytes exceed the rank's shared memory");
            return std::make_unique<Memory>(segment, segment->data() + offset, bytes);
          },
          "rank"_a, "offset"_a, "bytes"_a)
      .def(
          "begin",
          [](Group& group, const std::string& op, int dtype, const std::vector<int64_t>& dims, size_t bytes,
             bool waits_for_reuse) { return group.begin(to_signature(op, dtype, dims), bytes, true, waits_for_reuse); },
          "op"_a, "dtype"_a, "dims"_a, "bytes"_a, "reuse"_a = false, NoGil(),
          "Begins the next call. `reuse`: first wait for peers that are still in calls that this rank has ended, so "
          "that "
          "the workspace can reuse their memory.")
      .def("is_settled", &Group::is_settled, "True if `begin` with `reuse` would not wait for peers.", NoGil())
      .def(
          "begin_in",
          [](Group& group, const std::string& op, int dtype, const std::vector<int64_t>& dims,
             const PooledMemory& memory) {
            const size_t offset = memory.offset();
            return group.begin(to_signature(op, dtype, dims), memory.bytes(), true, false, &offset);
          },
          "op"_a, "dtype"_a, "dims"_a, "memory"_a, NoGil(),
          "Begins the next call with `memory` as this rank's workspace. The caller keeps the memory.");
  m.attr("MAX_RANKS") = shm::kMaxRanks;
  m.attr("MAX_CALLS_IN_FLIGHT") = shm::kSlots;
}

// Python passes signatures with the op's name and the tensor's shape, because ranks must agree on these, not only on
// the number of elements.
void bind_collectives(py::module_& m) {
  m.def("all_reduce", wrap(&shm::all_reduce), NoGil());
  m.def("sum_workspaces", wrap(&shm::sum_workspaces), NoGil(),
        "All-reduces the elements at the start of the ranks' workspaces of `call`, in place.");
  m.def("reduce_scatter", wrap(&shm::reduce_scatter), NoGil());
  m.def("all_to_all", wrap(&shm::all_to_all), NoGil());
  m.def("barrier", &shm::barrier, NoGil());
  m.def(
      "all_reduce_rms_norm",
      [](Group& group, Address partial, Address residual, Address weight, Address normed, Address new_residual,
         size_t rows, size_t columns, double eps, int dtype) {
        shm::all_reduce_rms_norm(group,
                                 {pointer<>(partial), pointer<>(residual), pointer<>(weight), pointer<>(normed),
                                  pointer<>(new_residual), rows, columns, eps},
                                 to_dtype(dtype));
      },
      NoGil());
  m.def(
      "rms_norm",
      [](Address x, Address residual, Address weight, Address normed, Address new_residual, int64_t rows,
         int64_t columns, double eps, float weight_offset, int dtype, int threads) {
        const DType element_type = to_dtype(dtype);
        const auto row_bytes = static_cast<size_t>(columns) * element_size(element_type);
        const auto at = [row_bytes](Address base, size_t row) {
          return base == 0 ? nullptr : pointer<char>(base) + row * row_bytes;
        };
        constexpr int64_t kTaskBytes = 1 << 16;
        const int64_t task_rows = std::max<int64_t>(1, kTaskBytes / static_cast<int64_t>(row_bytes));
        parallel_for((rows + task_rows - 1) / task_rows, threads, [&](int64_t task, int) {
          for (int64_t row = task * task_rows; row < std::min(rows, (task + 1) * task_rows); ++row) {
            const void* const partials[] = {at(x, row)};
            shm::kernels().rms_norm_row({partials, 1, at(residual, row), pointer<>(weight), at(new_residual, row),
                                         at(normed, row), static_cast<size_t>(columns), eps, weight_offset},
                                        element_type);
          }
        });
      },
      "x"_a, "residual"_a, "weight"_a, "normed"_a, "new_residual"_a, "rows"_a, "columns"_a, "eps"_a, "weight_offset"_a,
      "dtype"_a, "threads"_a, NoGil(),
      "new_residual = x + residual; normed = new_residual / rms(new_residual) * (weight + weight_offset). residual and "
      "new_residual may "
      "be 0; results may replace x and residual.");
  m.def("isa", [] { return shm::kernels().isa; }, "Instruction set of the kernels of collectives on this CPU.");
  m.def(
      "isa_of",
      [](const CpuFeatures& features, const std::string& limit) {
        return shm::select_kernels(select_isa(features, limit)).isa;
      },
      "features"_a, "limit"_a = "", "Instruction set that `isa` returns on a CPU with these features (GCC's names).");
  m.def(
      "sum_arrays",
      [](Address out, const std::vector<Address>& sources, size_t count, int dtype) {
        require(!sources.empty(), "sources must not be empty");
        std::vector<const void*> arrays;
        for (const Address source : sources) arrays.push_back(pointer<>(source));
        shm::kernels().sum(pointer<>(out), arrays.data(), static_cast<int>(arrays.size()), count, to_dtype(dtype));
      },
      "out"_a, "sources"_a, "count"_a, "dtype"_a, NoGil(), "out[i] = sum over s of sources[s][i], in order of s.");
  m.def(
      "sum_rows",
      [](int dtype, Address y, Address rows, Address starts, Address scale, Address out, int64_t tokens,
         int64_t columns, int threads) {
        const DType element_type = to_dtype(dtype);
        require(element_type == DType::kF32 || element_type == DType::kBF16 || element_type == DType::kF16,
                "sum_rows takes float32, bfloat16 and float16");
        const shm::RowSums sums{
            pointer<>(y),   pointer<const int64_t>(rows), pointer<const int64_t>(starts), pointer<const float>(scale),
            pointer<>(out), static_cast<size_t>(columns)};
        constexpr int64_t kTaskTokens = 64;
        parallel_for((tokens + kTaskTokens - 1) / kTaskTokens, threads, [&](int64_t task, int) {
          const auto begin = static_cast<size_t>(task * kTaskTokens),
                     end = static_cast<size_t>(std::min(tokens, (task + 1) * kTaskTokens));
          shm::kernels().sum_rows(sums, begin, end, element_type);
        });
      },
      "dtype"_a, "y"_a, "rows"_a, "starts"_a, "scale"_a, "out"_a, "tokens"_a, "columns"_a, "threads"_a, NoGil(),
      "out[t] = sum over starts[t] <= i < starts[t + 1] of scale[i] * y[rows[i]], in fp32, rounded once.");
}

void check_packable(int64_t columns, int64_t depth, DType dtype) {
  require(columns % matmul::kPanelColumns == 0 && depth % matmul::panel_depth(dtype) == 0,
          "a packed weight has whole panels of 16 columns and, in bf16, an even depth");
}

void bind_matmul(py::module_& m) {
  m.def("use_openmp_threads", &use_openmp_threads, "value"_a,
        "Run parallel kernels on the threads of the loaded OpenMP runtime, or again on own ones. Returns whether they "
        "do.");
  m.def(
      "few_rows_isa",
      [](int dtype, const std::string& isa) { return matmul::few_rows_isa(to_dtype(dtype), isa.c_str()); }, "dtype"_a,
      "isa"_a = "", "Instruction set of the kernels of few_rows for this dtype; empty if there are none.");
  m.attr("FEW_ROWS") = matmul::kMaxFewRows;
  m.def(
      "few_rows",
      [](int dtype, Address x, int64_t x_row, Address w, int64_t w_row, Address bias, Address y, int64_t rows,
         int64_t columns, int64_t depth, int threads, const std::string& isa) {
        require(rows <= matmul::kMaxFewRows, "rows must be at most FEW_ROWS");
        matmul::few_rows({pointer<>(x), x_row, pointer<>(w), w_row, pointer<>(bias), pointer<>(y), rows, columns, depth,
                          to_dtype(dtype)},
                         threads, isa.c_str());
      },
      "dtype"_a, "x"_a, "x_row"_a, "w"_a, "w_row"_a, "bias"_a, "y"_a, "rows"_a, "columns"_a, "depth"_a, "threads"_a,
      "isa"_a = "", NoGil(),
      "y [rows, columns] = x [rows, depth] @ w [columns, depth]^T + bias. x_row, w_row: elements between rows.");
  m.def(
      "packed_isa", [](int dtype, const std::string& isa) { return matmul::packed_isa(to_dtype(dtype), isa.c_str()); },
      "dtype"_a, "isa"_a = "",
      "Instruction set of the kernels for packed weights of this dtype; empty if there are none.");
  m.def(
      "pack_weight",
      [](int dtype, Address w, int64_t w_row, int64_t columns, int64_t depth, Address packed, int threads) {
        check_packable(columns, depth, to_dtype(dtype));
        matmul::pack_weight(pointer<>(w), w_row, columns, depth, to_dtype(dtype), pointer<>(packed), threads);
      },
      "dtype"_a, "w"_a, "w_row"_a, "columns"_a, "depth"_a, "packed"_a, "threads"_a, NoGil(),
      "Packs w [columns, depth] to as many elements.");
  m.def(
      "multiply_packed",
      [](int dtype, Address x, int64_t x_row, Address packed, Address bias, Address y, int64_t rows, int64_t columns,
         int64_t depth, int threads, const std::string& isa) {
        check_packable(columns, depth, to_dtype(dtype));
        matmul::multiply_packed({pointer<>(x), x_row, pointer<>(packed), 0, pointer<>(bias), pointer<>(y), rows,
                                 columns, depth, to_dtype(dtype)},
                                threads, isa.c_str());
      },
      "dtype"_a, "x"_a, "x_row"_a, "packed"_a, "bias"_a, "y"_a, "rows"_a, "columns"_a, "depth"_a, "threads"_a,
      "isa"_a = "", NoGil(), "y [rows, columns] = x [rows, depth] @ w^T + bias, for a weight packed by pack_weight.");
}

// ---- attention -------------------------------------------------------------------------------------------------

using Tensor = std::tuple<Address, int64_t, int64_t, int64_t>;    // (address, strides of batch, row and head)
using Dropout = std::tuple<uint32_t, double, uint64_t, int32_t>;  // (threshold, keep factor, seed, first head)

attention::InputView to_input(const Tensor& tensor) {
  return {pointer<>(std::get<0>(tensor)), {std::get<1>(tensor), std::get<2>(tensor), std::get<3>(tensor)}};
}

attention::AccumulatorView to_accumulator(const Tensor& tensor) {
  return {pointer<>(std::get<0>(tensor)), {std::get<1>(tensor), std::get<2>(tensor), std::get<3>(tensor)}};
}

attention::Problem make_problem(int dtype, const std::array<int64_t, 7>& shape, const std::array<Address, 5>& rows,
                                double scale, double softcap, Address slopes, const std::optional<Dropout>& dropout,
                                const Tensor& q, const Tensor& k, const Tensor& v) {
  attention::Problem problem{};
  problem.shape = {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]};
  problem.intervals = {pointer<const int32_t>(rows[0]), pointer<const int32_t>(rows[1]),
                       pointer<const int32_t>(rows[2]), pointer<const int32_t>(rows[3]),
                       pointer<const int32_t>(rows[4])};
  problem.score_parameters.scale = scale;
  problem.score_parameters.softcap = softcap;
  problem.score_parameters.slopes = pointer<>(slopes);
  if (dropout) {
    problem.score_parameters.has_dropout = true;
    std::tie(problem.score_parameters.dropout_threshold, problem.score_parameters.keep_factor,
             problem.score_parameters.seed, problem.score_parameters.first_head) = *dropout;
  }
  problem.dtype = to_dtype(dtype);
  require(element_size(problem.dtype) >= 2 && static_cast<int>(problem.dtype) <= static_cast<int>(DType::kF64),
          "attention takes float32, bfloat16, float16 and float64");
  require(shape[2] > 0 && shape[1] % shape[2] == 0, "heads must be a multiple of kv_heads");
  problem.q = to_input(q);
  problem.k = to_input(k);
  problem.v = to_input(v);
  return problem;
}

void bind_attention(py::module_& m) {
  using attention::Problem;
  py::class_<Problem>(
      m, "AttentionProblem",
      "Inputs of one step. shape: batch, heads, kv_heads, rows, keys, dim, v_dim. rows: addresses of the int32 vectors "
      "starts, stops, q_positions, q_indices, k_indices. q, k, v: address, strides of batch, row and head.")
      .def(py::init(&make_problem), "dtype"_a, "shape"_a, "rows"_a, "scale"_a, "softcap"_a, "slopes"_a, "dropout"_a,
           "q"_a, "k"_a, "v"_a);
  m.def(
      "attention_forward",
      [](const Problem& problem, const Tensor& acc, const Tensor& row_max, const Tensor& row_sum, int threads,
         const std::string& isa) {
        attention::forward({problem, to_accumulator(acc), to_accumulator(row_max), to_accumulator(row_sum)}, threads,
                           isa.c_str());
      },
      "step"_a, "weighted"_a, "highest"_a, "total"_a, "threads"_a, "isa"_a, NoGil(),
      "Updates the softmax state (weighted, highest, total) with one step.");
  m.def(
      "attention_backward",
      [](const Problem& problem, const Tensor& grad_out, const Tensor& lse, const Tensor& delta, const Tensor& dq,
         const Tensor& dk, const Tensor& dv, Address d_slopes, int threads, const std::string& isa) {
        attention::backward({problem, to_input(grad_out), to_input(lse), to_input(delta), to_accumulator(dq),
                             to_accumulator(dk), to_accumulator(dv), pointer<>(d_slopes)},
                            threads, isa.c_str());
      },
      "step"_a, "grad_out"_a, "lse"_a, "row_sums"_a, "dq"_a, "dk"_a, "dv"_a, "d_slopes"_a, "threads"_a, "isa"_a,
      NoGil(), "Adds the gradients of one step to dq, dk, dv and d_slopes.");
  m.def(
      "attention_isa",
      [](int dtype, const std::string& isa) { return attention::select_kernels(to_dtype(dtype), isa.c_str()).isa; },
      "dtype"_a, "isa"_a = "", "Instruction set of the attention kernels for this dtype.");
  m.def("has_matrix_tiles", &attention::has_matrix_tiles,
        "True if this CPU has AMX for bf16, which these kernels do not use.");
}

}  // namespace

}  // namespace fused_tp::bindings

PYBIND11_MODULE(_core, m) {
  m.doc() = "Native core of fused_tp.";
  pybind11::register_exception_translator(fused_tp::bindings::translate_errors);
  fused_tp::bindings::bind_group(m);
  fused_tp::bindings::bind_collectives(m);
  fused_tp::bindings::bind_matmul(m);
  fused_tp::bindings::bind_attention(m);
  fused_tp::bindings::bind_gpu(m);
}

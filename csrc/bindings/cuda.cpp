// The library of device kernels, which is loaded by its path when it is asked for.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <string>

#include "bindings/bindings.h"
#include "cuda/launchers.h"
#include "cuda/plan.h"
#include "cuda/protocol.h"

namespace fused_tp::bindings {

using namespace fused_tp::cuda;  // NOLINT: this file binds that namespace

namespace {

Algorithm to_algorithm(int number) {
  if (number < static_cast<int>(Algorithm::kOneShot) || number > static_cast<int>(Algorithm::kMultimem))
    throw py::value_error("unknown algorithm number " + std::to_string(number));
  return static_cast<Algorithm>(number);
}

NormOutput to_norm_output(int number) {
  if (number < static_cast<int>(NormOutput::kSameDtype) || number > static_cast<int>(NormOutput::kFp8RowScale))
    throw py::value_error("unknown norm output number " + std::to_string(number));
  return static_cast<NormOutput>(number);
}

AllToAllLayout to_layout(const std::array<int64_t, 9>& l) {
  return {l[0], l[1], l[2], l[3], l[4], l[5], l[6], l[7], l[8]};
}

// Stays loaded until the process ends: kernels may run in it until then, and the CUDA runtime in it ends with it.
class DeviceKernels {
 public:
  explicit DeviceKernels(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error("The device kernels could not be loaded: " + last_error());
    const auto launchers = reinterpret_cast<decltype(&fused_tp_launchers)>(dlsym(library, "fused_tp_launchers"));
    if (launchers == nullptr) throw std::runtime_error(path + " is no library of device kernels: " + last_error());
    launchers_ = launchers();
    if (launchers_->abi_version != kAbiVersion)
      throw std::runtime_error("The device kernels in " + path + " have interface version " +
                               std::to_string(launchers_->abi_version) + " and this fused_tp needs version " +
                               std::to_string(kAbiVersion) + ": install fused_tp again, so that both are built alike.");
  }

  // Runs launch(launchers) without the GIL and throws what CUDA says. A launch waits for no other rank, but may wait
  // for room in the queue of a GPU.
  template <typename Launch>
  void launch(const char* op, const Launch& launch) const {
    int32_t error = 0;
    {
      py::gil_scoped_release release;
      error = launch(*launchers_);
    }
    if (error != 0)
      throw std::runtime_error(std::string(op) + " could not be launched: " + launchers_->error_string(error) +
                               " (CUDA error " + std::to_string(error) + ").");
  }

 private:
  static std::string last_error() {
    const char* error = dlerror();
    return error != nullptr ? error : "unknown error";
  }

  const Launchers* launchers_ = nullptr;
};

void* stream_of(Address stream) { return pointer<>(stream); }

void bind_workspace(py::module_& m) {
  py::class_<Workspace>(m, "DeviceWorkspace", "One rank's workspace, as device kernels are told of it.")
      .def(py::init([](Address addresses, Address state, Address error, int64_t half_bytes, int64_t timeout_ns,
                       uint64_t multicast, int rank, int world) {
             require(0 <= rank && rank < world && world <= kMaxWorldSize,
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
           py::arg("addresses"), py::arg("state"), py::arg("error"), py::arg("half_bytes"), py::arg("timeout_ns"),
           py::arg("multicast"), py::arg("rank"), py::arg("world"))
      .def_readwrite("timeout_ns", &Workspace::timeout_ns);
}

void bind_kernels(py::module_& m) {
  py::class_<DeviceKernels>(m, "DeviceKernels", "The library of device kernels at a path. Tensors come as addresses.")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def(
          "preload",
          [](const DeviceKernels& kernels) {
            kernels.launch("preload", [](const Launchers& l) { return l.preload(); });
          },
          "Loads all kernels on the current GPU, so that no launch does, which might wait for kernels that run.")
      .def(
          "barrier",
          [](const DeviceKernels& kernels, const Workspace& workspace, Address stream) {
            kernels.launch("barrier", [&](const Launchers& l) { return l.barrier(&workspace, stream_of(stream)); });
          },
          py::arg("workspace"), py::arg("stream"))
      .def(
          "all_reduce",
          [](const DeviceKernels& kernels, const Workspace& workspace, int algorithm, Address in, Address out,
             int64_t count, int dtype, Address bias, int64_t bias_columns, int blocks, Address stream) {
            const Algorithm way = to_algorithm(algorithm);
            kernels.launch("all_reduce", [&](const Launchers& l) {
              return l.all_reduce(&workspace, way, pointer<>(in), pointer<>(out), count, dtype,
                                  {pointer<>(bias), bias_columns}, blocks, stream_of(stream));
            });
          },
          py::arg("workspace"), py::arg("algorithm"), py::arg("input"), py::arg("out"), py::arg("count"),
          py::arg("dtype"), py::arg("bias"), py::arg("bias_columns"), py::arg("blocks"), py::arg("stream"))
      .def(
          "reduce_scatter",
          [](const DeviceKernels& kernels, const Workspace& workspace, Address in, Address out, int64_t count,
             int64_t chunk, int dtype, Address bias, int64_t bias_columns, int blocks, Address stream) {
            kernels.launch("reduce_scatter", [&](const Launchers& l) {
              return l.reduce_scatter(&workspace, pointer<>(in), pointer<>(out), count, chunk, dtype,
                                      {pointer<>(bias), bias_columns}, blocks, stream_of(stream));
            });
          },
          py::arg("workspace"), py::arg("input"), py::arg("out"), py::arg("count"), py::arg("chunk"), py::arg("dtype"),
          py::arg("bias"), py::arg("bias_columns"), py::arg("blocks"), py::arg("stream"))
      .def(
          "all_gather",
          [](const DeviceKernels& kernels, const Workspace& workspace, Address in, Address out, int64_t count_bytes,
             int64_t chunk_bytes, int blocks, Address stream) {
            kernels.launch("all_gather", [&](const Launchers& l) {
              return l.all_gather(&workspace, pointer<>(in), pointer<>(out), count_bytes, chunk_bytes, blocks,
                                  stream_of(stream));
            });
          },
          py::arg("workspace"), py::arg("input"), py::arg("out"), py::arg("count_bytes"), py::arg("chunk_bytes"),
          py::arg("blocks"), py::arg("stream"))
      .def(
          "all_to_all",
          [](const DeviceKernels& kernels, const Workspace& workspace, Address in, Address out,
             const std::array<int64_t, 9>& numbers, int blocks, Address stream) {
            const AllToAllLayout layout = to_layout(numbers);
            kernels.launch("all_to_all", [&](const Launchers& l) {
              return l.all_to_all(&workspace, pointer<>(in), pointer<>(out), &layout, blocks, stream_of(stream));
            });
          },
          py::arg("workspace"), py::arg("input"), py::arg("out"), py::arg("layout"), py::arg("blocks"),
          py::arg("stream"), "layout: the nine numbers of AllToAllLayout, in order.")
      .def(
          "all_reduce_rms_norm",
          [](const DeviceKernels& kernels, const Workspace& workspace, int algorithm, Address partial, Address residual,
             Address weight, Address normed, Address new_residual, Address scale, int64_t rows, int64_t columns,
             double eps, int output, int dtype, int blocks, Address stream) {
            const Algorithm way = to_algorithm(algorithm);
            const RmsNorm norm{pointer<>(residual),
                               pointer<>(weight),
                               pointer<>(normed),
                               pointer<>(new_residual),
                               pointer<float>(scale),
                               rows,
                               columns,
                               eps,
                               to_norm_output(output)};
            kernels.launch("all_reduce_rms_norm", [&](const Launchers& l) {
              return l.all_reduce_rms_norm(&workspace, way, pointer<>(partial), &norm, dtype, blocks,
                                           stream_of(stream));
            });
          },
          py::arg("workspace"), py::arg("algorithm"), py::arg("partial"), py::arg("residual"), py::arg("weight"),
          py::arg("normed"), py::arg("new_residual"), py::arg("scale"), py::arg("rows"), py::arg("columns"),
          py::arg("eps"), py::arg("output"), py::arg("dtype"), py::arg("blocks"), py::arg("stream"))
      .def(
          "sum_terms",
          [](const DeviceKernels& kernels, Address terms, int count_of_terms, int64_t stride, Address out,
             int64_t count, int dtype, Address bias, int64_t bias_columns, Address stream) {
            kernels.launch("sum_terms", [&](const Launchers& l) {
              return l.sum_terms(pointer<>(terms), count_of_terms, stride, pointer<>(out), count, dtype,
                                 {pointer<>(bias), bias_columns}, stream_of(stream));
            });
          },
          py::arg("terms"), py::arg("count_of_terms"), py::arg("stride"), py::arg("out"), py::arg("count"),
          py::arg("dtype"), py::arg("bias"), py::arg("bias_columns"), py::arg("stream"))
      .def(
          "count_up",
          [](const DeviceKernels& kernels, Address word, Address stream) {
            kernels.launch("count_up",
                           [&](const Launchers& l) { return l.count_up(pointer<int64_t>(word), stream_of(stream)); });
          },
          py::arg("word"), py::arg("stream"));
}

// An op on data of one size. `count` and `chunk` are those of its launcher: elements where something is summed, else
// bytes. For all_reduce_rms_norm `chunk` is the columns, for all_to_all the bytes of a part.
struct Size {
  std::string op;
  Algorithm algorithm;
  int64_t count;
  int64_t chunk;
  int64_t element_bytes;  // 1: `count` is bytes

  Size(const std::string& op, int algorithm, int64_t count, int64_t chunk, int dtype, int world)
      : op(op), algorithm(to_algorithm(algorithm)), count(count), chunk(chunk) {
    require(1 <= world && world <= kMaxWorldSize, "world must be 1 to 63 ranks");
    require(count >= 0 && chunk >= 0, "count and chunk must not be negative");
    const bool sums = op == "all_reduce" || op == "reduce_scatter" || op == "all_reduce_rms_norm";
    require(sums || op == "all_gather" || op == "all_to_all" || op == "barrier", "op is none of the device kernels'");
    require(op != "all_reduce_rms_norm" || chunk > 0, "chunk must be the columns of a row, one or more");
    element_bytes = sums ? static_cast<int64_t>(element_size(to_dtype(dtype))) : 1;
  }

  int64_t workspace_bytes(int world, int blocks) const {
    if (op == "barrier") return Plan{world, blocks}.workspace_bytes();
    if (op == "all_reduce") return all_reduce_plan(algorithm, count, element_bytes, world, blocks).workspace_bytes();
    if (op != "all_reduce_rms_norm") return exchange_plan(chunk * element_bytes, world, blocks).workspace_bytes();
    // For any dtype of the norm, so that calls which differ in nothing else take the same workspace.
    int64_t most = 0;
    for (const NormOutput output : {NormOutput::kSameDtype, NormOutput::kFp8StaticScale, NormOutput::kFp8RowScale})
      most = std::max(
          most, all_reduce_rms_norm_plan(algorithm, ceil_div(count, chunk), chunk, element_bytes, output, world, blocks)
                    .workspace_bytes());
    return most;
  }
};

void bind_plans(py::module_& m) {
  m.def(
      "device_workspace_bytes",
      [](const std::string& op, int algorithm, int64_t count, int64_t chunk, int dtype, int world, int blocks) {
        require(blocks > 0, "blocks must be 1 or more");
        return Size(op, algorithm, count, chunk, dtype, world).workspace_bytes(world, blocks);
      },
      py::arg("op"), py::arg("algorithm"), py::arg("count"), py::arg("chunk"), py::arg("dtype"), py::arg("world"),
      py::arg("blocks"), "The smallest workspace that a launch can take.");
  m.def(
      "device_suggested_blocks",
      [](const std::string& op, int algorithm, int64_t count, int64_t chunk, int dtype, int world, int most) {
        const Size size(op, algorithm, count, chunk, dtype, world);
        return suggested_blocks(size.count * size.element_bytes, most);
      },
      py::arg("op"), py::arg("algorithm"), py::arg("count"), py::arg("chunk"), py::arg("dtype"), py::arg("world"),
      py::arg("most"), "How many blocks to launch, at most `most`. The same on all ranks.");
}

}  // namespace

void bind_cuda(py::module_& m) {
  bind_workspace(m);
  bind_kernels(m);
  bind_plans(m);
  m.attr("DEVICE_KERNELS_ABI") = kAbiVersion;
}

}  // namespace fused_tp::bindings

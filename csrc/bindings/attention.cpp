// Flash attention on CPUs.
#include "attention/attention.h"

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "attention/kernels.h"
#include "bindings/bindings.h"

namespace fused_tp::bindings {

using namespace fused_tp::attention;  // NOLINT: this file binds that namespace

namespace {

using Tensor = std::tuple<Address, int64_t, int64_t, int64_t>;  // address, strides of batch, row and head
using Dropout = std::tuple<uint32_t, double, uint64_t, int32_t>;
using Rows = std::array<Address, 5>;

Source source(const Tensor& tensor) {
  return {pointer<>(std::get<0>(tensor)), {std::get<1>(tensor), std::get<2>(tensor), std::get<3>(tensor)}};
}

Sum sum(const Tensor& tensor) {
  return {pointer<>(std::get<0>(tensor)), {std::get<1>(tensor), std::get<2>(tensor), std::get<3>(tensor)}};
}

Problem problem(int dtype, const std::array<int64_t, 7>& shape, const Rows& rows, double scale, double softcap,
                Address slopes, const std::optional<Dropout>& dropout, const Tensor& q, const Tensor& k,
                const Tensor& v) {
  Problem made{};
  made.shape = {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]};
  made.seen = {pointer<const int32_t>(rows[0]), pointer<const int32_t>(rows[1]), pointer<const int32_t>(rows[2]),
               pointer<const int32_t>(rows[3]), pointer<const int32_t>(rows[4])};
  made.scores.scale = scale;
  made.scores.softcap = softcap;
  made.scores.slopes = pointer<>(slopes);
  if (dropout) {
    made.scores.dropout = true;
    std::tie(made.scores.threshold, made.scores.keep_factor, made.scores.seed, made.scores.first_head) = *dropout;
  }
  made.dtype = to_dtype(dtype);
  require(element_size(made.dtype) >= 2 && static_cast<int>(made.dtype) <= static_cast<int>(DType::kF64),
          "attention takes float32, bfloat16, float16 and float64");
  require(shape[2] > 0 && shape[1] % shape[2] == 0, "heads must be a multiple of kv_heads");
  made.q = source(q);
  made.k = source(k);
  made.v = source(v);
  return made;
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def(
      "attention_forward",
      [](int dtype, const std::array<int64_t, 7>& shape, const Rows& rows, double scale, double softcap, Address slopes,
         const std::optional<Dropout>& dropout, const Tensor& q, const Tensor& k, const Tensor& v,
         const Tensor& weighted, const Tensor& highest, const Tensor& total, int threads, const std::string& isa) {
        Forward step{problem(dtype, shape, rows, scale, softcap, slopes, dropout, q, k, v), sum(weighted), sum(highest),
                     sum(total)};
        py::gil_scoped_release release;
        attention::forward(step, threads, isa.c_str());
      },
      py::arg("dtype"), py::arg("shape"), py::arg("rows"), py::arg("scale"), py::arg("softcap"), py::arg("slopes"),
      py::arg("dropout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("weighted"), py::arg("highest"),
      py::arg("total"), py::arg("threads"), py::arg("isa"),
      "Folds one step into a softmax state. shape: batch, heads, kv_heads, rows, keys, dim, v_dim; rows: addresses of "
      "starts, stops, places, q_indices, k_indices (int32); tensors: address, strides of batch, row and head.");
  m.def(
      "attention_backward",
      [](int dtype, const std::array<int64_t, 7>& shape, const Rows& rows, double scale, double softcap, Address slopes,
         const std::optional<Dropout>& dropout, const Tensor& q, const Tensor& k, const Tensor& v,
         const Tensor& grad_out, const Tensor& lse, const Tensor& sums, const Tensor& dq, const Tensor& dk,
         const Tensor& dv, Address d_slopes, int threads, const std::string& isa) {
        Backward step{problem(dtype, shape, rows, scale, softcap, slopes, dropout, q, k, v),
                      source(grad_out),
                      source(lse),
                      source(sums),
                      sum(dq),
                      sum(dk),
                      sum(dv),
                      pointer<>(d_slopes)};
        py::gil_scoped_release release;
        attention::backward(step, threads, isa.c_str());
      },
      py::arg("dtype"), py::arg("shape"), py::arg("rows"), py::arg("scale"), py::arg("softcap"), py::arg("slopes"),
      py::arg("dropout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("grad_out"), py::arg("lse"),
      py::arg("sums"), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("d_slopes"), py::arg("threads"),
      py::arg("isa"), "Adds the gradients of one step to dq, dk, dv and d_slopes; arguments as in attention_forward.");
  m.def(
      "attention_isa",
      [](int dtype, const std::string& isa) { return attention::kernels_for(to_dtype(dtype), isa.c_str()).isa; },
      py::arg("dtype"), py::arg("isa") = "", "The instruction set of the kernels for this dtype.");
  m.def("has_matrix_tiles", &attention::has_matrix_tiles,
        "Whether this CPU has AMX for bf16, which these kernels do not use.");
}

}  // namespace fused_tp::bindings

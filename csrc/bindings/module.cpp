// fused_tp._core, put together of its parts.
#include <string>

#include "bindings/bindings.h"

namespace fused_tp::bindings {

DType to_dtype(int number) {
  if (number < 0 || number >= kNumDTypes) throw py::value_error("unknown dtype number " + std::to_string(number));
  return static_cast<DType>(number);
}

void require(bool condition, const char* sentence) {
  if (!condition) throw py::value_error(sentence);
}

void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

namespace {

template <typename Error>
bool translate(const std::exception_ptr& pending, const char* python_class) {
  try {
    std::rethrow_exception(pending);
  } catch (const Error& error) {
    py::set_error(py::module_::import("fused_tp.runtime.errors").attr(python_class), error.what());
    return true;
  } catch (...) {
    return false;
  }
}

void translate_errors(std::exception_ptr pending) {
  if (!pending) return;
  if (translate<CollectiveTimeoutError>(pending, "CollectiveTimeoutError")) return;
  if (translate<PeerLostError>(pending, "PeerLostError")) return;
  if (translate<RankMismatchError>(pending, "RankMismatchError")) return;
  if (translate<GroupError>(pending, "FusedTPError")) return;
  std::rethrow_exception(pending);
}

}  // namespace

}  // namespace fused_tp::bindings

PYBIND11_MODULE(_core, m) {
  m.doc() = "Native core of fused_tp: CPU shared memory, signals, collectives.";
  pybind11::register_exception_translator(fused_tp::bindings::translate_errors);
  fused_tp::bindings::bind_attention(m);
  fused_tp::bindings::bind_copy_engine(m);
  fused_tp::bindings::bind_cuda(m);
  fused_tp::bindings::bind_driver(m);
  fused_tp::bindings::bind_nccl(m);  // before what takes communicators
  fused_tp::bindings::bind_shm(m);
  fused_tp::bindings::bind_pipeline(m);
}

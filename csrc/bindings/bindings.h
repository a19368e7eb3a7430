// What the files of this folder share. They alone know pybind11; everything else in csrc is plain C++ or CUDA.
// Tensors come as addresses, sizes and dtype numbers: the module needs no torch to build or to load, so one wheel
// serves every torch version.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "dtype.h"
#include "errors.h"

namespace fused_tp::bindings {

namespace py = pybind11;

using Address = std::uintptr_t;

template <typename T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

DType to_dtype(int number);

void require(bool condition, const char* sentence);

// Lets Ctrl-C end a wait. Takes the GIL.
void check_signals();

// Each adds one part of the native core to the module.
void bind_attention(py::module_& m);
void bind_copy_engine(py::module_& m);
void bind_cuda(py::module_& m);
void bind_driver(py::module_& m);
void bind_nccl(py::module_& m);
void bind_shm(py::module_& m);
void bind_pipeline(py::module_& m);

}  // namespace fused_tp::bindings

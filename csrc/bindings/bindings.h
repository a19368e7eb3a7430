// Helpers for the files of this folder. Only they use pybind11; everything else in csrc is plain C++ or CUDA.
// Tensors are passed as addresses, sizes and dtype numbers: the module needs no torch to build or to load, so one wheel
// serves every torch version. There are two files, not one per part, since pybind11's headers take seconds to compile.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "dtype.h"
#include "errors.h"

namespace fused_tp::bindings {

namespace py = pybind11;
using namespace pybind11::literals;

using Address = std::uintptr_t;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <typename T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Converts the bytes `packed` to a plain struct.
template <typename T>
T unpacked(const py::bytes& packed, const char* name) {
  const std::string bytes = packed;
  T value{};
  if (bytes.size() != sizeof value)
    throw py::value_error(std::string(name) + " has " + std::to_string(sizeof value) + " bytes, not " +
                          std::to_string(bytes.size()));
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

DType to_dtype(int number);

// The type that Python passes for a parameter of type T, and its conversion to T.
template <typename T>
struct From {
  using Given = T;
  static T value(T given) { return given; }
};
template <typename T>
struct From<T*> {
  using Given = Address;
  static T* value(Address given) { return pointer<T>(given); }
};
template <typename T>
struct From<T&> {
  using Given = T&;
  static T& value(T& given) { return given; }
};
template <>
struct From<DType> {
  using Given = int;
  static DType value(int given) { return to_dtype(given); }
};

// Wraps a function, or a method, for Python.
template <typename Result, typename... Parameters>
auto bound(Result (*function)(Parameters...)) {
  return [function](typename From<Parameters>::Given... given) { return function(From<Parameters>::value(given)...); };
}

template <typename Class, typename Result, typename... Parameters>
auto bound(Result (Class::*method)(Parameters...)) {
  return [method](Class& self, typename From<Parameters>::Given... given) {
    return (self.*method)(From<Parameters>::value(given)...);
  };
}

void require(bool condition, const char* sentence);

// Lets Ctrl-C end a wait. Takes the GIL.
void check_signals();

void bind_gpu(py::module_& m);

}  // namespace fused_tp::bindings

// Helpers for the Python bindings. Only this folder uses pybind11; everything else in csrc is plain C++ or CUDA.
//
// Tensors are passed as addresses, sizes and dtype numbers, so the module needs no torch to build or to load, and one
// wheel works with every torch version. The bindings are two files, not one per component, because each file takes
// seconds to compile pybind11's headers.
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

// Copies the bytes of `packed` into a T. `name` names the argument in the error message.
template <typename T>
T parse_struct(const py::bytes& packed, const char* name) {
  const std::string bytes = packed;
  T value{};
  if (bytes.size() != sizeof value)
    throw py::value_error(std::string(name) + " has " + std::to_string(sizeof value) + " bytes, not " +
                          std::to_string(bytes.size()));
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

DType to_dtype(int number);

// Conversion of an argument: `PythonType` is the type that Python passes for a C++ parameter of type T, and `convert`
// returns the T. Specializations convert addresses to pointers and numbers to enums.
template <typename T>
struct Argument {
  using PythonType = T;
  static T convert(T argument) { return argument; }
};
template <typename T>
struct Argument<T*> {
  using PythonType = Address;
  static T* convert(Address argument) { return pointer<T>(argument); }
};
template <typename T>
struct Argument<T&> {
  using PythonType = T&;
  static T& convert(T& argument) { return argument; }
};
template <>
struct Argument<DType> {
  using PythonType = int;
  static DType convert(int argument) { return to_dtype(argument); }
};

// Wraps a function or method for pybind11: the wrapper takes the PythonType of each parameter.
template <typename Result, typename... Parameters>
auto wrap(Result (*function)(Parameters...)) {
  return [function](typename Argument<Parameters>::PythonType... arguments) {
    return function(Argument<Parameters>::convert(arguments)...);
  };
}

template <typename Class, typename Result, typename... Parameters>
auto wrap(Result (Class::*method)(Parameters...)) {
  return [method](Class& self, typename Argument<Parameters>::PythonType... arguments) {
    return (self.*method)(Argument<Parameters>::convert(arguments)...);
  };
}

// Raises ValueError with `message` unless the condition holds.
void require(bool condition, const char* message);

// Acquires the GIL and throws KeyboardInterrupt, or another exception of a Python signal handler, if a signal is
// pending. Waits call it so that Ctrl-C ends them.
void check_signals();

void bind_gpu(py::module_& m);

}  // namespace fused_tp::bindings

// The CUDA driver: streams, events, pinned memory, and what can be enqueued.
#include "driver/driver.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>

#include "bindings/bindings.h"

namespace fused_tp::bindings {

using namespace fused_tp::driver;  // NOLINT: this file binds that namespace

namespace {

Stream to_stream(Address handle) { return reinterpret_cast<Stream>(handle); }
Event to_event(Address handle) { return reinterpret_cast<Event>(handle); }

std::shared_ptr<const Driver> constant(const std::shared_ptr<Driver>& driver) { return driver; }

}  // namespace

void bind_driver(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<Driver, std::shared_ptr<Driver>>(
      m, "Driver",
      "The CUDA driver, bound at run time. Streams and events are its handles, as ints; 0 is the default stream.")
      .def(py::init([](const std::string& path) { return std::const_pointer_cast<Driver>(Driver::open(path)); }),
           py::arg("path") = "libcuda.so.1", release_gil(),
           "Raises RuntimeError where there is no driver, or one older than CUDA 12.0.")
      .def_property_readonly("path", &Driver::path)
      .def_property_readonly("version", &Driver::version, "12040 for CUDA 12.4.")
      .def_property_readonly("device_count", &Driver::device_count)
      .def(
          "has_multicast",
          [](const Driver& driver, int device) { return driver.attribute(Attribute::kMulticast, device) != 0; },
          py::arg("device"), "Whether the device can reach the memory of several devices through one address.")
      .def(
          "has_stream_memory_ops",
          [](const Driver& driver, int device) { return driver.attribute(Attribute::kStreamMemoryOps64, device) != 0; },
          py::arg("device"), "Whether a stream can write and wait for 64-bit words.")
      .def(
          "record",
          [](const Driver& driver, int device, Address event, Address stream) {
            const Driver::Device current(driver, device);
            driver.record(to_event(event), to_stream(stream));
          },
          py::arg("device"), py::arg("event"), py::arg("stream"), release_gil(),
          "The event is done once everything that is in the stream by now has ended.")
      .def(
          "done",
          [](const Driver& driver, int device, Address event) {
            const Driver::Device current(driver, device);
            return driver.done(to_event(event));
          },
          py::arg("device"), py::arg("event"), release_gil())
      .def(
          "wait",
          [](const Driver& driver, int device, Address stream, Address event) {
            const Driver::Device current(driver, device);
            driver.wait(to_stream(stream), to_event(event));
          },
          py::arg("device"), py::arg("stream"), py::arg("event"), release_gil(),
          "The stream goes on once the event's last record is done.")
      .def(
          "copy",
          [](const Driver& driver, int device, Address to, Address from, size_t bytes, Address stream) {
            const Driver::Device current(driver, device);
            driver.copy(to, from, bytes, to_stream(stream));
          },
          py::arg("device"), py::arg("to"), py::arg("source"), py::arg("bytes"), py::arg("stream"), release_gil())
      .def(
          "fill",
          [](const Driver& driver, int device, Address to, unsigned char byte, size_t bytes, Address stream) {
            const Driver::Device current(driver, device);
            driver.fill(to, byte, bytes, to_stream(stream));
          },
          py::arg("device"), py::arg("to"), py::arg("byte"), py::arg("bytes"), py::arg("stream"), release_gil())
      .def(
          "write_value",
          [](const Driver& driver, int device, Address stream, Address word, uint64_t value) {
            const Driver::Device current(driver, device);
            driver.write_value(to_stream(stream), word, value);
          },
          py::arg("device"), py::arg("stream"), py::arg("word"), py::arg("value"), release_gil())
      .def(
          "wait_value",
          [](const Driver& driver, int device, Address stream, Address word, uint64_t value, bool exactly) {
            const Driver::Device current(driver, device);
            driver.wait_value(to_stream(stream), word, value, exactly ? Until::kEqual : Until::kAtLeast);
          },
          py::arg("device"), py::arg("stream"), py::arg("word"), py::arg("value"), py::arg("exactly") = false,
          release_gil(), "The stream goes on once the word is `value` or (not `exactly`) more.")
      .def(
          "capturing",
          [](const Driver& driver, int device, Address stream) {
            const Driver::Device current(driver, device);
            return driver.capturing(to_stream(stream));
          },
          py::arg("device"), py::arg("stream"), release_gil(), "Whether the stream is captured into a CUDA graph.")
      .def(
          "synchronize",
          [](const Driver& driver, int device, Address stream, double seconds) {
            const auto begun = std::chrono::steady_clock::now();
            while (true) {  // in slices, for Ctrl-C
              const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
              const double slice = std::min(0.05, seconds - waited);
              {
                const Driver::Device current(driver, device);
                if (driver.synchronize(to_stream(stream), slice)) return true;
              }
              if (slice < 0.05) return false;
              check_signals();
            }
          },
          py::arg("device"), py::arg("stream"), py::arg("seconds"), release_gil(),
          "Whether everything in the stream has ended, after at most that many seconds.");

  py::class_<OwnStream>(m, "DriverStream", "A stream that does not wait for the default stream.")
      .def(py::init([](const std::shared_ptr<Driver>& driver, int device, bool high_priority) {
             return std::make_unique<OwnStream>(constant(driver), device, high_priority);
           }),
           py::arg("driver"), py::arg("device"), py::arg("high_priority") = false)
      .def_property_readonly("handle", [](const OwnStream& stream) { return reinterpret_cast<Address>(stream.get()); });

  py::class_<OwnEvent>(m, "DriverEvent", "An event without timing.")
      .def(py::init([](const std::shared_ptr<Driver>& driver, int device) {
             return std::make_unique<OwnEvent>(constant(driver), device);
           }),
           py::arg("driver"), py::arg("device"))
      .def_property_readonly("handle", [](const OwnEvent& event) { return reinterpret_cast<Address>(event.get()); });

  py::class_<PinnedMemory>(m, "PinnedMemory", py::buffer_protocol(),
                           "Zeroed memory of the host that the device reads and writes in place.")
      .def(py::init([](const std::shared_ptr<Driver>& driver, int device, size_t bytes) {
             return std::make_unique<PinnedMemory>(constant(driver), device, bytes);
           }),
           py::arg("driver"), py::arg("device"), py::arg("bytes"))
      .def_buffer([](const PinnedMemory& memory) {
        return py::buffer_info(static_cast<char*>(memory.data()), 1, "B", static_cast<py::ssize_t>(memory.bytes()));
      })
      .def_property_readonly("device_address", &PinnedMemory::device_address);
}

}  // namespace fused_tp::bindings

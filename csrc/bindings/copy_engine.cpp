// Gathers and scatters by copy engines.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "copy_engine/workspace.h"

namespace fused_tp::bindings {

using namespace fused_tp::copy_engine;  // NOLINT: this file binds that namespace

namespace {

using Range = std::pair<Address, size_t>;  // address and bytes

Memory to_memory(const Range& range) { return {static_cast<DeviceAddress>(range.first), range.second}; }

std::vector<Memory> to_memories(const std::vector<Range>& ranges) {
  std::vector<Memory> memories;
  memories.reserve(ranges.size());
  for (const Range& range : ranges) memories.push_back(to_memory(range));
  return memories;
}

// A workspace with its device's context current around every call.
class BoundWorkspace {
 public:
  BoundWorkspace(const std::string& library, int device, int rank, const std::vector<Address>& addresses,
                 int64_t gather_bytes, int64_t scatter_bytes)
      : driver_(Driver::open(library)), device_(device) {
    require(rank >= 0 && rank < static_cast<int>(addresses.size()), "rank must be one of those that addresses is for");
    require(gather_bytes >= 0 && scatter_bytes >= 0, "sizes must not be negative");
    const Driver::Device guard(*driver_, device_);
    require(driver_->attribute(driver::Attribute::kStreamMemoryOps64, device) == 1,
            "this device's streams cannot wait for a word of memory");
    workspace_ = std::make_unique<Workspace>(driver_, device, rank,
                                             std::vector<DeviceAddress>(addresses.begin(), addresses.end()),
                                             gather_bytes, scatter_bytes);
  }
  ~BoundWorkspace() {
    try {
      const Driver::Device guard(*driver_, device_);
      workspace_.reset();
    } catch (const std::exception&) {  // the device is gone, and all of the workspace with it
      (void)workspace_.release();
    }
  }
  BoundWorkspace(const BoundWorkspace&) = delete;
  BoundWorkspace& operator=(const BoundWorkspace&) = delete;

  template <typename Use>
  auto with(Use&& use) {
    const Driver::Device guard(*driver_, device_);
    return use(*workspace_);
  }
  Workspace& operator*() { return *workspace_; }

 private:
  std::shared_ptr<const Driver> driver_;
  int device_;
  std::unique_ptr<Workspace> workspace_;
};

Stream to_stream(Address handle) { return pointer<CUstream_st>(handle); }

}  // namespace

void bind_copy_engine(py::module_& m) {
  using Call = Workspace::Call;
  // Without the GIL: on the double of the driver the default stream runs everything at once, waits for peers included.
  using NoGil = py::call_guard<py::gil_scoped_release>;

  py::class_<Call>(m, "CopyEngineCall", "One call of an op, from its first message to its gates.");

  py::class_<BoundWorkspace>(m, "CopyEngineWorkspace", "Gathers and scatters of one group by copy engines.")
      .def(py::init<const std::string&, int, int, const std::vector<Address>&, int64_t, int64_t>(), py::arg("library"),
           py::arg("device"), py::arg("rank"), py::arg("addresses"), py::arg("gather_bytes"), py::arg("scatter_bytes"),
           NoGil())
      .def_static(
          "bytes",
          [](int world, int64_t gather_bytes, int64_t scatter_bytes) {
            return Layout(world, gather_bytes, scatter_bytes).bytes();
          },
          py::arg("world"), py::arg("gather_bytes"), py::arg("scatter_bytes"), "What a rank's workspace takes.")
      .def(
          "begin",
          [](BoundWorkspace& self, int op, Address stream, double timeout_seconds) {
            return self.with(
                [&](Workspace& w) { return w.begin(static_cast<Op>(op), to_stream(stream), timeout_seconds); });
          },
          py::arg("op"), py::arg("stream"), py::arg("timeout_seconds"), NoGil())
      .def(
          "gather",
          [](BoundWorkspace& self, Call& call, Address stream, Range shard, const std::vector<Range>& to) {
            self.with([&](Workspace& w) { w.gather(call, to_stream(stream), to_memory(shard), to_memories(to)); });
          },
          py::arg("call"), py::arg("stream"), py::arg("shard"), py::arg("to"), NoGil(),
          "Starts to gather (address, bytes) of this rank; `to` is where those of the others go, by rank.")
      .def(
          "wait_for",
          [](BoundWorkspace& self, const Call& call, Address stream, int peer) {
            self.with([&](Workspace& w) { w.wait_for(call, to_stream(stream), peer); });
          },
          py::arg("call"), py::arg("stream"), py::arg("peer"), NoGil())
      .def(
          "scatter", [](BoundWorkspace& self) { return (*self).scatter(); }, "The number of a new scatter.")
      .def(
          "push",
          [](BoundWorkspace& self, Call& call, Address stream, int scatter, int peer, Range block) {
            self.with([&](Workspace& w) { w.push(call, to_stream(stream), scatter, peer, to_memory(block)); });
          },
          py::arg("call"), py::arg("stream"), py::arg("scatter"), py::arg("peer"), py::arg("block"), NoGil())
      .def(
          "receive",
          [](BoundWorkspace& self, const Call& call, Address stream, int scatter) {
            self.with([&](Workspace& w) { w.receive(call, to_stream(stream), scatter); });
          },
          py::arg("call"), py::arg("stream"), py::arg("scatter"), NoGil())
      .def(
          "release",
          [](BoundWorkspace& self, Address stream, int scatter) {
            self.with([&](Workspace& w) { w.release(to_stream(stream), scatter); });
          },
          py::arg("stream"), py::arg("scatter"), NoGil())
      .def(
          "finish",
          [](BoundWorkspace& self, Call& call, Address stream, const std::vector<Range>& results) {
            self.with([&](Workspace& w) { w.finish(call, to_stream(stream), to_memories(results)); });
          },
          py::arg("call"), py::arg("stream"), py::arg("results"), NoGil(),
          "The end of a call; results as (address, bytes) become NaN where it does not come to a good one.")
      .def(
          "quiet",
          [](BoundWorkspace& self, double seconds) {
            return self.with([&](Workspace& w) { return w.quiet(seconds); });
          },
          py::arg("seconds"), NoGil(), "Whether all that was enqueued has ended, after waiting that long at most.")
      .def(
          "slot", [](BoundWorkspace& self, int scatter, int sender) { return (*self).layout().slot(scatter, sender); },
          py::arg("scatter"), py::arg("sender"), "Where a block from `sender` is in this rank's workspace.")
      .def_property_readonly("slot_bytes", [](BoundWorkspace& self) { return (*self).layout().slot_bytes(); })
      .def_property_readonly("stage_bytes", [](BoundWorkspace& self) { return (*self).layout().stage_bytes(); })
      .def_property_readonly("streams",
                             [](BoundWorkspace& self) {
                               std::vector<Address> handles;
                               for (Stream stream : (*self).streams())
                                 handles.push_back(reinterpret_cast<Address>(stream));
                               return handles;
                             })
      .def_property_readonly("failure",
                             [](BoundWorkspace& self) { return static_cast<int>((*self).keeper().failure()); })
      .def_property_readonly("sentence", [](BoundWorkspace& self) { return (*self).keeper().sentence(); })
      .def(
          "lose", [](BoundWorkspace& self, int rank) { (*self).keeper().lose(rank); }, py::arg("rank"), NoGil())
      .def(
          "abort", [](BoundWorkspace& self, const std::string& why) { (*self).keeper().abort(why); }, py::arg("why"),
          NoGil())
      .def("stop", [](BoundWorkspace& self) { (*self).keeper().stop(); }, NoGil());
}

}  // namespace fused_tp::bindings

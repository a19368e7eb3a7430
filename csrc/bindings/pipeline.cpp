// Chunked movements over NCCL: what goes where in which exchange, and running that.
#include "nccl/pipeline.h"

#include "bindings/bindings.h"
#include "nccl/chunk_plan.h"

namespace fused_tp::bindings {

using namespace fused_tp::nccl;  // NOLINT: this file binds that namespace

namespace {

using Parts = std::vector<std::tuple<int, int64_t, int64_t>>;

Parts to_tuples(const std::vector<Part>& parts) {
  Parts found;
  for (const Part& part : parts) found.emplace_back(part.peer, part.start, part.count);
  return found;
}

std::vector<std::pair<int64_t, int64_t>> to_ranges(const std::vector<Part>& parts) {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const Part& part : parts) found.emplace_back(part.start, part.start + part.count);
  return found;
}

void check_plan_arguments(const std::vector<int64_t>& counts, int rank, int chunks) {
  require(!counts.empty(), "counts holds the rows of every rank; it is empty");
  require(rank >= 0 && rank < static_cast<int>(counts.size()), "rank must be one of those that counts is for");
  require(chunks >= 1, "chunks must be 1 or more");
  for (const int64_t count : counts) require(count >= 0, "counts must not be negative");
}

template <ChunkPlan (*make)(const std::vector<int64_t>&, int, int)>
std::shared_ptr<ChunkPlan> checked_plan(const std::vector<int64_t>& counts, int rank, int chunks) {
  check_plan_arguments(counts, rank, chunks);
  return std::make_shared<ChunkPlan>(make(counts, rank, chunks));
}

void bind_plans(py::module_& m) {
  py::class_<ChunkPlan, std::shared_ptr<ChunkPlan>>(m, "ChunkPlan", "Which rows move in which exchange.")
      .def("__len__", [](const ChunkPlan& plan) { return plan.exchanges.size(); })
      .def_readonly("pieces", &ChunkPlan::pieces)
      .def(
          "sends", [](const ChunkPlan& plan, size_t i) { return to_tuples(plan.exchanges.at(i).sends); },
          "(peer, start, rows) of what this rank sends in an exchange.")
      .def(
          "receives", [](const ChunkPlan& plan, size_t i) { return to_tuples(plan.exchanges.at(i).receives); },
          "(peer, start, rows) of what this rank receives in an exchange.")
      .def(
          "rows_sent", [](const ChunkPlan& plan, size_t i) { return to_ranges(joined(plan.exchanges.at(i).sends)); },
          "(start, stop) of the rows that are sent in an exchange; neighbours are one.")
      .def(
          "rows_received",
          [](const ChunkPlan& plan, size_t i) { return to_ranges(joined(plan.exchanges.at(i).receives)); },
          "(start, stop) of the rows that arrive in an exchange; neighbours are one.");
  m.def("gather_plan", &checked_plan<gather_plan>, py::arg("counts"), py::arg("rank"), py::arg("chunks"));
  m.def("scatter_plan", &checked_plan<scatter_plan>, py::arg("counts"), py::arg("rank"), py::arg("chunks"));
}

Stream to_stream(Address handle) { return reinterpret_cast<Stream>(handle); }

std::vector<Transfer> to_transfers(const std::vector<std::tuple<int, Address, size_t>>& sends,
                                   const std::vector<std::tuple<int, Address, size_t>>& receives) {
  std::vector<Transfer> found;
  for (const auto& [peer, address, bytes] : sends)
    if (bytes > 0) found.push_back({Transfer::kSend, peer, pointer(address), bytes});
  for (const auto& [peer, address, bytes] : receives)
    if (bytes > 0) found.push_back({Transfer::kReceive, peer, pointer(address), bytes});
  return found;
}

void check_counts(const Communicator& communicator, const std::vector<int64_t>& counts) {
  require(static_cast<int>(counts.size()) == communicator.size(), "counts must hold the rows of every rank");
}

void bind_pipelines(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<Pipeline>(m, "Pipeline", "Exchanges on a communicator's stream.")
      .def("__len__", &Pipeline::size)
      .def(
          "wait", [](Pipeline& pipeline, size_t i, Address stream) { pipeline.wait(i, to_stream(stream)); },
          py::arg("exchange"), py::arg("stream"), release_gil(),
          "`stream` goes on once that exchange has ended. Raises what the communicator has failed with.")
      .def("waiting", &Pipeline::waiting, release_gil(),
           "Which exchange waits for peers now, all before it having ended; -1: none. For a thread of our own.")
      .def_property_readonly("captured", &Pipeline::captured, "Some exchange is part of a CUDA graph.")
      .def("ended", &Pipeline::ended, release_gil(), "Whether that was all, and has ended. For a thread of our own.");
  py::class_<Movement, Pipeline>(m, "Movement", "Some sends and receives at once.")
      .def(py::init([](std::shared_ptr<Communicator> communicator,
                       const std::vector<std::tuple<int, Address, size_t>>& sends,
                       const std::vector<std::tuple<int, Address, size_t>>& receives, Address stream) {
             const std::vector<Transfer> transfers = to_transfers(sends, receives);
             py::gil_scoped_release release;
             return std::make_unique<Movement>(std::move(communicator), transfers, to_stream(stream));
           }),
           py::arg("communicator"), py::arg("sends"), py::arg("receives"), py::arg("stream"),
           "sends and receives: (peer, address, bytes) each.");
  py::class_<GatherPipeline, Pipeline>(m, "GatherPipeline", "Rows of all ranks, in the exchanges of a plan.")
      .def(py::init([](std::shared_ptr<Communicator> communicator, const std::shared_ptr<ChunkPlan>& plan,
                       const std::vector<int64_t>& counts, int64_t row_bytes, Address own, Address gathered,
                       Address stream) {
             check_counts(*communicator, counts);
             py::gil_scoped_release release;
             return std::make_unique<GatherPipeline>(std::move(communicator), *plan, counts, row_bytes,
                                                     pointer<const char>(own), pointer<char>(gathered),
                                                     to_stream(stream));
           }),
           py::arg("communicator"), py::arg("plan"), py::arg("counts"), py::arg("row_bytes"), py::arg("own"),
           py::arg("gathered"), py::arg("stream"))
      .def_property_readonly("brings_own_rows", &GatherPipeline::brings_own_rows);
  py::class_<ScatterPipeline, Pipeline>(m, "ScatterPipeline", "Terms of the own rows, in the exchanges of a plan.")
      .def(py::init([](std::shared_ptr<Communicator> communicator, std::shared_ptr<ChunkPlan> plan,
                       std::vector<int64_t> counts, int64_t row_bytes, Address partial, bool without_own,
                       Address terms) {
             check_counts(*communicator, counts);
             return std::make_unique<ScatterPipeline>(std::move(communicator), std::move(plan), std::move(counts),
                                                      row_bytes, pointer<const char>(partial), without_own,
                                                      pointer<char>(terms));
           }),
           py::arg("communicator"), py::arg("plan"), py::arg("counts"), py::arg("row_bytes"), py::arg("partial"),
           py::arg("without_own"), py::arg("terms"))
      .def(
          "send", [](ScatterPipeline& pipeline, Address stream) { pipeline.send(to_stream(stream)); },
          py::arg("stream"), release_gil(), "Enqueues the next exchange, behind what is in `stream`.");
}

}  // namespace

void bind_pipeline(py::module_& m) {
  bind_plans(m);
  bind_pipelines(m);
}

}  // namespace fused_tp::bindings

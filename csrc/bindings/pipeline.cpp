// Chunked movements over NCCL: what goes where in which exchange, and running that.
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

}  // namespace

void bind_pipeline(py::module_& m) { bind_plans(m); }

}  // namespace fused_tp::bindings

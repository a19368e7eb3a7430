#include "nccl/pipeline.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fused_tp::nccl {

namespace {

Transfer sent(const Part& part, const char* data, int64_t row_bytes) {
  return {Transfer::kSend, part.peer, const_cast<char*>(data + part.start * row_bytes),
          static_cast<size_t>(part.count * row_bytes)};
}

Transfer received(const Part& part, char* data, int64_t row_bytes) {
  return {Transfer::kReceive, part.peer, data + part.start * row_bytes, static_cast<size_t>(part.count * row_bytes)};
}

}  // namespace

size_t Pipeline::size() const {
  const std::lock_guard lock(mutex_);
  return tickets_.size();
}

void Pipeline::add(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  tickets_.push_back(std::move(ticket));
}

bool Pipeline::ended() const {
  Ticket last;
  {
    const std::lock_guard lock(mutex_);
    if (tickets_.size() < expected_) return false;
    if (!tickets_.empty()) last = tickets_.back();
  }
  if (!last.ended || last.captured) return true;
  const Driver& driver = *communicator_->driver();
  driver.ignore_captures();
  const Driver::Device current(driver, communicator_->device());
  return driver.done(last.ended->get());
}

int64_t Pipeline::waiting() const {
  std::vector<Ticket> tickets;
  {
    const std::lock_guard lock(mutex_);
    tickets = tickets_;
  }
  const Driver& driver = *communicator_->driver();
  driver.ignore_captures();
  const Driver::Device current(driver, communicator_->device());
  for (size_t i = 0; i < tickets.size(); ++i) {
    const Ticket& ticket = tickets[i];
    if (!ticket.ended || ticket.captured || driver.done(ticket.ended->get())) continue;
    return !ticket.begun || driver.done(ticket.begun->get()) ? static_cast<int64_t>(i) : -1;
  }
  return -1;
}

bool Pipeline::captured() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(tickets_.begin(), tickets_.end(), [](const Ticket& ticket) { return ticket.captured; });
}

void Pipeline::wait(size_t i, Stream stream) {
  const Ticket ticket = [&] {
    const std::lock_guard lock(mutex_);
    return tickets_.at(i);
  }();
  if (ticket.ended) communicator_->wait(ticket, stream);
  communicator_->check();
}

void Pipeline::add(const std::vector<Transfer>& transfers, std::optional<Stream> after) {
  if (!transfers.empty()) return add(communicator_->exchange(transfers, after));
  add(tickets_.empty() ? Ticket{} : tickets_.back());  // to wait for it is to wait for those before
}

Movement::Movement(std::shared_ptr<Communicator> communicator, const std::vector<Transfer>& transfers, Stream stream)
    : Pipeline(std::move(communicator), 1) {
  add(transfers, stream);
}

GatherPipeline::GatherPipeline(std::shared_ptr<Communicator> communicator, const ChunkPlan& plan,
                               const std::vector<int64_t>& counts, int64_t row_bytes, const char* own, char* gathered,
                               Stream stream)
    : Pipeline(std::move(communicator), plan.exchanges.size()) {
  const bool even = std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts[0]; });
  if (plan.exchanges.size() == 1 && even && counts[0] * row_bytes > 0) {
    add(this->communicator().all_gather(own, gathered, static_cast<size_t>(counts[0] * row_bytes), stream));
    brings_own_rows_ = true;
    return;
  }
  // The first one that moves anything orders all behind `stream`: they begin one after the other.
  bool ordered = false;
  for (const Exchange& exchange : plan.exchanges) {
    std::vector<Transfer> transfers;
    if (row_bytes > 0) {
      for (const Part& part : exchange.sends) transfers.push_back(sent(part, own, row_bytes));
      for (const Part& part : exchange.receives) transfers.push_back(received(part, gathered, row_bytes));
    }
    add(transfers, ordered ? std::nullopt : std::optional<Stream>(stream));
    ordered |= !transfers.empty();
  }
}

ScatterPipeline::ScatterPipeline(std::shared_ptr<Communicator> communicator, std::shared_ptr<const ChunkPlan> plan,
                                 std::vector<int64_t> counts, int64_t row_bytes, const char* partial, bool without_own,
                                 char* terms)
    : Pipeline(std::move(communicator), plan->exchanges.size()),
      plan_(std::move(plan)),
      counts_(std::move(counts)),
      row_bytes_(row_bytes),
      partial_(partial),
      without_own_(without_own),
      terms_(terms) {}

void ScatterPipeline::send(Stream stream) {
  if (size() >= plan_->exchanges.size()) throw std::logic_error("every exchange of this pipeline has been enqueued");
  const Exchange& exchange = plan_->exchanges[size()];
  const int64_t own = counts_[static_cast<size_t>(communicator().rank())];
  std::vector<Transfer> transfers;
  if (row_bytes_ == 0) return add(transfers, std::nullopt);
  for (Part part : exchange.sends) {
    if (without_own_ && part.peer > communicator().rank()) part.start -= own;
    transfers.push_back(sent(part, partial_, row_bytes_));
  }
  for (Part part : exchange.receives) {
    part.start += part.peer * own;
    transfers.push_back(received(part, terms_, row_bytes_));
  }
  add(transfers, stream);
}

}  // namespace fused_tp::nccl

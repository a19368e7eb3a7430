#include "copy_engine/workspace.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace fused_tp::copy_engine {
namespace {

// More streams would not be faster: a GPU has few copy engines, which share its links.
constexpr int kMaxPullStreams = 4;
// Graphs take device memory. Training repeats the calls of one step, so a few hundred suffice.
constexpr size_t kMaxGraphs = 512;

Location private_location(const Memory& memory) { return {kPrivate, static_cast<int64_t>(memory.address)}; }

void require_room(size_t bytes, int64_t room, const char* item) {
  if (static_cast<int64_t>(bytes) > room)
    throw std::invalid_argument(std::string(item) + " has " + std::to_string(bytes) +
                                " bytes; the workspace has room for " + std::to_string(room));
}

}  // namespace

Workspace::Workspace(std::shared_ptr<const Driver> driver, int device, int rank, std::vector<DeviceAddress> addresses,
                     int64_t gather_bytes, int64_t scatter_bytes, std::vector<Stream> streams)
    : driver_(std::move(driver)),
      device_(device),
      protocol_(Layout(static_cast<int>(addresses.size()), gather_bytes, scatter_bytes), rank),
      addresses_(std::move(addresses)),
      events_(driver_, device),
      streams_(streams.empty() ? make_streams() : std::move(streams)),
      send_stream_(streams_.at(1)),
      pull_streams_(streams_.begin() + 2, streams_.end()),
      watchdog_(driver_, device, protocol_, addresses_, {streams_.begin() + 1, streams_.end()}, streams_[0]) {
  const Driver::ContextGuard guard(*driver_, device_);
  driver::PinnedMemory words(driver_, device, 8 * static_cast<size_t>(layout().total_words()));
  for (int word = 0; word < layout().total_words(); ++word)
    static_cast<uint64_t*>(words.data())[word] = layout().initial_value(word);
  driver_->copy(addresses_.at(static_cast<size_t>(rank)), words.device_address(), words.bytes(), send_stream_);
  if (!driver_->synchronize(send_stream_, 60)) {
    words.release();  // leaked: freeing it would wait for the copy
    throw std::runtime_error("the device did not copy " + std::to_string(words.bytes()) + " bytes within 60 s");
  }
}

std::vector<Stream> Workspace::make_streams() {
  std::vector<Stream> streams;
  for (int i = 0; i < 2 + std::min(layout().world() - 1, kMaxPullStreams); ++i) {
    owned_streams_.push_back(std::make_unique<driver::OwnedStream>(driver_, device_, driver::Priority::kGreatest));
    streams.push_back(owned_streams_.back()->get());
  }
  return streams;
}

bool Workspace::wait_idle(double seconds) {
  const Driver::ContextGuard guard(*driver_, device_);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const auto all_idle = [this] {
    const std::lock_guard<std::mutex> lock(watchdog_.capture_mutex());
    return std::all_of(streams_.begin() + 1, streams_.end(),
                       [this](Stream watched) { return driver_->is_idle(watched); });
  };
  while (true) {
    if (has_passed_gates() && all_idle()) return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Workspace::Call Workspace::begin(Op op, Stream stream, double timeout_seconds) {
  const Driver::ContextGuard guard(*driver_, device_);
  watchdog_.set_timeout(timeout_seconds);
  wait_for_last_call(stream);
  Call call;
  call.call_number = call_number(++call_count_, op);
  return call;
}

template <typename AddSteps>
void Workspace::enqueue(Stream stream, AddSteps&& add_steps) {
  steps_.clear();
  add_steps();
  memory_ops_.clear();
  for (const Step& step : steps_) {
    const auto word = [&] { return address({step.rank, 8 * static_cast<int64_t>(step.word)}); };
    switch (step.kind) {
      case Step::kWait:
        memory_ops_.push_back({driver::MemoryOp::kWait, word(), step.value});
        break;
      case Step::kWrite:
        memory_ops_.push_back({driver::MemoryOp::kWrite, word(), step.value});
        break;
      case Step::kReport:
        memory_ops_.push_back({driver::MemoryOp::kWrite, watchdog_.word_address(step.word), step.value});
        break;
      case Step::kCopy:
        driver_->enqueue_memory_ops(stream, memory_ops_);
        memory_ops_.clear();
        driver_->copy(address(step.to), address(step.from), static_cast<size_t>(step.bytes), stream);
        break;
    }
  }
  driver_->enqueue_memory_ops(stream, memory_ops_);
}

template <typename Work>
void Workspace::launch_repeated(std::vector<uint64_t> key, const std::vector<Stream>& streams,
                                const std::vector<Stream>& capture_streams, Work&& enqueue_work) {
  if (graphs_.size() == kMaxGraphs && wait_idle(0)) graphs_.clear();
  const auto entry = graphs_.find(key);
  if (entry == graphs_.end()) {
    enqueue_work(streams);
    if (graphs_.size() < kMaxGraphs) graphs_.emplace(std::move(key), nullptr);
    return;
  }
  if (!entry->second) {
    // Capture in existing streams: work already enqueued in them is not affected. New streams would occupy further
    // hardware queues. Creating one here may also synchronize the device, which deadlocks if a kernel of a peer already
    // waits for this rank.
    const std::lock_guard<std::mutex> lock(watchdog_.capture_mutex());
    entry->second = std::make_unique<const driver::Graph>(driver_, device_, capture_streams[0],
                                                          [&] { enqueue_work(capture_streams); });
  }
  entry->second->launch(streams[0]);
}

void Workspace::gather(Call& call, Stream stream, Memory shard, const std::vector<Memory>& to) {
  const int world = layout().world();
  if (world == 1) return;
  require_room(shard.bytes, layout().stage_bytes(), "a shard");
  if (static_cast<int>(to.size()) != world)
    throw std::invalid_argument("a gather needs a destination for each rank's shard");
  for (const Memory& memory : to) require_room(memory.bytes, layout().stage_bytes(), "a shard");
  const Driver::ContextGuard guard(*driver_, device_);
  const int index = static_cast<int>(gather_count_++ % kChannels);
  const SharedEvent begin_event = record(stream);
  driver_->wait(send_stream_, begin_event->get());
  enqueue(send_stream_, [&] {
    protocol_.stage(steps_, index, call.call_number, private_location(shard), static_cast<int64_t>(shard.bytes));
  });
  call.has_sends = true;
  call.arrival_events.assign(static_cast<size_t>(world), nullptr);
  // Pulls begin after this rank's shard is staged. A graph may run its branches in any order, and a branch that waits
  // for a peer must not delay the shard for which this peer waits. This costs no time, because the peers stage theirs
  // meanwhile.
  const SharedEvent staged_event = record(send_stream_);
  for (const Stream pull_stream : pull_streams_) driver_->wait(pull_stream, staged_event->get());
  if (!driver_->is_capturing(stream)) {
    if (std::exchange(has_offer_pulls_, false)) fork_streams(pull_streams_);
    has_gather_pulls_ = true;
  }
  for (int distance = 1; distance < world; ++distance) {
    const int peer = peer_at(rank(), distance, world);
    const Memory& destination = to[static_cast<size_t>(peer)];
    enqueue(pull_stream(peer), [&] {
      protocol_.pull(steps_, index, call.call_number, peer, private_location(destination),
                     static_cast<int64_t>(destination.bytes));
    });
    call.arrival_events[static_cast<size_t>(peer)] = record(pull_stream(peer));
  }
}

void Workspace::wait_for(const Call& call, Stream stream, int peer) {
  const Driver::ContextGuard guard(*driver_, device_);
  if (static_cast<size_t>(peer) < call.arrival_events.size() && call.arrival_events[static_cast<size_t>(peer)])
    driver_->wait(stream, call.arrival_events[static_cast<size_t>(peer)]->get());
}

int Workspace::offer(Call& call, Stream stream, Op op, Memory shard, const std::vector<Memory>& to) {
  const int world = layout().world();
  require_room(shard.bytes, layout().stage_bytes(), "a shard");
  if (static_cast<int>(to.size()) != world)
    throw std::invalid_argument("a gather needs a destination for each rank's shard");
  for (const Memory& memory : to) require_room(memory.bytes, layout().stage_bytes(), "a shard");
  const Driver::ContextGuard guard(*driver_, device_);
  const int index = static_cast<int>(gather_count_++ % kChannels);
  const Memory own_destination = to[static_cast<size_t>(rank())];
  // Call number 0, because a graph reports the same number in every launch.
  const uint64_t graph_call_number = call_number(0, op);
  const auto make_key = [&](uint64_t graph) {
    return std::vector<uint64_t>{graph, static_cast<uint64_t>(index), graph_call_number};
  };
  // Messages of a channel must be sent and pulled in the order of calls. So `stream`, which stages the shard, waits for
  // the send stream, and the first pull stream, in which graphs are launched, waits for the others.
  if (std::exchange(has_gather_pulls_, false)) {
    driver_->wait(stream, record(send_stream_)->get());
    join_streams(pull_streams_);
  }
  std::vector<uint64_t> stage_key = make_key(0), fetch_key = make_key(1);
  stage_key.insert(stage_key.end(), {shard.address, shard.bytes, own_destination.address, own_destination.bytes});
  for (const Memory& memory : to) fetch_key.insert(fetch_key.end(), {memory.address, memory.bytes});
  launch_repeated(std::move(stage_key), {stream}, {send_stream_}, [&](const std::vector<Stream>& streams) {
    enqueue(streams[0], [&] {
      protocol_.offer(steps_, index, graph_call_number, private_location(shard), private_location(own_destination),
                      static_cast<int64_t>(shard.bytes), own_destination.bytes > 0);
    });
  });
  call.offered_channel = index;
  if (world == 1) return index;
  has_offer_pulls_ = true;
  launch_repeated(std::move(fetch_key), pull_streams_, pull_streams_,
                  [&](const std::vector<Stream>& streams) { enqueue_fetches(streams, index, graph_call_number, to); });
  return index;
}

void Workspace::enqueue_fetches(const std::vector<Stream>& streams, int index, uint64_t call,
                                const std::vector<Memory>& to) {
  enqueue(streams[0], [&] { protocol_.begin_fetch(steps_, index); });
  fork_streams(streams);
  for (int distance = 1; distance < layout().world(); ++distance) {
    const int peer = peer_at(rank(), distance, layout().world());
    const Memory& destination = to[static_cast<size_t>(peer)];
    enqueue(streams[static_cast<size_t>(distance - 1) % streams.size()], [&] {
      protocol_.fetch(steps_, index, call, peer, private_location(destination),
                      static_cast<int64_t>(destination.bytes));
    });
  }
  join_streams(streams);
  enqueue(streams[0], [&] { protocol_.end_fetch(steps_, index); });
}

void Workspace::fork_streams(const std::vector<Stream>& streams) {
  const SharedEvent begin_event = record(streams[0]);
  for (size_t i = 1; i < streams.size(); ++i) driver_->wait(streams[i], begin_event->get());
}

void Workspace::join_streams(const std::vector<Stream>& streams) {
  for (size_t i = 1; i < streams.size(); ++i) driver_->wait(streams[0], record(streams[i])->get());
}

int Workspace::scatter() {
  for (int tries = 0; tries < kChannels; ++tries) {
    const int index = static_cast<int>(scatter_count_++ % kChannels);
    if (!std::exchange(is_scatter_open_[index], true)) return index;
  }
  throw std::logic_error("2 scatters have begun already; receive one of them before the next begins");
}

void Workspace::push(Call& call, Stream stream, int scatter, int peer, Memory block) {
  require_room(block.bytes, layout().slot_bytes(), "a block");
  const Driver::ContextGuard guard(*driver_, device_);
  driver_->wait(send_stream_, record(stream)->get());
  enqueue(send_stream_, [&] {
    protocol_.push(steps_, scatter, call.call_number, peer, private_location(block), static_cast<int64_t>(block.bytes));
  });
  call.has_sends = true;
  push_events_[scatter] = record(send_stream_);
}

void Workspace::receive(const Call& call, Stream stream, int scatter) {
  const Driver::ContextGuard guard(*driver_, device_);
  is_scatter_open_[scatter] = false;
  // The wait begins after this rank's blocks are sent, for the same reason as the pulls in `gather`.
  if (push_events_[scatter]) driver_->wait(stream, push_events_[scatter]->get());
  push_events_[scatter] = nullptr;
  enqueue(stream, [&] { protocol_.receive(steps_, scatter, call.call_number); });
}

void Workspace::release(Stream stream, int scatter) {
  const Driver::ContextGuard guard(*driver_, device_);
  enqueue(stream, [&] { protocol_.release(steps_, scatter); });
}

void Workspace::finish(Call& call, Stream stream, std::vector<Memory> results) {
  if (layout().world() == 1) return;
  const Driver::ContextGuard guard(*driver_, device_);
  wait_for_last_call(stream);
  // Wait for all copies from and to the caller's memory, which the caller may reuse after the call.
  const int world = layout().world();
  for (int distance = world - 1; distance > 0 && distance >= world - static_cast<int>(pull_streams_.size()); --distance)
    wait_for(call, stream, peer_at(rank(), distance, world));  // the last pull in each stream
  if (call.has_sends) driver_->wait(stream, record(send_stream_)->get());
  const bool is_captured = driver_->is_capturing(stream);
  const uint64_t passage = ++passage_count_;
  watchdog_.register_results(passage, std::move(results), is_captured);
  enqueue(stream, [&] {
    if (call.offered_channel >= 0) protocol_.wait_copies_done(steps_, call.offered_channel);
    protocol_.pass_gates(steps_, passage, is_captured);
  });
  if (is_captured) return;
  last_stream_ = stream;
  last_passage_ = passage;
}

void Workspace::wait_for_last_call(Stream stream) {
  if (last_passage_ > 0 && last_stream_ != stream && !driver_->is_capturing(stream))
    driver_->enqueue_memory_ops(stream, {{driver::MemoryOp::kWaitAtLeast,
                                          watchdog_.word_address(passed_word(layout().world())), last_passage_}});
}

DeviceAddress Workspace::address(const Location& location) const {
  const auto offset = static_cast<DeviceAddress>(location.offset);
  return location.rank == kPrivate ? offset : addresses_[static_cast<size_t>(location.rank)] + offset;
}

SharedEvent Workspace::record(Stream stream) {
  SharedEvent event = events_.take();
  driver_->record(event->get(), stream);
  return event;
}

Stream Workspace::pull_stream(int peer) const {
  const int world = layout().world();
  const int distance = (peer - rank() + world) % world;
  return pull_streams_[static_cast<size_t>(distance - 1) % pull_streams_.size()];
}

}  // namespace fused_tp::copy_engine

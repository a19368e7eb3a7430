#include "copy_engine/workspace.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace fused_tp::copy_engine {
namespace {

// More streams gain nothing: a GPU has a few copy engines, which share its links.
constexpr int kMostIn = 4;
// Each graph takes some device memory; training repeats the calls of one step.
constexpr size_t kMostGraphs = 512;

Place in_private(const Memory& memory) { return {kPrivate, static_cast<int64_t>(memory.address)}; }

void require_room(size_t bytes, int64_t room, const char* what) {
  if (static_cast<int64_t>(bytes) > room)
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(bytes) +
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
      out_(streams_.at(1)),
      in_(streams_.begin() + 2, streams_.end()),
      watchdog_(driver_, device, protocol_, addresses_, {streams_.begin() + 1, streams_.end()}, streams_[0]) {
  const Driver::Device guard(*driver_, device_);
  driver::PinnedMemory words(driver_, device, 8 * static_cast<size_t>(layout().words()));
  for (int word = 0; word < layout().words(); ++word)
    static_cast<uint64_t*>(words.data())[word] = layout().first_value(word);
  driver_->copy(addresses_.at(static_cast<size_t>(rank)), words.device_address(), words.bytes(), out_);
  if (!driver_->synchronize(out_, 60)) {
    words.leave();  // freeing it would wait for the copy
    throw std::runtime_error("the device did not copy " + std::to_string(words.bytes()) + " bytes within 60 s");
  }
}

std::vector<Stream> Workspace::make_streams() {
  std::vector<Stream> made;
  for (int i = 0; i < 2 + std::min(layout().world() - 1, kMostIn); ++i) {
    made_.push_back(std::make_unique<driver::OwnStream>(driver_, device_, driver::Priority::kGreatest));
    made.push_back(made_.back()->get());
  }
  return made;
}

bool Workspace::quiet(double seconds) {
  const Driver::Device guard(*driver_, device_);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const auto idle = [this] {
    const std::lock_guard<std::mutex> lock(watchdog_.capturing());
    return std::all_of(streams_.begin() + 1, streams_.end(), [this](Stream side) { return driver_->idle(side); });
  };
  while (true) {
    if (passed() && idle()) return true;
    if (std::chrono::steady_clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Workspace::Call Workspace::begin(Op op, Stream stream, double timeout_seconds) {
  const Driver::Device guard(*driver_, device_);
  watchdog_.set_timeout(timeout_seconds);
  take_turn(stream);
  Call call;
  call.number = call_number(++calls_, op);
  return call;
}

// `give` adds the steps.
template <typename Give>
void Workspace::run(Stream stream, Give&& give) {
  steps_.clear();
  give();
  ops_.clear();
  for (const Step& step : steps_) {
    const auto word = [&] { return address({step.rank, 8 * static_cast<int64_t>(step.word)}); };
    switch (step.kind) {
      case Step::kWait:
        ops_.push_back({driver::MemoryOp::kWait, word(), step.value});
        break;
      case Step::kWrite:
        ops_.push_back({driver::MemoryOp::kWrite, word(), step.value});
        break;
      case Step::kSay:
        ops_.push_back({driver::MemoryOp::kWrite, watchdog_.progress(step.word), step.value});
        break;
      case Step::kCopy:
        driver_->memory_ops(stream, ops_);
        ops_.clear();
        driver_->copy(address(step.to), address(step.from), static_cast<size_t>(step.bytes), stream);
        break;
    }
  }
  driver_->memory_ops(stream, ops_);
}

// `give(streams)` adds work to the first of `streams`, and to others that begin after the first and end before it.
template <typename Give>
void Workspace::repeat(std::vector<uint64_t> key, const std::vector<Stream>& streams,
                       const std::vector<Stream>& capture, Give&& give) {
  if (graphs_.size() == kMostGraphs && quiet(0)) graphs_.clear();
  const auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    give(streams);
    if (graphs_.size() < kMostGraphs) graphs_.emplace(std::move(key), nullptr);
    return;
  }
  if (!found->second) {
    // Captured in streams that also do other work, which a capture does not affect. Separate streams would each take
    // one of the GPU's queues, and may not be created here: kernels of peers may already wait for this rank.
    const std::lock_guard<std::mutex> lock(watchdog_.capturing());
    found->second = std::make_unique<const driver::Graph>(driver_, device_, capture[0], [&] { give(capture); });
  }
  found->second->launch(streams[0]);
}

void Workspace::gather(Call& call, Stream stream, Memory shard, const std::vector<Memory>& to) {
  const int world = layout().world();
  if (world == 1) return;
  require_room(shard.bytes, layout().stage_bytes(), "a shard");
  if (static_cast<int>(to.size()) != world) throw std::invalid_argument("a gather needs a place for each rank's shard");
  for (const Memory& memory : to) require_room(memory.bytes, layout().stage_bytes(), "a shard");
  const Driver::Device guard(*driver_, device_);
  const int index = static_cast<int>(gathers_++ % kChannels);
  const SharedEvent begun = record(stream);
  driver_->wait(out_, begun->get());
  run(out_, [&] { protocol_.stage(steps_, index, call.number, in_private(shard), static_cast<int64_t>(shard.bytes)); });
  call.sent = true;
  call.arrived.assign(static_cast<size_t>(world), nullptr);
  // Pulls begin after this rank's shard is staged: in whatever order a graph runs its branches, one that waits for a
  // peer may not delay the shard that this peer waits for. It costs no time, as the peers have to stage theirs too.
  const SharedEvent staged = record(out_);
  for (const Stream in : in_) driver_->wait(in, staged->get());
  if (!driver_->capturing(stream)) {
    if (std::exchange(fetched_, false)) spread(in_);
    pulled_ = true;
  }
  for (int distance = 1; distance < world; ++distance) {
    const int peer = peer_at(rank(), distance, world);
    const Memory& place = to[static_cast<size_t>(peer)];
    run(in_of(peer), [&] {
      protocol_.pull(steps_, index, call.number, peer, in_private(place), static_cast<int64_t>(place.bytes));
    });
    call.arrived[static_cast<size_t>(peer)] = record(in_of(peer));
  }
}

void Workspace::wait_for(const Call& call, Stream stream, int peer) {
  const Driver::Device guard(*driver_, device_);
  if (static_cast<size_t>(peer) < call.arrived.size() && call.arrived[static_cast<size_t>(peer)])
    driver_->wait(stream, call.arrived[static_cast<size_t>(peer)]->get());
}

int Workspace::offer(Call& call, Stream stream, Op op, Memory shard, const std::vector<Memory>& to) {
  const int world = layout().world();
  require_room(shard.bytes, layout().stage_bytes(), "a shard");
  if (static_cast<int>(to.size()) != world) throw std::invalid_argument("a gather needs a place for each rank's shard");
  for (const Memory& memory : to) require_room(memory.bytes, layout().stage_bytes(), "a shard");
  const Driver::Device guard(*driver_, device_);
  const int index = static_cast<int>(gathers_++ % kChannels);
  const Memory own = to[static_cast<size_t>(rank())];
  // A graph would repeat the number of its first call.
  const uint64_t number = call_number(0, op);
  const auto key = [&](uint64_t which) { return std::vector<uint64_t>{which, static_cast<uint64_t>(index), number}; };
  // Messages of a channel are sent, and pulled, in the order of calls: so `stream` waits for `out_`, and the first of
  // `in_`, in which graphs are launched, for the others.
  if (std::exchange(pulled_, false)) {
    driver_->wait(stream, record(out_)->get());
    join(in_);
  }
  std::vector<uint64_t> staged = key(0), fetched = key(1);
  staged.insert(staged.end(), {shard.address, shard.bytes, own.address, own.bytes});
  for (const Memory& memory : to) fetched.insert(fetched.end(), {memory.address, memory.bytes});
  repeat(std::move(staged), {stream}, {out_}, [&](const std::vector<Stream>& streams) {
    run(streams[0], [&] {
      protocol_.offer(steps_, index, number, in_private(shard), in_private(own), static_cast<int64_t>(shard.bytes),
                      own.bytes > 0);
    });
  });
  call.offered = index;
  if (world == 1) return index;
  fetched_ = true;
  repeat(std::move(fetched), in_, in_, [&](const std::vector<Stream>& streams) { fetch(streams, index, number, to); });
  return index;
}

void Workspace::fetch(const std::vector<Stream>& streams, int index, uint64_t call, const std::vector<Memory>& to) {
  run(streams[0], [&] { protocol_.begin_fetch(steps_, index); });
  spread(streams);
  for (int distance = 1; distance < layout().world(); ++distance) {
    const int peer = peer_at(rank(), distance, layout().world());
    const Memory& place = to[static_cast<size_t>(peer)];
    run(streams[static_cast<size_t>(distance - 1) % streams.size()],
        [&] { protocol_.fetch(steps_, index, call, peer, in_private(place), static_cast<int64_t>(place.bytes)); });
  }
  join(streams);
  run(streams[0], [&] { protocol_.end_fetch(steps_, index); });
}

// spread: all other streams continue after the first; join: the first continues after all others.
void Workspace::spread(const std::vector<Stream>& streams) {
  const SharedEvent begun = record(streams[0]);
  for (size_t i = 1; i < streams.size(); ++i) driver_->wait(streams[i], begun->get());
}

void Workspace::join(const std::vector<Stream>& streams) {
  for (size_t i = 1; i < streams.size(); ++i) driver_->wait(streams[0], record(streams[i])->get());
}

int Workspace::scatter() {
  for (int tries = 0; tries < kChannels; ++tries) {
    const int index = static_cast<int>(scatters_++ % kChannels);
    if (!std::exchange(open_[index], true)) return index;
  }
  throw std::logic_error("a scatter cannot begin before one of those that have begun has been received");
}

void Workspace::push(Call& call, Stream stream, int scatter, int peer, Memory block) {
  require_room(block.bytes, layout().slot_bytes(), "a block");
  const Driver::Device guard(*driver_, device_);
  driver_->wait(out_, record(stream)->get());
  run(out_, [&] {
    protocol_.push(steps_, scatter, call.number, peer, in_private(block), static_cast<int64_t>(block.bytes));
  });
  call.sent = true;
  pushed_[scatter] = record(out_);
}

void Workspace::receive(const Call& call, Stream stream, int scatter) {
  const Driver::Device guard(*driver_, device_);
  open_[scatter] = false;
  // After this rank's blocks are sent, for the same reason as in `gather`.
  if (pushed_[scatter]) driver_->wait(stream, pushed_[scatter]->get());
  pushed_[scatter] = nullptr;
  run(stream, [&] { protocol_.receive(steps_, scatter, call.number); });
}

void Workspace::release(Stream stream, int scatter) {
  const Driver::Device guard(*driver_, device_);
  run(stream, [&] { protocol_.release(steps_, scatter); });
}

void Workspace::finish(Call& call, Stream stream, std::vector<Memory> results) {
  if (layout().world() == 1) return;
  const Driver::Device guard(*driver_, device_);
  take_turn(stream);
  // After all copies from and to the caller's memory, which it may then reuse.
  const int world = layout().world();
  for (int distance = world - 1; distance > 0 && distance >= world - static_cast<int>(in_.size()); --distance)
    wait_for(call, stream, peer_at(rank(), distance, world));  // the last of each stream
  if (call.sent) driver_->wait(stream, record(out_)->get());
  const bool captured = driver_->capturing(stream);
  const uint64_t passage = ++passages_;
  watchdog_.expect(passage, std::move(results), captured);
  run(stream, [&] {
    if (call.offered >= 0) protocol_.await_fetched(steps_, call.offered);
    protocol_.pass_gates(steps_, passage, captured);
  });
  if (captured) return;
  last_stream_ = stream;
  last_passage_ = passage;
}

// Serializes calls from several streams: the gates of a rank let one call pass at a time.
void Workspace::take_turn(Stream stream) {
  if (last_passage_ > 0 && last_stream_ != stream && !driver_->capturing(stream))
    driver_->memory_ops(
        stream, {{driver::MemoryOp::kWaitAtLeast, watchdog_.progress(passed_word(layout().world())), last_passage_}});
}

DeviceAddress Workspace::address(const Place& place) const {
  const auto offset = static_cast<DeviceAddress>(place.offset);
  return place.rank == kPrivate ? offset : addresses_[static_cast<size_t>(place.rank)] + offset;
}

SharedEvent Workspace::record(Stream stream) {
  SharedEvent event = events_.take();
  driver_->record(event->get(), stream);
  return event;
}

Stream Workspace::in_of(int peer) const {
  const int world = layout().world();
  const int distance = (peer - rank() + world) % world;
  return in_[static_cast<size_t>(distance - 1) % in_.size()];
}

}  // namespace fused_tp::copy_engine

// Ranks as threads, each with its own workspace on the double of the driver, run far ahead of their streams: many calls
// are enqueued before the first has ended, some of them as a graph that is replayed. Ranks pause, stop making calls or
// give up, at random. Every result must be right, or NaN if some rank has given up; and no stream may block.
//
//     stress <ranks> <rounds> <seed> <1: with such trouble>
//
// Without such trouble it also runs under ThreadSanitizer. A rank that gives up races on purpose: data read then is not
// used.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "../doubles/expect.h"
#include "copy_engine/workspace.h"

using namespace fused_tp::copy_engine;
using namespace std::chrono_literals;
using fused_tp::driver::OwnedStream;

extern "C" {
void cuda_double_enqueue(Stream, void (*)(void*), void*);
int cuda_double_begin_capture(Stream);
void* cuda_double_end_capture(Stream);
void cuda_double_replay(void*, Stream);
void cuda_double_free_graph(void*);
}

namespace {

constexpr size_t kWords = 600;  // of a message
constexpr int kCalls = 24;
constexpr double kTimeout = 0.4;       // in rounds in which ranks may be absent
constexpr double kLongTimeout = 60.0;  // in other rounds, enough for a busy machine: a rank that gives up is a bug

uint64_t value(int call, int rank) { return static_cast<uint64_t>(call) * 64 + rank + 1; }

DeviceAddress at(const void* memory) { return reinterpret_cast<DeviceAddress>(memory); }

// Enqueues a step that simulates a kernel.
template <typename Work>
void launch(Stream stream, Work work) {
  auto* kept = new Work(std::move(work));  // never freed: a graph may run it again
  cuda_double_enqueue(stream, [](void* argument) { (*static_cast<Work*>(argument))(); }, kept);
}

// Behaviour of a rank in a round.
struct Mood {
  int stops_before = kCalls;  // first call that the rank does not make
  bool aborts = false;        // aborts after its last call
  bool pauses = false;
};

struct Shared {
  int world;
  double timeout;
  std::vector<std::vector<char>> memory;
  std::vector<Mood> moods;
  bool all_well() const {
    return std::all_of(moods.begin(), moods.end(), [](const Mood& m) { return m.stops_before == kCalls && !m.pauses; });
  }
};

void wait_for_all(std::atomic<int>& counter, int world) {
  counter.fetch_add(1);
  while (counter.load() % world != 0) std::this_thread::sleep_for(50us);
}

void play(const std::shared_ptr<const Driver>& driver, Shared& shared, int rank, unsigned seed, std::atomic<int>& made,
          std::atomic<int>& ended) {
  const int world = shared.world;
  const Driver::ContextGuard guard(*driver, 0);
  std::vector<DeviceAddress> addresses;
  for (auto& memory : shared.memory) addresses.push_back(at(memory.data()));
  const OwnedStream caller(driver, 0, fused_tp::driver::Priority::kLeast);
  // Input of a call, its result, and a copy of the result taken after its gates.
  using Words = std::vector<uint64_t>;
  std::vector<Words> sent(kCalls, Words(kWords)), given(kCalls, Words(kWords * world)), taken(2 * kCalls, given[0]);
  Words offered(kWords), come(kWords * world);  // for gathers that a kernel waits for: the same memory in all calls
  std::vector<std::unique_ptr<Workspace::Call>> calls;
  std::mt19937 script(seed), pace(seed + 1 + rank);
  const Mood mood = shared.moods[rank];
  {
    Workspace workspace(driver, 0, rank, addresses, 8 * kWords, 8 * kWords);
    wait_for_all(made, world);
    const Stream stream = caller.get();
    std::vector<int> open;
    auto end_gather = [&](int call) {
      for (int peer = 0; peer < world; ++peer) workspace.wait_for(*calls[call], stream, peer);
      workspace.finish(*calls[call], stream, {{at(given[call].data()), 8 * given[call].size()}});
      driver->copy(at(taken[call].data()), at(given[call].data()), 8 * given[call].size(), stream);
    };
    auto make_offer = [&](int call) {
      calls.push_back(std::make_unique<Workspace::Call>(workspace.begin(Op::kOther, stream, shared.timeout)));
      launch(stream, [&offered, call, rank] { std::fill(offered.begin(), offered.end(), value(call, rank)); });
      std::vector<Memory> places;
      for (int peer = 0; peer < world; ++peer) places.push_back({at(&come[peer * kWords]), 8 * kWords});
      const int index = workspace.offer(*calls[call], stream, Op::kOther, {at(offered.data()), 8 * kWords}, places);
      Words& result = given[call];
      const DeviceAddress words = addresses[rank];
      launch(stream, [&, words, index] {  // a kernel that takes the shards as they arrive
        for (int peer = 0; peer < world; ++peer) {
          const auto* arrived =
              reinterpret_cast<const std::atomic<uint64_t>*>(words) + workspace.layout().arrived_word(index, peer);
          while (peer != rank && arrived->load() != 1) std::this_thread::sleep_for(20us);
          std::copy_n(&come[peer * kWords], kWords, &result[peer * kWords]);
        }
      });
      workspace.finish(*calls[call], stream, {{at(result.data()), 8 * result.size()}});
      driver->copy(at(taken[call].data()), at(result.data()), 8 * result.size(), stream);
    };
    // Makes one call, whose input is written in the stream.
    auto make = [&](int call, bool gather, bool leave_open) {
      calls.push_back(std::make_unique<Workspace::Call>(workspace.begin(Op::kOther, stream, shared.timeout)));
      Words& own = sent[call];
      Words& result = given[call];
      launch(stream, [&own, call, rank] { std::fill(own.begin(), own.end(), value(call, rank)); });
      if (gather) {
        std::vector<Memory> places;
        for (int peer = 0; peer < world; ++peer) places.push_back({at(&result[peer * kWords]), 8 * kWords});
        workspace.gather(*calls[call], stream, {at(own.data()), 8 * kWords}, places);
        driver->copy(at(&result[rank * kWords]), at(own.data()), 8 * kWords, stream);
        if (leave_open)
          open.push_back(call);
        else
          end_gather(call);
        return;
      }
      const int scatter = workspace.scatter();
      for (int distance = world - 1; distance >= 1; --distance)
        workspace.push(*calls[call], stream, scatter, peer_at(rank, distance, world), {at(own.data()), 8 * kWords});
      workspace.receive(*calls[call], stream, scatter);
      for (int peer = 0; peer < world; ++peer) {
        const DeviceAddress slot =
            peer == rank ? at(own.data()) : addresses[rank] + workspace.layout().slot(scatter, peer);
        driver->copy(at(&result[peer * kWords]), slot, 8 * kWords, stream);
      }
      workspace.release(stream, scatter);
      workspace.finish(*calls[call], stream, {{at(result.data()), 8 * result.size()}});
      driver->copy(at(taken[call].data()), at(result.data()), 8 * result.size(), stream);
    };

    // The second half of the calls is captured in a graph, which a rank that makes all calls replays twice.
    const bool graph = script() % 2 == 0;
    void* captured = nullptr;
    int enqueued = 0;
    for (int call = 0; call < kCalls; ++call) {
      const bool gather = script() % 2 == 0, leave_open = script() % 4 == 0;
      if (call == mood.stops_before) break;
      if (graph && call == kCalls / 2) {
        for (int opened : open) end_gather(opened);
        open.clear();
        EXPECT(cuda_double_begin_capture(stream) == 0);
      }
      if (mood.pauses && pace() % 16 == 0) std::this_thread::sleep_for(std::chrono::duration<double>(2 * kTimeout));
      if (pace() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(pace() % 2000));
      const bool captures = graph && call >= kCalls / 2;
      if (gather && script() % 2 == 0 && !captures)
        make_offer(call);
      else
        make(call, gather, leave_open && !captures);
      enqueued = call + 1;
    }
    for (int call : open) end_gather(call);
    if (graph && enqueued > kCalls / 2) {
      captured = cuda_double_end_capture(stream);
      cuda_double_replay(captured, stream);
      if (enqueued == kCalls) {  // otherwise this rank has stopped
        for (int call = kCalls / 2; call < enqueued; ++call)
          driver->copy(at(taken[kCalls + call].data()), at(taken[call].data()), 8 * taken[call].size(), stream);
        cuda_double_replay(captured, stream);
      }
      cuda_double_free_graph(captured);
    }
    if (mood.stops_before < kCalls && mood.aborts) workspace.watchdog().abort("as the test wants");
    EXPECT(driver->synchronize(stream, 30));
    const bool given_up = workspace.watchdog().failure() != Failure::kNone;
    EXPECT(!(shared.all_well() && given_up));
    for (int call = 0; call < enqueued; ++call) {
      const bool replayed = captured != nullptr && call >= kCalls / 2 && enqueued == kCalls;
      for (const Words* words : {replayed ? &taken[kCalls + call] : &taken[call], replayed ? &taken[call] : nullptr}) {
        if (words == nullptr) continue;
        const bool nan = std::all_of(words->begin(), words->end(), [](uint64_t word) { return word == ~uint64_t{0}; });
        EXPECT(!nan || given_up);
        for (size_t i = 0; i < words->size() && !nan; ++i)  // results are never wrong without being NaN
          EXPECT((*words)[i] == value(call, static_cast<int>(i / kWords)));
      }
    }
    wait_for_all(ended, world);  // keep memory that peers may still write to
  }
  wait_for_all(made, world);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const auto driver = Driver::open("");  // this program, which contains the double
  const int world = std::atoi(arguments[1]), rounds = std::atoi(arguments[2]);
  std::mt19937 chance(static_cast<unsigned>(std::atoi(arguments[3])));
  const bool trouble = std::atoi(arguments[4]) != 0;
  int troubled = 0;
  for (int round = 0; round < rounds; ++round) {
    Shared shared;
    shared.world = world;
    shared.timeout = trouble ? kTimeout : kLongTimeout;
    const auto bytes = static_cast<size_t>(Layout(world, 8 * kWords, 8 * kWords).bytes());
    for (int rank = 0; rank < world; ++rank) shared.memory.emplace_back(bytes);
    shared.moods.resize(world);
    for (Mood& mood : shared.moods) {
      if (!trouble) continue;
      const auto kind = chance() % 8;
      if (kind == 0) mood.stops_before = static_cast<int>(chance() % kCalls);
      if (kind == 1) mood.pauses = true;
      mood.aborts = chance() % 2 == 0;
    }
    troubled += !shared.all_well();
    std::atomic<int> made{0}, ended{0};
    const unsigned seed = chance();
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world; ++rank)
      ranks.emplace_back(play, driver, std::ref(shared), rank, seed, std::ref(made), std::ref(ended));
    for (std::thread& one : ranks) one.join();
  }
  std::printf("%d rounds, %d of them with trouble\n", rounds, troubled);
}

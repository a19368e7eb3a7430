// Communicators and pipelines over the doubles, ranks as threads: ops from several threads, deadlines, an error that
// NCCL reports, a peer that is lost, and ends in all of these states. For ThreadSanitizer.
//
//     races <double of libcuda> <double of libnccl>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "errors.h"
#include "expect.h"
#include "nccl/communicator.h"
#include "nccl/pipeline.h"

using namespace fused_tp;
using namespace fused_tp::nccl;

namespace {

constexpr int kRanks = 3;
constexpr size_t kCount = 5000;

std::shared_ptr<const driver::Driver> the_driver;
std::shared_ptr<const Library> the_library;

template <typename Function>
void on_all_ranks(Function&& function) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back([&function, rank] { function(rank); });
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<Communicator> join(const UniqueId& id, int rank, double timeout) {
  Communicator::Options options;
  options.timeout_seconds = timeout;
  return Communicator::create(the_library, the_driver, rank, id, rank, kRanks, options);
}

Ticket all_gather(Communicator& communicator, const std::vector<float>& in, std::vector<float>& out) {
  return communicator.all_gather(in.data(), out.data(), in.size() * sizeof(float), Stream{nullptr});
}

// The host waits, as it does in no op of ours.
void wait(Communicator& communicator, const Ticket& ticket) {
  const driver::Driver::Device guard(*the_driver, communicator.device());
  while (!the_driver->done(ticket.ended->get())) {
    communicator.check();
    std::this_thread::yield();
  }
  communicator.check();
}

void all_gather(Communicator& communicator) {
  const std::vector<float> in(kCount, static_cast<float>(communicator.rank()));
  std::vector<float> out(kCount * kRanks, -1.0f);
  wait(communicator, all_gather(communicator, in, out));
  for (size_t i = 0; i < out.size(); ++i) EXPECT(out[i] == static_cast<float>(i / kCount));
}

void ops_and_ends() {
  const UniqueId first = the_library->make_id();
  const UniqueId second = the_library->make_id();
  on_all_ranks([&](int rank) {
    const auto one = join(first, rank, 30);
    const auto other = join(second, rank, 30);
    // Two communicators are used by two threads.
    std::thread thread([&] {
      for (int i = 0; i < 20; ++i) all_gather(*other);
    });
    for (int i = 0; i < 20; ++i) all_gather(*one);
    thread.join();
    one->close();
  });
}

template <typename Error>
void expect_failure(Communicator& communicator, const Ticket& ticket) {
  try {
    wait(communicator, ticket);
    EXPECT(!"reached");
  } catch (const Error&) {
  }
  try {
    communicator.exchange({}, std::nullopt);
    EXPECT(!"reached");
  } catch (const Error&) {
  }
  EXPECT(communicator.failed() && !communicator.failure().empty());
}

// Rank 0 does not come; `end` is how the others find out.
template <typename Error, typename End>
void one_is_missing(double timeout, End&& end) {
  const UniqueId id = the_library->make_id();
  on_all_ranks([&](int rank) {
    const auto communicator = join(id, rank, timeout);
    all_gather(*communicator);
    if (rank == 0) {
      communicator->abort("nothing more to do");
      return;
    }
    const std::vector<float> in(kCount);
    std::vector<float> out(kCount * kRanks, 1.0f);
    const Ticket ticket = all_gather(*communicator, in, out);
    std::thread other([&] { end(*communicator); });
    expect_failure<Error>(*communicator, ticket);
    other.join();
    // The stream goes on, and what did not come is NaN. What other ranks have sent may arrive behind the fill.
    EXPECT(the_driver->synchronize(communicator->stream(), 20));
    for (size_t i = 0; i < kCount; ++i) EXPECT(out[i] != out[i]);
  });
}

// As a watch does: asks until the pipeline has ended.
class Watcher {
 public:
  explicit Watcher(const Pipeline& pipeline)
      : thread_([&] {
          while (!pipeline.ended()) std::this_thread::yield();
        }) {}
  ~Watcher() { thread_.join(); }

 private:
  std::thread thread_;
};

int value(int rank, int64_t row) { return rank * 1000 + static_cast<int>(row); }

void gather(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& counts, int chunks,
            int64_t columns) {
  const int rank = communicator->rank();
  const int64_t rows = row_offset(counts, kRanks);
  std::vector<int> own(counts[rank] * columns), gathered(rows * columns, -1);
  for (size_t i = 0; i < own.size(); ++i) own[i] = value(rank, static_cast<int64_t>(i) / columns);
  const ChunkPlan plan = gather_plan(counts, rank, chunks);
  const auto bytes = [](auto& data) { return reinterpret_cast<char*>(data.data()); };
  GatherPipeline pipeline(communicator, plan, counts, columns * 4, bytes(own), bytes(gathered), Stream{nullptr});
  const Watcher watcher(pipeline);
  for (size_t i = 0; i < pipeline.size(); ++i) {
    pipeline.wait(i, Stream{nullptr});
    for (const Part& part : plan.exchanges[i].receives)
      for (int64_t at = part.start * columns; at < (part.start + part.count) * columns; ++at)
        EXPECT(gathered[at] == value(part.peer, at / columns - row_offset(counts, part.peer)));
  }
}

void scatter(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& counts, int chunks,
             int64_t columns, bool without_own) {
  const int rank = communicator->rank();
  const int64_t rows = row_offset(counts, kRanks), own = counts[rank], start = row_offset(counts, rank);
  std::vector<int> partial((without_own ? rows - own : rows) * columns, -1), terms(kRanks * own * columns, -1);
  const auto plan = std::make_shared<const ChunkPlan>(scatter_plan(counts, rank, chunks));
  const auto bytes = [](auto& data) { return reinterpret_cast<char*>(data.data()); };
  ScatterPipeline pipeline(communicator, plan, counts, columns * 4, bytes(partial), without_own, bytes(terms));
  const Watcher watcher(pipeline);
  for (const Exchange& exchange : plan->exchanges) {
    for (const Part& part : joined(exchange.sends)) {
      for (int64_t row = part.start; row < part.start + part.count; ++row) {
        const int64_t at = without_own && row >= start + own ? row - own : row;
        for (int64_t column = 0; column < columns; ++column) partial[at * columns + column] = value(rank, row);
      }
    }
    pipeline.send(Stream{nullptr});
  }
  for (size_t i = 0; i < pipeline.size(); ++i) pipeline.wait(i, Stream{nullptr});
  for (int peer = 0; peer < kRanks; ++peer)
    for (int64_t at = 0; peer != rank && at < own * columns; ++at)
      EXPECT(terms[peer * own * columns + at] == value(peer, start + at / columns));
}

// Sizes and cuts by chance, the same on all ranks: what arrives is what was sent, while another thread asks how far a
// pipeline is.
void pipelines() {
  const UniqueId id = the_library->make_id();
  on_all_ranks([&](int rank) {
    const auto communicator = join(id, rank, 60);
    std::mt19937 chance(7);
    const auto below = [&](int limit) { return static_cast<int>(chance() % static_cast<unsigned>(limit)); };
    for (int round = 0; round < 40; ++round) {
      const std::vector<int64_t> counts =
          below(3) ? std::vector<int64_t>{below(9), below(9), below(9)} : std::vector<int64_t>(kRanks, below(9));
      const int chunks = 1 + below(7);
      const int64_t columns = below(4) ? 1 + below(600) : 0;
      gather(communicator, counts, chunks, columns);
      scatter(communicator, counts, chunks, columns, below(2) == 0);
    }
    communicator->close();
  });
}

}  // namespace

int main(int, char** arguments) {
  the_driver = driver::Driver::open(arguments[1]);
  the_library = Library::open(arguments[2]);
  const auto inject =
      reinterpret_cast<void (*)(int)>(::dlsym(::dlopen(arguments[2], RTLD_NOW | RTLD_LOCAL), "nccl_double_inject"));
  ops_and_ends();
  one_is_missing<CollectiveTimeoutError>(0.3, [](Communicator&) {});
  one_is_missing<PeerLostError>(60, [](Communicator& communicator) { communicator.lose(0, "its process ended"); });
  one_is_missing<GroupError>(60, [](Communicator& communicator) { communicator.abort("enough"); });
  std::atomic<int> waiting{0};
  one_is_missing<PeerLostError>(60, [&](Communicator&) {
    if (++waiting == kRanks - 1) inject(6);
  });
  inject(0);
  ops_and_ends();
  pipelines();
  Communicator::close_all();
  std::puts("no race");
}

// Pipelines over the doubles, ranks as threads: what arrives is what was sent, for sizes and cuts by chance, while
// another thread asks how far they are. For ThreadSanitizer.
//
//     pipelines <double of libcuda> <double of libnccl>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "nccl/pipeline.h"

using namespace fused_tp::nccl;
namespace driver = fused_tp::driver;

#define EXPECT(condition)                                           \
  if (!(condition)) {                                               \
    std::printf("%s:%d: not %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                   \
  }

namespace {

constexpr int kRanks = 3;
constexpr int kRounds = 40;
const Stream kDefault = nullptr;

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
  GatherPipeline pipeline(communicator, plan, counts, columns * 4, bytes(own), bytes(gathered), kDefault);
  const Watcher watcher(pipeline);
  for (size_t i = 0; i < pipeline.size(); ++i) {
    pipeline.wait(i, kDefault);
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
    pipeline.send(kDefault);
  }
  for (size_t i = 0; i < pipeline.size(); ++i) pipeline.wait(i, kDefault);
  for (int peer = 0; peer < kRanks; ++peer)
    for (int64_t at = 0; peer != rank && at < own * columns; ++at)
      EXPECT(terms[peer * own * columns + at] == value(peer, start + at / columns));
}

}  // namespace

int main(int, char** arguments) {
  const auto the_driver = driver::Driver::open(arguments[1]);
  const auto library = Library::open(arguments[2]);
  const UniqueId id = library->make_id();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      Communicator::Options options;
      options.timeout_seconds = 60;
      const auto communicator = Communicator::create(library, the_driver, rank, id, rank, kRanks, options);
      std::mt19937 chance(7);  // the same on all ranks
      const auto below = [&](int limit) { return static_cast<int>(chance() % static_cast<unsigned>(limit)); };
      for (int round = 0; round < kRounds; ++round) {
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
  for (std::thread& thread : ranks) thread.join();
  Communicator::close_all();
  std::puts("no race");
}

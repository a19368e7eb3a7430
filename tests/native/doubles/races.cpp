// Communicators over the doubles, with ranks as threads, for ThreadSanitizer: ops from several threads, deadlines, an
// error that NCCL reports, a lost peer, and the end of communicators in all of these states.
//
//     races <double of libcuda and libnccl>
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

std::shared_ptr<Communicator> create_communicator(const UniqueId& id, int rank, double timeout) {
  Communicator::Options options;
  options.timeout_seconds = timeout;
  return Communicator::create(the_library, the_driver, rank, id, rank, kRanks, options);
}

Ticket all_gather(Communicator& communicator, const std::vector<float>& in, std::vector<float>& out) {
  return communicator.all_gather(in.data(), out.data(), in.size() * sizeof(float), Stream{nullptr});
}

// Waits on the host, which ops of fused_tp never do.
void wait(Communicator& communicator, const Ticket& ticket) {
  const driver::Driver::ContextGuard guard(*the_driver, communicator.device());
  while (!the_driver->is_done(ticket.end_event->get())) {
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
    const auto communicator = create_communicator(first, rank, 30);
    const auto second_communicator = create_communicator(second, rank, 30);
    // Two threads use two communicators.
    std::thread thread([&] {
      for (int i = 0; i < 20; ++i) all_gather(*second_communicator);
    });
    for (int i = 0; i < 20; ++i) all_gather(*communicator);
    thread.join();
    communicator->close();
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
  EXPECT(communicator.has_failed() && !communicator.failure().empty());
}

// Rank 0 is absent; `end` makes the others notice.
template <typename Error, typename End>
void one_is_missing(double timeout, End&& end) {
  const UniqueId id = the_library->make_id();
  on_all_ranks([&](int rank) {
    const auto communicator = create_communicator(id, rank, timeout);
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
    // The stream continues, and missing data is NaN. Data sent by other ranks may arrive after the fill.
    EXPECT(the_driver->synchronize(communicator->stream(), 20));
    for (size_t i = 0; i < kCount; ++i) EXPECT(out[i] != out[i]);
  });
}

// Random sizes, the same on all ranks: data arrives as sent, while another thread polls for its arrival.
void exchanges() {
  const UniqueId id = the_library->make_id();
  on_all_ranks([&](int rank) {
    const auto communicator = create_communicator(id, rank, 60);
    std::mt19937 chance(7);
    for (int round = 0; round < 80; ++round) {
      const size_t count = chance() % 600;
      std::vector<int> own(count, rank), got(kRanks * count, -1);
      std::vector<Transfer> transfers;
      for (int peer = 0; peer < kRanks; ++peer) {
        if (peer == rank) continue;
        transfers.push_back({Transfer::kSend, peer, own.data(), count * sizeof(int)});
        transfers.push_back({Transfer::kReceive, peer, got.data() + peer * count, count * sizeof(int)});
      }
      const Ticket ticket = communicator->exchange(transfers, Stream{nullptr});
      std::thread watcher([&] {
        while (!communicator->has_begun(ticket) || !communicator->has_ended(ticket)) std::this_thread::yield();
      });
      communicator->wait(ticket, Stream{nullptr});
      for (size_t i = 0; i < got.size(); ++i) {
        const int peer = static_cast<int>(i / count);
        EXPECT(got[i] == (peer == rank ? -1 : peer));
      }
      watcher.join();
    }
    communicator->close();
  });
}

}  // namespace

int main(int, char** arguments) {
  the_driver = driver::Driver::open(arguments[1]);
  the_library = Library::open(arguments[1]);
  const auto inject =
      reinterpret_cast<void (*)(int)>(::dlsym(::dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL), "nccl_double_inject"));
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
  exchanges();
  Communicator::close_all();
  std::puts("no race");
}

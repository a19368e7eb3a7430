// Ranks as threads: random collectives and calls in flight, every result checked, under ThreadSanitizer.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "shm/collectives.h"

using namespace fused_tp;
using namespace fused_tp::shm;

namespace {

constexpr int kRanks = 3;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

float value(size_t i, int rank, int call) { return static_cast<float>((i + 3 * call) % 13 + rank); }

void play(Group& group, int calls, unsigned seed) {
  std::mt19937 script(seed);
  const int rank = group.rank();
  for (int call = 0; call < calls; ++call) {
    const size_t counts[] = {0, 1, 100, 8192, 8193, 70000, 150001};
    const size_t count = counts[script() % 7];
    std::vector<float> in(count), out(count), all(count * kRanks);
    for (size_t i = 0; i < count; ++i) in[i] = value(i, rank, call);
    switch (script() % 5) {
      case 0: {
        all_reduce(group, in.data(), out.data(), count, Signature{});
        for (size_t i = 0; i < count; ++i) require(out[i] == 3 * value(i, 0, call) + 3, "all_reduce");
        break;
      }
      case 1: {
        for (size_t i = 0; i < all.size(); ++i) all[i] = value(i, rank, call);
        reduce_scatter(group, all.data(), out.data(), std::vector<size_t>(kRanks, count), Signature{});
        for (size_t i = 0; i < count; ++i)
          require(out[i] == 3 * value(i + rank * count, 0, call) + 3, "reduce_scatter");
        break;
      }
      case 2: {
        std::vector<float> to_all(count * kRanks);
        for (size_t i = 0; i < to_all.size(); ++i) to_all[i] = value(i, rank, call);
        const std::vector<size_t> parts(kRanks, count);
        all_to_all(group, to_all.data(), all.data(), parts, parts, DType::kF32);
        for (size_t i = 0; i < all.size(); ++i)
          require(all[i] == value(i % count + rank * count, static_cast<int>(i / count), call), "all_to_all");
        break;
      }
      case 3: {  // in memory that the caller may reuse at once
        const size_t offset = group.allocate(count * sizeof(float) + 8);
        Signature signature{};
        const auto summing = group.begin(signature, count * sizeof(float) + 8, true, false, &offset);
        auto* mine = reinterpret_cast<float*>(group.segment(rank)->data() + offset);
        std::copy(in.begin(), in.end(), mine);
        sum_workspaces(group, *summing, count, DType::kF32);
        for (size_t i = 0; i < count; ++i) require(mine[i] == 3 * value(i, 0, call) + 3, "sum_workspaces");
        std::fill(mine, mine + count, -1.0f);
        summing->end();
        group.heap()->release(offset);
        break;
      }
      default: {  // several calls in flight, ended in a different order
        std::vector<std::unique_ptr<Call>> flying;
        Signature signature{};
        for (int i = 0; i < 4; ++i) {
          signature.dims[signature.n_dims = 0] = i;
          flying.push_back(group.begin(signature, count * sizeof(float) + 8, i % 2 == 0));
          if (count) std::memcpy(flying.back()->workspace(rank), in.data(), count * sizeof(float));
          flying.back()->signal(1);
        }
        for (int i : {2, 0, 3, 1}) {
          const int peer = (rank + 1 + i % 2) % kRanks;
          flying[i]->wait(peer, 1);
          const auto* theirs = reinterpret_cast<const float*>(flying[i]->workspace(peer));
          for (size_t j = 0; j < count; ++j) require(theirs[j] == value(j, peer, call), "in flight");
          flying[i]->end();
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 300;
  std::vector<std::shared_ptr<Group>> groups;
  std::vector<SegmentAddress> addresses;
  for (int r = 0; r < kRanks; ++r) {
    groups.push_back(std::make_shared<Group>(r, kRanks, size_t{64} << 20, [] { return 60.0; }, [] {}));
    addresses.push_back(groups.back()->address());
  }
  for (auto& group : groups) group->connect(addresses);
  std::vector<std::thread> threads;
  for (auto& group : groups) threads.emplace_back([&group, calls] { play(*group, calls, 7); });
  for (auto& thread : threads) thread.join();
  std::puts("no race");
}

// Ranks as threads of one process, for the sanitizers: many calls of changing ops, sizes and blocks in one workspace,
// with ranks that are late; then calls that a rank misses. Inputs are small whole numbers, so sums are exact.
#include <pthread.h>
#include <time.h>

#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "../doubles/expect.h"
#include "cuda/launchers.h"
#include "cuda/plan.h"
#include "dtype.h"

using namespace fused_tp::cuda;

namespace {

constexpr int64_t kWorkspaceBytes = 1 << 18;
constexpr int64_t kMost = 3000;  // elements

struct alignas(128) Line {
  char bytes[128];
};

struct Rank {
  std::vector<Line> memory{kWorkspaceBytes / 128};
  std::vector<int64_t> state = std::vector<int64_t>(16), error = std::vector<int64_t>(8);
};

struct Group {
  std::vector<Rank> ranks;
  std::vector<uint64_t> addresses;

  explicit Group(int world) : ranks(world) {
    for (Rank& rank : ranks) addresses.push_back(reinterpret_cast<uint64_t>(rank.memory.data()));
  }
  Workspace workspace(int rank, int64_t timeout_ns) {
    Rank& own = ranks[rank];
    const int32_t world = static_cast<int32_t>(addresses.size());
    return {addresses.data(), own.state.data(), own.error.data(), kWorkspaceBytes / 2, timeout_ns, 1, rank, world};
  }
};

template <class Body>
void on_all(int world, Body&& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

float given(int rank, int64_t i, int call) { return static_cast<float>((rank * 7 + i * 3 + call) % 5 - 2); }

float summed(int world, int64_t i, int call) {
  float sum = 0;
  for (int rank = 0; rank < world; ++rank) sum += given(rank, i, call);
  return sum;
}

// Makes one call, the same on all ranks except that the rank `late` is delayed.
void run_call(Group& group, int rank, int call, std::mt19937& alike) {
  const int world = static_cast<int>(group.ranks.size());
  auto draw = [&](int64_t most) { return static_cast<int64_t>(alike() % (most + 1)); };
  const int op = static_cast<int>(draw(7));
  const int64_t count = draw(2) ? draw(kMost) : draw(9);
  const int blocks = 1 + static_cast<int>(draw(3));
  const bool in_place = draw(1);
  const int64_t shift = draw(3);  // elements that the arrays are off 16 bytes
  const int late = static_cast<int>(draw(4 * world));
  if (late == rank) {
    const timespec pause{0, 300'000};
    nanosleep(&pause, nullptr);
  }
  const Launchers& launch = *fused_tp_launchers();
  const Workspace ws = group.workspace(rank, 30'000'000'000);
  const int32_t f32 = static_cast<int32_t>(fused_tp::DType::kF32);
  std::vector<Line> in_lines(count * 4 / 128 + 2), out_lines(count * 4 / 128 + 2);
  float* in = reinterpret_cast<float*>(in_lines.data()) + shift;
  float* out = in_place ? in : reinterpret_cast<float*>(out_lines.data()) + shift;
  for (int64_t i = 0; i < count; ++i) in[i] = given(rank, i, call);
  const int64_t chunk = ceil_div(count, world), first = std::min(rank * chunk, count);
  int32_t error = 0;
  if (op <= 2) {
    error = launch.all_reduce(&ws, static_cast<Algorithm>(op), in, out, count, f32, {}, blocks, nullptr);
    for (int64_t i = 0; i < count; ++i) EXPECT(out[i] == summed(world, i, call));
  } else if (op == 3) {
    if (in_place) out = in + first;
    error = launch.reduce_scatter(&ws, in, out, count, chunk, f32, {}, blocks, nullptr);
    for (int64_t i = first; i < std::min(first + chunk, count); ++i) EXPECT(out[i - first] == summed(world, i, call));
  } else if (op == 4) {
    error = launch.all_gather(&ws, in + first, out, count * 4, chunk * 4, blocks, nullptr);
    for (int64_t i = 0; i < count; ++i) EXPECT(out[i] == given(static_cast<int>(i / chunk), i, call));
  } else if (op == 5) {
    const int64_t part = count / world;
    const AllToAllLayout layout{1, 1, part * 4, part * 4, 0, 0, part * 4, 0, 0};
    error = launch.all_to_all(&ws, in, out, &layout, blocks, nullptr);
    for (int64_t i = 0; i < part * world; ++i)
      EXPECT(out[i] == given(static_cast<int>(i / part), rank * part + i % part, call));
  } else if (op == 6) {
    const int64_t columns = 1 + count / 7, rows = count / columns;
    std::vector<float> weight(columns, 1.0f), residual(rows * columns, 1.0f);
    const RmsNorm norm{residual.data(), weight.data(), out, residual.data(), rows, columns, 1e-6};
    const auto algorithm = static_cast<Algorithm>(draw(1));
    error = launch.all_reduce_rms_norm(&ws, algorithm, in, &norm, f32, blocks, nullptr);
    for (int64_t row = 0; row < rows; ++row) {
      double squares = 0;
      for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
        const float h = 1.0f + summed(world, i, call);
        EXPECT(residual[i] == h);
        squares += h * h;
      }
      const double inverse = 1 / std::sqrt(squares / static_cast<double>(columns) + 1e-6);
      for (int64_t i = row * columns; i < (row + 1) * columns; ++i)
        EXPECT(std::fabs(out[i] - residual[i] * inverse) <= 1e-5);
    }
  } else {
    error = launch.barrier(&ws, nullptr);
  }
  EXPECT(error == 0);
}

void many_calls(int world, int calls, unsigned seed) {
  Group group(world);
  on_all(world, [&](int rank) {
    std::mt19937 alike(seed);
    for (int call = 1; call <= calls; ++call) run_call(group, rank, call, alike);
    // A single rank sums without using the protocol.
    EXPECT((world == 1 || group.ranks[rank].state[kEpoch] == calls) && !group.ranks[rank].error[kErrorSet]);
  });
}

// The last rank makes only one call; the others make three more, which must end with NaN.
void missed_calls(int world) {
  Group group(world);
  on_all(world, [&](int rank) {
    Workspace ws = group.workspace(rank, 30'000'000'000);
    const int32_t bf16 = static_cast<int32_t>(fused_tp::DType::kBF16);
    const int64_t count = 100;
    std::vector<uint16_t> in(count), out(count);
    EXPECT(fused_tp_launchers()->barrier(&ws, nullptr) == 0);
    if (rank == world - 1) return;
    ws.timeout_ns = 20'000'000;
    for (int call = 2; call < 5; ++call) {
      const auto algorithm = static_cast<Algorithm>(call % 3);
      const auto all_reduce = fused_tp_launchers()->all_reduce;
      EXPECT(all_reduce(&ws, algorithm, in.data(), out.data(), count, bf16, {}, 2, nullptr) == 0);
      for (uint16_t bits : out) EXPECT(bits == 0xffff);
    }
    const auto& error = group.ranks[rank].error;
    EXPECT(error[kErrorSet] && error[kErrorCall] == 2 && error[kErrorRank] == rank);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 50;
  for (int world = 1; world <= 4; ++world) many_calls(world, calls, 17u * world);
  for (int world = 2; world <= 4; ++world) missed_calls(world);
  std::puts("no error");
}

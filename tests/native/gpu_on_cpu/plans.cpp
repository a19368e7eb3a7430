// Plans of csrc/cuda/plan.h for many sizes: slots are large enough, do not overlap, and fit into the workspace.
#include <random>
#include <set>
#include <vector>

#include "../doubles/expect.h"
#include "cuda/plan.h"

using namespace fused_tp::cuda;

namespace {

// Number of slots for terms and for results, and the least bytes of each kind.
struct Slots {
  int32_t terms, results;
  int64_t term, result;
};

void check(const Plan& plan, const Slots& wanted) {
  const int64_t half = plan.workspace_bytes() / 2, begin = flag_bytes(half);
  EXPECT(half % kDataAlignment == 0 && begin % kDataAlignment == 0);
  EXPECT(plan.terms == wanted.terms && plan.results == wanted.results);
  int64_t end = 0;
  const auto slot = [&](int64_t at, int64_t bytes, int64_t least) {
    EXPECT(at == end && at % kDataAlignment == 0 && least <= bytes);
    EXPECT(bytes <= 8 * least + 2048);  // a row of one element takes 16 bytes
    end = at + bytes;
  };
  for (int i = 0; i < plan.terms; ++i) slot(plan.term_offset(i), plan.term_bytes, wanted.term);
  for (int i = 0; i < plan.results; ++i) slot(plan.result_offset(i), plan.result_bytes, wanted.result);
  EXPECT(end == plan.data_bytes() && begin + end <= half);
  // One flag for each (phase, block, source), after the begun words and before the data.
  std::set<int64_t> flags;
  for (int phase = 0; phase < plan.phases; ++phase)
    for (int block = 0; block < plan.blocks; ++block)
      for (int source = 0; source < plan.world; ++source) flags.insert(plan.flag_index(phase, block, source));
  EXPECT(static_cast<int64_t>(flags.size()) == plan.flag_count());
  EXPECT(flags.empty() || (*flags.begin() >= plan.world && 8 * (*flags.rbegin() + 1) <= begin));
}

}  // namespace

int main() {
  std::mt19937_64 chance(0);
  const auto one_of = [&](std::vector<int64_t> values) { return values[chance() % values.size()]; };
  const auto below = [&](int64_t limit) { return static_cast<int64_t>(chance() % limit); };
  for (int trial = 0; trial < 1000; ++trial) {
    const int64_t count = one_of({0, 1, 5, 127, 4096, below(1 << 20), below(int64_t{1} << 33)});
    const int64_t rows = count % 5000, columns = one_of({1, 8, 100, 8192}), bytes = one_of({2, 4});
    const int world = static_cast<int>(one_of({1, 2, 3, 4, 7, 8, kMaxWorldSize}));
    const int blocks = static_cast<int>(one_of({1, 2, 5, 33, 132})), others = world > 1 ? world : 0;
    const int64_t part = ceil_div(count, world) * bytes, part_of_rows = ceil_div(rows, world) * columns * bytes;
    check(all_reduce_plan(Algorithm::kOneShot, count, bytes, world, blocks), {others, 0, count * bytes, 0});
    check(all_reduce_plan(Algorithm::kTwoShot, count, bytes, world, blocks), {others, others, part, part});
    check(all_reduce_plan(Algorithm::kMultimem, count, bytes, world, blocks), {1, 0, count * bytes, 0});
    check(exchange_plan(part / bytes, world, blocks), {others, 0, part / bytes, 0});
    check(all_reduce_rms_norm_plan(Algorithm::kOneShot, rows, columns, bytes, world, blocks),
          {others, 0, rows * columns * bytes, 0});
    check(all_reduce_rms_norm_plan(Algorithm::kTwoShot, rows, columns, bytes, world, blocks),
          {others, others, part_of_rows, 2 * part_of_rows});
  }
}

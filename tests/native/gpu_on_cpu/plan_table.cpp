// Plans of csrc/cuda/plan.h, for a test in Python: reads lines of seven numbers and prints what plan.h makes of them.
#include <cstdio>

#include "cuda/plan.h"

using namespace fused_tp::cuda;

namespace {

Plan plan_of(int op, int way, long long count, long long chunk, int bytes, int world, int blocks) {
  const auto algorithm = static_cast<Algorithm>(way);
  switch (op) {
    case 0:
      return all_reduce_plan(algorithm, count, bytes, world, blocks);
    case 1:
      return exchange_plan(chunk * bytes, world, blocks);
    default:
      return all_reduce_rms_norm_plan(algorithm, count, chunk, bytes, world, blocks);
  }
}

}  // namespace

int main() {
  long long count, chunk;
  int op, way, bytes, world, blocks;
  while (std::scanf("%d %d %lld %lld %d %d %d", &op, &way, &count, &chunk, &bytes, &world, &blocks) == 7) {
    const Plan plan = plan_of(op, way, count, chunk, bytes, world, blocks);
    const long long half = plan.workspace_bytes() / 2;
    // Where data begins, the whole; then slots as (offset, bytes); then flags by (phase, block, source).
    std::printf("%lld %lld %lld %lld ;", half, static_cast<long long>(flag_bytes(half)),
                static_cast<long long>(plan.flags()), static_cast<long long>(plan.data()));
    for (int slot = 0; slot < plan.terms; ++slot) {
      std::printf(" %lld %lld", static_cast<long long>(plan.term(slot)), static_cast<long long>(plan.term_bytes));
    }
    for (int slot = 0; slot < plan.results; ++slot) {
      std::printf(" %lld %lld", static_cast<long long>(plan.result(slot)), static_cast<long long>(plan.result_bytes));
    }
    std::printf(" ;");
    for (int phase = 0; phase < plan.phases; ++phase) {
      for (int block = 0; block < plan.blocks; ++block) {
        for (int source = 0; source < world; ++source) {
          std::printf(" %lld", static_cast<long long>(plan.flag(phase, block, source)));
        }
      }
    }
    std::printf("\n");
  }
}

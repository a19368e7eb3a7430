// Distribution of blocks over threads, and their order; the arithmetic is in the tables of kernels.h.
//
// Sums over keys or queries add block after block in ascending order, whichever thread computes a block, so that the
// number of threads changes no bit.
#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "attention/kernels.h"
#include "threads/scratch.h"
#include "threads/thread_pool.h"

namespace fused_tp::attention {
namespace {

constexpr int64_t kChunk = 16;  // blocks of queries in a pass of the backward: with their dq they fit a cache

int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

// A batch row and a head of keys.
struct Unit {
  int64_t batch, kv_head;
};

Unit unit(const Shape& shape, int64_t number) { return {number / shape.kv_heads, number % shape.kv_heads}; }

// For each block of queries, numbers the blocks of keys that it sees 0, 1, ...; -1 marks an unseen block. Time and
// memory grow with the range of seen blocks, not with all keys.
class Visits {
 public:
  Visits(const Problem& step, int64_t first_query_block, int64_t query_blocks) {
    const int64_t first_row = first_query_block * kQueries;
    const int64_t rows = std::min((first_query_block + query_blocks) * kQueries, step.shape.rows);
    const auto sees = [&](int64_t row) { return step.seen.starts[row] < step.seen.stops[row]; };
    for (int64_t row = first_row; row < rows; ++row) {
      if (!sees(row)) continue;
      const int64_t first = step.seen.starts[row] / kKeys, last = blocks(step.seen.stops[row], kKeys);
      begin_ = end_ == 0 ? first : std::min(begin_, first);
      end_ = std::max(end_, last);
    }
    numbers_.assign(query_blocks * count(), -1);
    seen_.assign(count(), 0);
    for (int64_t i = 0; i < query_blocks; ++i) {
      int64_t next = begin_;  // both ends ascend, so that no row sees a block that an earlier row has passed
      int32_t number = 0;
      for (int64_t row = first_row + i * kQueries; row < std::min(first_row + (i + 1) * kQueries, rows); ++row) {
        if (!sees(row)) continue;
        next = std::max<int64_t>(next, step.seen.starts[row] / kKeys);
        for (; next * kKeys < step.seen.stops[row]; ++next) {
          numbers_[i * count() + next - begin_] = number++;
          seen_[next - begin_] = 1;
        }
      }
    }
  }
  // The blocks of keys from the first that is seen to the last are begin() + [0, count()).
  int64_t begin() const { return begin_; }
  int64_t count() const { return end_ - begin_; }
  int32_t number(int64_t query_block, int64_t key_block) const {
    return numbers_[query_block * count() + key_block - begin_];
  }
  bool seen(int64_t key_block) const { return seen_[key_block - begin_] != 0; }

 private:
  int64_t begin_ = 0, end_ = 0;
  std::vector<int32_t> numbers_;
  std::vector<char> seen_;
};

// Order of the threads that add to a block's dq: each waits for its turn.
class Turn {
 public:
  void begin() { next_.store(0, std::memory_order_relaxed); }
  void wait(int32_t number) const {
    for (int tries = 0; next_.load(std::memory_order_acquire) != number; ++tries)
      if (tries > 200) std::this_thread::yield();
  }
  void pass() { next_.store(next_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

 private:
  std::atomic<int32_t> next_{0};
};

}  // namespace

void forward(const Forward& step, int threads, const char* isa) {
  const Shape& shape = step.shape;
  const Kernels& kernels = kernels_for(step.dtype, isa);
  const Sizes sizes = kernels.forward_sizes(shape);
  const int64_t key_blocks = blocks(shape.keys, kKeys), query_blocks = blocks(shape.rows, kQueries);
  const int64_t units = shape.batch * shape.kv_heads, at_once = std::min<int64_t>(units, std::max(threads, 1));
  const int64_t group = shape.heads / shape.kv_heads;
  const size_t unit_bytes = key_blocks * sizes.key_block;
  char* const keys = scratch_memory().at_least(at_once * unit_bytes + std::max(threads, 1) * sizes.scratch);
  char* const scratch = keys + at_once * unit_bytes;

  for (int64_t first = 0; first < units; first += at_once) {
    const int64_t count = std::min(at_once, units - first);
    parallel_for(count * key_blocks, threads, [&](int64_t task, int worker) {
      const Unit at = unit(shape, first + task / key_blocks);
      kernels.pack_keys_forward(step, at.batch, at.kv_head, task % key_blocks, keys + task * sizes.key_block,
                                scratch + worker * sizes.scratch);
    });
    const int64_t per_unit = group * query_blocks;
    parallel_for(count * per_unit, threads, [&](int64_t task, int worker) {
      const int64_t number = task / per_unit, head = task % per_unit / query_blocks;
      const Unit at = unit(shape, first + number);
      // The last queries first: under a causal mask they see most.
      kernels.forward_block(step, at.batch, at.kv_head * group + head, query_blocks - 1 - task % query_blocks,
                            keys + number * unit_bytes, scratch + worker * sizes.scratch);
    });
  }
  scratch_memory().trim();
}

void backward(const Backward& step, int threads, const char* isa) {
  const Shape& shape = step.shape;
  const Kernels& kernels = kernels_for(step.dtype, isa);
  const Sizes sizes = kernels.backward_sizes(shape);
  const int64_t key_blocks = blocks(shape.keys, kKeys), query_blocks = blocks(shape.rows, kQueries);
  const int64_t units = shape.batch * shape.kv_heads, at_once = std::min<int64_t>(units, std::max(threads, 1));
  const int64_t group = shape.heads / shape.kv_heads;
  char* const keys = scratch_memory().at_least(at_once * (key_blocks * sizes.key_block + kChunk * sizes.query_block) +
                                               std::max(threads, 1) * sizes.scratch);
  char* const queries = keys + at_once * key_blocks * sizes.key_block;
  char* const scratch = queries + at_once * kChunk * sizes.query_block;
  const std::unique_ptr<Turn[]> turns(new Turn[at_once * kChunk]);
  std::vector<double> slope_terms(at_once * key_blocks), slope_sums(shape.batch * shape.heads);

  for (int64_t first = 0; first < units; first += at_once) {
    const int64_t count = std::min(at_once, units - first);
    parallel_for(count * key_blocks, threads, [&](int64_t task, int worker) {
      const Unit at = unit(shape, first + task / key_blocks);
      kernels.pack_keys_backward(step, at.batch, at.kv_head, task % key_blocks, keys + task * sizes.key_block,
                                 scratch + worker * sizes.scratch);
    });
    for (int64_t chunk = 0; chunk < query_blocks; chunk += kChunk) {
      const int64_t length = std::min(kChunk, query_blocks - chunk);
      const Visits visits(step, chunk, length);
      for (int64_t in_group = 0; in_group < group; ++in_group) {
        const auto head = [&](int64_t number) { return unit(shape, first + number).kv_head * group + in_group; };
        const auto query_block = [&](int64_t number, int64_t i) {
          return queries + (number * kChunk + i) * sizes.query_block;
        };
        parallel_for(count * length, threads, [&](int64_t task, int worker) {
          const int64_t number = task / length, i = task % length;
          turns[number * kChunk + i].begin();
          kernels.pack_queries(step, unit(shape, first + number).batch, head(number), chunk + i, query_block(number, i),
                               scratch + worker * sizes.scratch);
        });
        // Neighbouring tasks belong to different units, if there are several, and so do not wait for each other.
        parallel_for(count * visits.count(), threads, [&](int64_t task, int worker) {
          const int64_t number = task % count, j = visits.begin() + task / count;
          double& slope_term = slope_terms[number * key_blocks + j];
          slope_term = 0;
          if (!visits.seen(j)) return;
          char* const mine = scratch + worker * sizes.scratch;
          kernels.begin_keys(shape, mine);
          for (int64_t i = 0; i < length; ++i) {
            if (visits.number(i, j) < 0) continue;
            Turn& turn = turns[number * kChunk + i];
            turn.wait(visits.number(i, j));
            kernels.backward_pair(step, unit(shape, first + number).batch, head(number), j,
                                  keys + (number * key_blocks + j) * sizes.key_block, query_block(number, i), mine);
            turn.pass();
          }
          const Unit at = unit(shape, first + number);
          slope_term = kernels.add_keys(step, at.batch, at.kv_head, j, mine);
        });
        parallel_for(count * length, threads, [&](int64_t task, int) {
          const int64_t number = task / length, i = task % length;
          kernels.add_queries(step, unit(shape, first + number).batch, head(number), chunk + i, query_block(number, i));
        });
        for (int64_t number = 0; number < count; ++number) {
          double& sum = slope_sums[unit(shape, first + number).batch * shape.heads + head(number)];
          for (int64_t j = 0; j < visits.count(); ++j) sum += slope_terms[number * key_blocks + visits.begin() + j];
        }
      }
    }
  }
  for (int64_t i = 0; step.d_slopes != nullptr && i < shape.batch * shape.heads; ++i) {
    if (step.dtype == DType::kF64) {
      static_cast<double*>(step.d_slopes)[i % shape.heads] += slope_sums[i];
    } else {
      static_cast<float*>(step.d_slopes)[i % shape.heads] += static_cast<float>(slope_sums[i]);
    }
  }
  scratch_memory().trim();
}

}  // namespace fused_tp::attention

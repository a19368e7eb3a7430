// Distribution of blocks over threads, and the order in which blocks are summed; kernels.h has the arithmetic.
//
// Blocks are always added to a sum in ascending order, whichever thread computes them, so results are bitwise identical
// for any number of threads.
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

// Backward handles this many blocks of queries at once: they and their dq then stay in cache.
constexpr int64_t kPassBlocks = 16;

int64_t count_blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

// One head of keys and values of one batch element. Its blocks are packed once, for all query heads of its group.
struct KvHead {
  int64_t batch, head;
};

KvHead nth_kv_head(const Shape& shape, int64_t n) { return {n / shape.kv_heads, n % shape.kv_heads}; }

// The blocks of keys to which some blocks of queries attend. For each block of queries, its blocks of keys are numbered
// 0, 1, ...; -1 marks a block outside all of its intervals. Time and memory grow with the range of blocks in use, not
// with the number of keys.
class BlockPairs {
 public:
  BlockPairs(const Problem& step, int64_t first_query_block, int64_t query_blocks) {
    const int64_t first_row = first_query_block * kQueries;
    const int64_t rows = std::min((first_query_block + query_blocks) * kQueries, step.shape.rows);
    const auto has_keys = [&](int64_t row) { return step.intervals.starts[row] < step.intervals.stops[row]; };
    for (int64_t row = first_row; row < rows; ++row) {
      if (!has_keys(row)) continue;
      const int64_t first = step.intervals.starts[row] / kKeys, last = count_blocks(step.intervals.stops[row], kKeys);
      begin_ = end_ == 0 ? first : std::min(begin_, first);
      end_ = std::max(end_, last);
    }
    numbers_.assign(query_blocks * count(), -1);
    is_used_.assign(count(), 0);
    for (int64_t i = 0; i < query_blocks; ++i) {
      int64_t next = begin_;  // interval ends never decrease, so blocks before `next` are already numbered
      int32_t number = 0;
      for (int64_t row = first_row + i * kQueries; row < std::min(first_row + (i + 1) * kQueries, rows); ++row) {
        if (!has_keys(row)) continue;
        next = std::max<int64_t>(next, step.intervals.starts[row] / kKeys);
        for (; next * kKeys < step.intervals.stops[row]; ++next) {
          numbers_[i * count() + next - begin_] = number++;
          is_used_[next - begin_] = 1;
        }
      }
    }
  }
  // All blocks of keys in use are in [begin(), begin() + count()); blocks between them may be unused.
  int64_t begin() const { return begin_; }
  int64_t count() const { return end_ - begin_; }
  int32_t number(int64_t query_block, int64_t key_block) const {
    return numbers_[query_block * count() + key_block - begin_];
  }
  bool is_used(int64_t key_block) const { return is_used_[key_block - begin_] != 0; }

 private:
  int64_t begin_ = 0, end_ = 0;
  std::vector<int32_t> numbers_;
  std::vector<char> is_used_;
};

// Serializes the threads that add to the dq of one block of queries, in the order of their blocks of keys. This keeps
// the sum bitwise reproducible.
class TurnCounter {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  void wait(int32_t number) const {
    for (int tries = 0; next_.load(std::memory_order_acquire) != number; ++tries)
      if (tries > 200) std::this_thread::yield();
  }
  void advance() { next_.store(next_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

 private:
  std::atomic<int32_t> next_{0};
};

}  // namespace

void forward(const ForwardProblem& step, int threads, const char* isa) {
  const Shape& shape = step.shape;
  const Kernels& kernels = select_kernels(step.dtype, isa);
  const BufferSizes sizes = kernels.forward_sizes(shape);
  const int64_t key_blocks = count_blocks(shape.keys, kKeys), query_blocks = count_blocks(shape.rows, kQueries);
  const int64_t total_kv_heads = shape.batch * shape.kv_heads,
                heads_at_once = std::min<int64_t>(total_kv_heads, std::max(threads, 1));
  const int64_t group = shape.heads / shape.kv_heads;
  const size_t kv_head_bytes = key_blocks * sizes.key_block;
  char* const keys = scratch_memory().reserve(heads_at_once * kv_head_bytes + std::max(threads, 1) * sizes.scratch);
  char* const scratch = keys + heads_at_once * kv_head_bytes;

  for (int64_t first = 0; first < total_kv_heads; first += heads_at_once) {
    const int64_t count = std::min(heads_at_once, total_kv_heads - first);
    parallel_for(count * key_blocks, threads, [&](int64_t task, int worker) {
      const KvHead kv_head = nth_kv_head(shape, first + task / key_blocks);
      kernels.pack_keys_forward(step, kv_head.batch, kv_head.head, task % key_blocks, keys + task * sizes.key_block,
                                scratch + worker * sizes.scratch);
    });
    const int64_t tasks_per_kv_head = group * query_blocks;
    parallel_for(count * tasks_per_kv_head, threads, [&](int64_t task, int worker) {
      const int64_t number = task / tasks_per_kv_head, head = task % tasks_per_kv_head / query_blocks;
      const KvHead kv_head = nth_kv_head(shape, first + number);
      // Last queries first: under a causal mask they attend to the most keys, so they take longest.
      kernels.forward_block(step, kv_head.batch, kv_head.head * group + head, query_blocks - 1 - task % query_blocks,
                            keys + number * kv_head_bytes, scratch + worker * sizes.scratch);
    });
  }
  scratch_memory().trim();
}

void backward(const BackwardProblem& step, int threads, const char* isa) {
  const Shape& shape = step.shape;
  const Kernels& kernels = select_kernels(step.dtype, isa);
  const BufferSizes sizes = kernels.backward_sizes(shape);
  const int64_t key_blocks = count_blocks(shape.keys, kKeys), query_blocks = count_blocks(shape.rows, kQueries);
  const int64_t total_kv_heads = shape.batch * shape.kv_heads,
                heads_at_once = std::min<int64_t>(total_kv_heads, std::max(threads, 1));
  const int64_t group = shape.heads / shape.kv_heads;
  char* const keys =
      scratch_memory().reserve(heads_at_once * (key_blocks * sizes.key_block + kPassBlocks * sizes.query_block) +
                               std::max(threads, 1) * sizes.scratch);
  char* const queries = keys + heads_at_once * key_blocks * sizes.key_block;
  char* const scratch = queries + heads_at_once * kPassBlocks * sizes.query_block;
  const std::unique_ptr<TurnCounter[]> turn_counters(new TurnCounter[heads_at_once * kPassBlocks]);
  std::vector<double> slope_terms(heads_at_once * key_blocks), slope_sums(shape.batch * shape.heads);

  for (int64_t first = 0; first < total_kv_heads; first += heads_at_once) {
    const int64_t count = std::min(heads_at_once, total_kv_heads - first);
    parallel_for(count * key_blocks, threads, [&](int64_t task, int worker) {
      const KvHead kv_head = nth_kv_head(shape, first + task / key_blocks);
      kernels.pack_keys_backward(step, kv_head.batch, kv_head.head, task % key_blocks, keys + task * sizes.key_block,
                                 scratch + worker * sizes.scratch);
    });
    for (int64_t first_block = 0; first_block < query_blocks; first_block += kPassBlocks) {
      const int64_t length = std::min(kPassBlocks, query_blocks - first_block);
      const BlockPairs block_pairs(step, first_block, length);
      for (int64_t head_in_group = 0; head_in_group < group; ++head_in_group) {
        const auto head = [&](int64_t number) {
          return nth_kv_head(shape, first + number).head * group + head_in_group;
        };
        const auto query_block = [&](int64_t number, int64_t i) {
          return queries + (number * kPassBlocks + i) * sizes.query_block;
        };
        parallel_for(count * length, threads, [&](int64_t task, int worker) {
          const int64_t number = task / length, i = task % length;
          turn_counters[number * kPassBlocks + i].reset();
          kernels.pack_queries(step, nth_kv_head(shape, first + number).batch, head(number), first_block + i,
                               query_block(number, i), scratch + worker * sizes.scratch);
        });
        // Neighbouring tasks belong to different heads, if there are several, and then do not wait for each other.
        parallel_for(count * block_pairs.count(), threads, [&](int64_t task, int worker) {
          const int64_t number = task % count, j = block_pairs.begin() + task / count;
          double& slope_term = slope_terms[number * key_blocks + j];
          slope_term = 0;
          if (!block_pairs.is_used(j)) return;
          char* const worker_scratch = scratch + worker * sizes.scratch;
          kernels.zero_dk_dv(shape, worker_scratch);
          for (int64_t i = 0; i < length; ++i) {
            if (block_pairs.number(i, j) < 0) continue;
            TurnCounter& turn = turn_counters[number * kPassBlocks + i];
            turn.wait(block_pairs.number(i, j));
            kernels.backward_pair(step, nth_kv_head(shape, first + number).batch, head(number), j,
                                  keys + (number * key_blocks + j) * sizes.key_block, query_block(number, i),
                                  worker_scratch);
            turn.advance();
          }
          const KvHead kv_head = nth_kv_head(shape, first + number);
          slope_term = kernels.add_dk_dv(step, kv_head.batch, kv_head.head, j, worker_scratch);
        });
        parallel_for(count * length, threads, [&](int64_t task, int) {
          const int64_t number = task / length, i = task % length;
          kernels.add_dq(step, nth_kv_head(shape, first + number).batch, head(number), first_block + i,
                         query_block(number, i));
        });
        for (int64_t number = 0; number < count; ++number) {
          double& sum = slope_sums[nth_kv_head(shape, first + number).batch * shape.heads + head(number)];
          for (int64_t j = 0; j < block_pairs.count(); ++j)
            sum += slope_terms[number * key_blocks + block_pairs.begin() + j];
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

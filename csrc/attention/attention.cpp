// Distribution of blocks over threads, and the order in which blocks are summed; kernels.h has the arithmetic.
//
// Blocks are always added to a sum in ascending order, whichever thread computes them. So results are bitwise identical
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

// Number of query blocks that backward handles at once, so that they and their dq stay in cache.
constexpr int64_t kPassBlocks = 16;

int64_t count_blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }

// One head of keys and values of one batch element. Its blocks are packed once, for all query heads of its group.
struct KvHead {
  int64_t batch, head;
};

KvHead nth_kv_head(const Shape& shape, int64_t n) { return {n / shape.kv_heads, n % shape.kv_heads}; }

// For a range of query blocks: the key blocks that each of them must visit. The key blocks of a query block take turns
// 0, 1, ...; -1: no query of the block attends to it. Time and memory grow with the span of key blocks in use, not with
// the number of keys.
class BlockPairs {
 public:
  BlockPairs(const Problem& problem, int64_t first_query_block, int64_t query_blocks) {
    const int64_t first_row = first_query_block * kQueries;
    const int64_t end_row = std::min((first_query_block + query_blocks) * kQueries, problem.shape.rows);
    const auto has_keys = [&](int64_t row) { return problem.intervals.starts[row] < problem.intervals.stops[row]; };
    for (int64_t row = first_row; row < end_row; ++row) {
      if (!has_keys(row)) continue;
      const int64_t begin_block = problem.intervals.starts[row] / kKeys,
                    end_block = count_blocks(problem.intervals.stops[row], kKeys);
      begin_ = end_ == 0 ? begin_block : std::min(begin_, begin_block);
      end_ = std::max(end_, end_block);
    }
    turns_.assign(query_blocks * count(), -1);
    is_used_.assign(count(), 0);
    for (int64_t i = 0; i < query_blocks; ++i) {
      int64_t next = begin_;  // interval ends never decrease, so blocks before `next` already have a turn
      int32_t turn = 0;
      for (int64_t row = first_row + i * kQueries; row < std::min(first_row + (i + 1) * kQueries, end_row); ++row) {
        if (!has_keys(row)) continue;
        next = std::max<int64_t>(next, problem.intervals.starts[row] / kKeys);
        for (; next * kKeys < problem.intervals.stops[row]; ++next) {
          turns_[i * count() + next - begin_] = turn++;
          is_used_[next - begin_] = 1;
        }
      }
    }
  }
  // All key blocks in use are in [begin(), begin() + count()); some in this range may be unused.
  int64_t begin() const { return begin_; }
  int64_t count() const { return end_ - begin_; }
  int32_t turn(int64_t query_block, int64_t key_block) const {
    return turns_[query_block * count() + key_block - begin_];
  }
  bool is_used(int64_t key_block) const { return is_used_[key_block - begin_] != 0; }

 private:
  int64_t begin_ = 0, end_ = 0;
  std::vector<int32_t> turns_;
  std::vector<char> is_used_;
};

// Serializes the threads that add to the dq of one query block, in the order of their key blocks. This keeps the sum
// bitwise reproducible.
class TurnCounter {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  void wait(int32_t turn) const {
    for (int tries = 0; next_.load(std::memory_order_acquire) != turn; ++tries)
      if (tries > 200) std::this_thread::yield();
  }
  void advance() { next_.store(next_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

 private:
  std::atomic<int32_t> next_{0};
};

}  // namespace

void forward(const ForwardProblem& problem, int threads, const char* isa) {
  const Shape& shape = problem.shape;
  const Kernels& kernels = select_kernels(problem.dtype, isa);
  const BufferSizes sizes = kernels.forward_sizes(shape);
  const int64_t key_blocks = count_blocks(shape.keys, kKeys), query_blocks = count_blocks(shape.rows, kQueries);
  const int64_t total_kv_heads = shape.batch * shape.kv_heads,
                heads_at_once = std::min<int64_t>(total_kv_heads, std::max(threads, 1));
  const int64_t group_size = shape.heads / shape.kv_heads;
  const size_t kv_head_bytes = key_blocks * sizes.key_block;
  char* const keys = scratch_memory().reserve(heads_at_once * kv_head_bytes + std::max(threads, 1) * sizes.scratch);
  char* const scratch = keys + heads_at_once * kv_head_bytes;

  for (int64_t first_kv_head = 0; first_kv_head < total_kv_heads; first_kv_head += heads_at_once) {
    const int64_t count = std::min(heads_at_once, total_kv_heads - first_kv_head);
    parallel_for(count * key_blocks, threads, [&](int64_t task, int worker) {
      const KvHead kv_head = nth_kv_head(shape, first_kv_head + task / key_blocks);
      kernels.pack_keys_forward(problem, kv_head.batch, kv_head.head, task % key_blocks, keys + task * sizes.key_block,
                                scratch + worker * sizes.scratch);
    });
    const int64_t tasks_per_kv_head = group_size * query_blocks;
    parallel_for(count * tasks_per_kv_head, threads, [&](int64_t task, int worker) {
      const int64_t kv_head_index = task / tasks_per_kv_head, head = task % tasks_per_kv_head / query_blocks;
      const KvHead kv_head = nth_kv_head(shape, first_kv_head + kv_head_index);
      // In descending order: under a causal mask the last queries attend to the most keys, so they take longest.
      kernels.forward_block(problem, kv_head.batch, kv_head.head * group_size + head,
                            query_blocks - 1 - task % query_blocks, keys + kv_head_index * kv_head_bytes,
                            scratch + worker * sizes.scratch);
    });
  }
  scratch_memory().trim();
}

void backward(const BackwardProblem& problem, int threads, const char* isa) {
  const Shape& shape = problem.shape;
  const Kernels& kernels = select_kernels(problem.dtype, isa);
  const BufferSizes sizes = kernels.backward_sizes(shape);
  const int64_t key_blocks = count_blocks(shape.keys, kKeys), query_blocks = count_blocks(shape.rows, kQueries);
  const int64_t total_kv_heads = shape.batch * shape.kv_heads,
                heads_at_once = std::min<int64_t>(total_kv_heads, std::max(threads, 1));
  const int64_t group_size = shape.heads / shape.kv_heads;
  char* const keys =
      scratch_memory().reserve(heads_at_once * (key_blocks * sizes.key_block + kPassBlocks * sizes.query_block) +
                               std::max(threads, 1) * sizes.scratch);
  char* const queries = keys + heads_at_once * key_blocks * sizes.key_block;
  char* const scratch = queries + heads_at_once * kPassBlocks * sizes.query_block;
  const std::unique_ptr<TurnCounter[]> turn_counters(new TurnCounter[heads_at_once * kPassBlocks]);
  std::vector<double> slope_terms(heads_at_once * key_blocks), slope_sums(shape.batch * shape.heads);

  for (int64_t first_kv_head = 0; first_kv_head < total_kv_heads; first_kv_head += heads_at_once) {
    const int64_t count = std::min(heads_at_once, total_kv_heads - first_kv_head);
    parallel_for(count * key_blocks, threads, [&](int64_t task, int worker) {
      const KvHead kv_head = nth_kv_head(shape, first_kv_head + task / key_blocks);
      kernels.pack_keys_backward(problem, kv_head.batch, kv_head.head, task % key_blocks, keys + task * sizes.key_block,
                                 scratch + worker * sizes.scratch);
    });
    for (int64_t first_block = 0; first_block < query_blocks; first_block += kPassBlocks) {
      const int64_t pass_blocks = std::min(kPassBlocks, query_blocks - first_block);
      const BlockPairs block_pairs(problem, first_block, pass_blocks);
      for (int64_t head_in_group = 0; head_in_group < group_size; ++head_in_group) {
        const auto head = [&](int64_t kv_head_index) {
          return nth_kv_head(shape, first_kv_head + kv_head_index).head * group_size + head_in_group;
        };
        const auto query_block = [&](int64_t kv_head_index, int64_t i) {
          return queries + (kv_head_index * kPassBlocks + i) * sizes.query_block;
        };
        parallel_for(count * pass_blocks, threads, [&](int64_t task, int worker) {
          const int64_t kv_head_index = task / pass_blocks, i = task % pass_blocks;
          turn_counters[kv_head_index * kPassBlocks + i].reset();
          kernels.pack_queries(problem, nth_kv_head(shape, first_kv_head + kv_head_index).batch, head(kv_head_index),
                               first_block + i, query_block(kv_head_index, i), scratch + worker * sizes.scratch);
        });
        // Consecutive tasks belong to different heads (if there are several), so they do not wait for each other.
        parallel_for(count * block_pairs.count(), threads, [&](int64_t task, int worker) {
          const int64_t kv_head_index = task % count, j = block_pairs.begin() + task / count;
          double& slope_term = slope_terms[kv_head_index * key_blocks + j];
          slope_term = 0;
          if (!block_pairs.is_used(j)) return;
          char* const worker_scratch = scratch + worker * sizes.scratch;
          kernels.zero_dk_dv(shape, worker_scratch);
          for (int64_t i = 0; i < pass_blocks; ++i) {
            if (block_pairs.turn(i, j) < 0) continue;
            TurnCounter& turn_counter = turn_counters[kv_head_index * kPassBlocks + i];
            turn_counter.wait(block_pairs.turn(i, j));
            kernels.backward_pair(problem, nth_kv_head(shape, first_kv_head + kv_head_index).batch, head(kv_head_index),
                                  j, keys + (kv_head_index * key_blocks + j) * sizes.key_block,
                                  query_block(kv_head_index, i), worker_scratch);
            turn_counter.advance();
          }
          const KvHead kv_head = nth_kv_head(shape, first_kv_head + kv_head_index);
          slope_term = kernels.add_dk_dv(problem, kv_head.batch, kv_head.head, j, worker_scratch);
        });
        parallel_for(count * pass_blocks, threads, [&](int64_t task, int) {
          const int64_t kv_head_index = task / pass_blocks, i = task % pass_blocks;
          kernels.add_dq(problem, nth_kv_head(shape, first_kv_head + kv_head_index).batch, head(kv_head_index),
                         first_block + i, query_block(kv_head_index, i));
        });
        for (int64_t kv_head_index = 0; kv_head_index < count; ++kv_head_index) {
          double& sum =
              slope_sums[nth_kv_head(shape, first_kv_head + kv_head_index).batch * shape.heads + head(kv_head_index)];
          for (int64_t j = 0; j < block_pairs.count(); ++j)
            sum += slope_terms[kv_head_index * key_blocks + block_pairs.begin() + j];
        }
      }
    }
  }
  for (int64_t i = 0; problem.d_slopes != nullptr && i < shape.batch * shape.heads; ++i) {
    if (problem.dtype == DType::kF64) {
      static_cast<double*>(problem.d_slopes)[i % shape.heads] += slope_sums[i];
    } else {
      static_cast<float*>(problem.d_slopes)[i % shape.heads] += static_cast<float>(slope_sums[i]);
    }
  }
  scratch_memory().trim();
}

}  // namespace fused_tp::attention

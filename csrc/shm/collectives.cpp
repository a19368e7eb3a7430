#include "collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "kernels.h"

namespace fused_tp::shm {
namespace {

// Up to this size every rank sums all data itself (one-shot), which takes one exchange of signals. Larger data is
// reduced by its owners (two-shot), which takes two.
constexpr size_t kOneShotBytes = 32 * 1024;
// Bytes of one chunk of the pipeline, for all ranks together: two chunks and their results fit into a core's L2 cache.
constexpr size_t kChunkBytes = 256 * 1024;
constexpr size_t kMaxChunks = 16 * 1024;  // a chunk takes two stages, and stage numbers have 16 bits

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }
size_t ceil_div(size_t value, size_t by) { return (value + by - 1) / by; }

Signature make_signature(const char* op, DType dtype, std::initializer_list<int64_t> dims) {
  Signature signature{};
  std::strncpy(signature.op, op, sizeof signature.op - 1);
  signature.dtype = static_cast<int32_t>(dtype);
  for (int64_t dim : dims) signature.dims[signature.n_dims++] = dim;
  return signature;
}

uint64_t hash_counts(const std::vector<size_t>& counts) {
  uint64_t hash = 1469598103934665603ull;
  for (size_t count : counts) hash = (hash ^ count) * 1099511628211ull;
  return hash >> 1;
}

// Elements per rank and chunk. Whole cache lines, so that no two ranks write to the same line.
size_t chunk_elements(size_t largest, size_t parts, size_t size) {
  const size_t bytes = std::max(kChunkBytes / parts, ceil_div(largest * size, kMaxChunks));
  return std::min(round_up(bytes, kCacheLine), std::max(round_up(largest * size, kCacheLine), kCacheLine)) / size;
}

std::vector<size_t> prefix_sums(const Group& group, const std::vector<size_t>& counts) {
  if (counts.size() != static_cast<size_t>(group.size()))
    throw std::invalid_argument("the counts must have one entry for each of the " + std::to_string(group.size()) +
                                " ranks; there are " + std::to_string(counts.size()));
  std::vector<size_t> offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

const char* at(const void* base, size_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, size_t bytes) { return static_cast<char*>(base) + bytes; }

void copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

void all_reduce_one_shot(Group& group, Call& call, const void* in, void* out, size_t count, DType dtype) {
  copy(call.workspace(group.rank()), in, count * element_size(dtype));
  call.signal(1);
  std::array<const void*, kMaxRanks> sources;
  for (int r = 0; r < group.size(); ++r) {
    if (r != group.rank()) call.wait(r, 1);
    sources[r] = r == group.rank() ? in : call.workspace(r);
  }
  kernels().sum(out, sources.data(), group.size(), count, dtype);
}

// Two-shot reduction of `count` units of `unit_bytes` bytes, chunk by chunk. A chunk has one block per rank, and rank b
// owns block b: the peers pass it their terms, and it reduces them and returns the result.
//
// Chunks alternate between the two halves of the workspace. Each rank signals in(0), out(0), in(1), out(1), ...: in(k)
// when its terms of chunk k are in its workspace, out(k) when its result is there and it has read the peers' terms. The
// terms of chunk k + 1 overwrite those of chunk k - 1 only after this rank has seen out(k - 1) of all ranks.
//
// reduce_own(first, length, terms) reduces units [first, first + length), owned by this rank, given one term per rank,
// and returns the address of the result. take_result(first, length, result) receives the result of another rank.
template <typename ReduceOwn, typename TakeResult>
void two_shot(Group& group, Call& call, const void* in, size_t count, size_t block, size_t unit_bytes,
              ReduceOwn&& reduce_own, TakeResult&& take_result) {
  const int ranks = group.size();
  const int rank = group.rank();
  const size_t chunk = block * static_cast<size_t>(ranks);
  const size_t chunks = ceil_div(count, chunk);
  const size_t half_bytes = (chunk + block) * unit_bytes;  // one block of terms per rank, and the result
  auto begin_of = [&](size_t k, int b) { return std::min(count, k * chunk + static_cast<size_t>(b) * block); };
  auto length_of = [&](size_t k, int b) { return std::min(count, begin_of(k, b) + block) - begin_of(k, b); };
  auto workspace = [&](int r, size_t k, int b) {
    return call.workspace(r) + (k % 2) * half_bytes + static_cast<size_t>(b) * block * unit_bytes;
  };
  auto copy_in = [&](size_t k) {
    for (int step = 1; step < ranks; ++step) {
      const int b = (rank + step) % ranks;
      copy(workspace(rank, k, b), at(in, begin_of(k, b) * unit_bytes), length_of(k, b) * unit_bytes);
    }
    call.signal(static_cast<uint32_t>(2 * k + 1));
  };
  copy_in(0);
  for (size_t k = 0; k < chunks; ++k) {
    call.wait_all(static_cast<uint32_t>(2 * k + 1));
    std::array<const void*, kMaxRanks> terms;
    for (int r = 0; r < ranks; ++r)
      terms[r] = r == rank ? at(in, begin_of(k, rank) * unit_bytes) : workspace(r, k, rank);
    copy(workspace(rank, k, ranks), reduce_own(begin_of(k, rank), length_of(k, rank), terms.data()),
         length_of(k, rank) * unit_bytes);
    call.signal(static_cast<uint32_t>(2 * k + 2));
    if (k + 1 < chunks) copy_in(k + 1);
    for (int step = 1; step < ranks; ++step) {
      const int b = (rank + step) % ranks;
      call.wait(b, static_cast<uint32_t>(2 * k + 2));
      take_result(begin_of(k, b), length_of(k, b), workspace(b, k, ranks));
    }
  }
}

}  // namespace

void all_reduce(Group& group, const void* in, void* out, size_t count, const Signature& signature) {
  const auto dtype = static_cast<DType>(signature.dtype);
  const size_t size = element_size(dtype);
  if (count * size <= kOneShotBytes) {
    const auto call = group.begin(signature, count * size, false);
    all_reduce_one_shot(group, *call, in, out, count, dtype);
    call->end();
    return;
  }
  const size_t ranks = static_cast<size_t>(group.size());
  const size_t block = chunk_elements(ceil_div(count, ranks), ranks, size);
  const auto call = group.begin(signature, 2 * (ranks + 1) * block * size, false);
  auto reduce_own = [&](size_t first, size_t length, const void* const* terms) {
    kernels().sum(at(out, first * size), terms, group.size(), length, dtype);
    return at(out, first * size);
  };
  auto take_result = [&](size_t first, size_t length, const void* sum) {
    copy(at(out, first * size), sum, length * size);
  };
  two_shot(group, *call, in, count, block, size, reduce_own, take_result);
  call->end();
}

// Rank b sums block b of all workspaces into its own workspace, chunk by chunk, and signals after each chunk. After
// that signal the peers copy the sum over their own terms, which rank b has already read. Rejected: every rank sums all
// blocks itself, into memory outside the workspace. Traffic between cores is the same, but one more array passes
// through the caches.
void sum_workspaces(Group& group, Call& call, size_t count, DType dtype) {
  const size_t size = element_size(dtype);
  const int ranks = group.size();
  const int rank = group.rank();
  const size_t block = round_up(ceil_div(count * size, static_cast<size_t>(ranks)), kCacheLine) / size;
  const size_t chunk = chunk_elements(block, static_cast<size_t>(ranks), size);
  const size_t chunks = ceil_div(block, chunk);
  auto begin_of = [&](size_t k, int b) { return std::min(count, static_cast<size_t>(b) * block + k * chunk); };
  auto length_of = [&](size_t k, int b) {
    const size_t end = static_cast<size_t>(b) * block + std::min(block, (k + 1) * chunk);
    return std::min(count, end) - begin_of(k, b);
  };
  call.signal(1);
  call.wait_all(1);
  std::array<const void*, kMaxRanks> sources;
  for (size_t k = 0; k < chunks; ++k) {
    const auto stage = static_cast<uint32_t>(k + 2);
    for (int r = 0; r < ranks; ++r) sources[r] = call.workspace(r) + begin_of(k, rank) * size;
    kernels().sum(call.workspace(rank) + begin_of(k, rank) * size, sources.data(), ranks, length_of(k, rank), dtype);
    call.signal(stage);
    for (int step = 1; step < ranks; ++step) {
      const int b = (rank + step) % ranks;
      call.wait(b, stage);
      copy(call.workspace(rank) + begin_of(k, b) * size, call.workspace(b) + begin_of(k, b) * size,
           length_of(k, b) * size);
    }
  }
  const auto last_stage = static_cast<uint32_t>(chunks + 2);
  call.signal(last_stage);
  call.wait_all(last_stage);
}

// Chunks alternate between the two halves of the workspace. This rank writes chunk k over chunk k - 2, which is safe
// because it has waited for stage k of all ranks, and a rank signals stage k only after it has read chunk k - 2.
void reduce_scatter(Group& group, const void* in, void* out, const std::vector<size_t>& counts,
                    const Signature& signature) {
  const auto dtype = static_cast<DType>(signature.dtype);
  const size_t size = element_size(dtype);
  const int ranks = group.size();
  const int rank = group.rank();
  const auto offsets = prefix_sums(group, counts);
  const size_t largest = *std::max_element(counts.begin(), counts.end());
  const size_t block = chunk_elements(largest, static_cast<size_t>(ranks), size);
  Signature full_signature = signature;
  if (full_signature.n_dims < kMaxDims)
    full_signature.dims[full_signature.n_dims++] = static_cast<int64_t>(hash_counts(counts));
  const auto call = group.begin(full_signature, 2 * static_cast<size_t>(ranks) * block * size, false);
  auto begin_of = [&](size_t k, int r) { return std::min(counts[r], k * block); };
  auto length_of = [&](size_t k, int r) { return std::min(counts[r], (k + 1) * block) - begin_of(k, r); };
  auto workspace = [&](int r, size_t k, int b) {
    return call->workspace(r) + ((k % 2) * static_cast<size_t>(ranks) + static_cast<size_t>(b)) * block * size;
  };
  auto source = [&](size_t k, int b) { return at(in, (offsets[b] + begin_of(k, b)) * size); };
  for (size_t k = 0; k < ceil_div(largest, block); ++k) {
    for (int step = 1; step < ranks; ++step) {
      const int b = (rank + step) % ranks;
      copy(workspace(rank, k, b), source(k, b), length_of(k, b) * size);
    }
    call->signal(static_cast<uint32_t>(k + 1));
    call->wait_all(static_cast<uint32_t>(k + 1));
    std::array<const void*, kMaxRanks> sources;
    for (int r = 0; r < ranks; ++r) sources[r] = r == rank ? source(k, rank) : workspace(r, k, rank);
    kernels().sum(at(out, begin_of(k, rank) * size), sources.data(), ranks, length_of(k, rank), dtype);
  }
  call->end();
}

void all_to_all(Group& group, const void* in, void* out, const std::vector<size_t>& send_counts,
                const std::vector<size_t>& receive_counts, DType dtype) {
  const size_t size = element_size(dtype);
  const int ranks = group.size();
  const int rank = group.rank();
  const auto send_offsets = prefix_sums(group, send_counts);
  const auto receive_offsets = prefix_sums(group, receive_counts);
  // The workspace starts with the counts that this rank sends to each peer and expects from each peer. Peers compute
  // their offsets from these, and every rank checks that all pairs of ranks agree.
  const size_t n = static_cast<size_t>(ranks);
  const size_t table_bytes = round_up(2 * n * sizeof(size_t), kCacheLine);
  const auto call =
      group.begin(make_signature("all_to_all", dtype, {}), table_bytes + send_offsets.back() * size, false);
  auto sent_counts = [&](int r) { return reinterpret_cast<size_t*>(call->workspace(r)); };
  auto expected_counts = [&](int r) { return sent_counts(r) + n; };
  std::copy(send_counts.begin(), send_counts.end(), sent_counts(rank));
  std::copy(receive_counts.begin(), receive_counts.end(), expected_counts(rank));
  copy(call->workspace(rank) + table_bytes, in, send_offsets.back() * size);
  call->signal(1);
  call->wait_all(1);
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to)
      if (sent_counts(from)[to] != expected_counts(to)[from])
        throw RankMismatchError("ranks disagree about call " + std::to_string(call->number()) + ", all_to_all: rank " +
                                std::to_string(from) + " sends " + std::to_string(sent_counts(from)[to]) +
                                " elements to rank " + std::to_string(to) + ", which expects " +
                                std::to_string(expected_counts(to)[from]));
  for (int step = 0; step < ranks; ++step) {
    const int r = (rank + step) % ranks;
    const size_t offset = std::accumulate(sent_counts(r), sent_counts(r) + rank, size_t{0});
    copy(at(out, receive_offsets[r] * size), call->workspace(r) + table_bytes + offset * size,
         receive_counts[r] * size);
  }
  call->end();
}

void barrier(Group& group) { group.begin(make_signature("barrier", DType::kU8, {}), 0)->end(); }

void all_reduce_rms_norm(Group& group, const NormArguments& arguments, DType dtype) {
  const size_t row_bytes = arguments.columns * element_size(dtype);
  const int ranks = group.size();
  const int rank = group.rank();
  Signature signature = make_signature(
      "all_reduce_rms_norm", dtype, {static_cast<int64_t>(arguments.rows), static_cast<int64_t>(arguments.columns), 0});
  std::memcpy(&signature.dims[2], &arguments.eps, sizeof arguments.eps);
  auto norm_row = [&](size_t row, const void* const* partials, int n_partials, bool adds_residual) {
    kernels().rms_norm_row({partials, n_partials, adds_residual ? at(arguments.residual, row * row_bytes) : nullptr,
                            arguments.weight, at(arguments.new_residual, row * row_bytes),
                            at(arguments.normed, row * row_bytes), arguments.columns, arguments.eps},
                           dtype);
  };
  std::array<const void*, kMaxRanks> partials;
  if (arguments.rows * row_bytes <= kOneShotBytes) {
    const auto call = group.begin(signature, arguments.rows * row_bytes, false);
    copy(call->workspace(rank), arguments.partial, arguments.rows * row_bytes);
    call->signal(1);
    call->wait_all(1);
    for (size_t row = 0; row < arguments.rows; ++row) {
      for (int r = 0; r < ranks; ++r)
        partials[r] = at(r == rank ? arguments.partial : call->workspace(r), row * row_bytes);
      norm_row(row, partials.data(), ranks, true);
    }
    call->end();
    return;
  }
  // Two-shot by rows: the owner of a row sums it. Every rank norms the returned sums itself, because returning normed
  // rows too would double the data.
  const size_t block = std::max<size_t>({1, kChunkBytes / static_cast<size_t>(ranks) / row_bytes,
                                         ceil_div(arguments.rows, kMaxChunks * static_cast<size_t>(ranks))});
  const auto call = group.begin(signature, 2 * (static_cast<size_t>(ranks) + 1) * block * row_bytes, false);
  auto reduce_own = [&](size_t first, size_t length, const void* const* terms) {
    for (size_t i = 0; i < length; ++i) {
      for (int r = 0; r < ranks; ++r) partials[r] = at(terms[r], i * row_bytes);
      norm_row(first + i, partials.data(), ranks, true);
    }
    return at(arguments.new_residual, first * row_bytes);
  };
  auto take_result = [&](size_t first, size_t length, const void* sums) {
    for (size_t i = 0; i < length; ++i) {
      const void* row = at(sums, i * row_bytes);
      norm_row(first + i, &row, 1, false);
    }
  };
  two_shot(group, *call, arguments.partial, arguments.rows, block, row_bytes, reduce_own, take_result);
  call->end();
}

}  // namespace fused_tp::shm

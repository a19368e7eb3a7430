#include "collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "kernels.h"

namespace fused_tp::shm {
namespace {

// Below this size every rank reduces everything: one exchange of signals instead of two.
constexpr size_t kOneShotBytes = 32 * 1024;
// Bytes in flight of one pipeline step: two of them and their results stay in a core's L2 cache.
constexpr size_t kChunkBytes = 256 * 1024;
constexpr size_t kMaxChunks = 16 * 1024;  // stages are numbered with 16 bits

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

// Elements of one chunk of one rank: a multiple of a cache line, so that ranks never write to one line.
size_t chunk_elements(size_t largest, size_t parts, size_t size) {
  const size_t bytes = std::max(kChunkBytes / parts, ceil_div(largest * size, kMaxChunks));
  return std::min(round_up(bytes, kLine), std::max(round_up(largest * size, kLine), kLine)) / size;
}

std::vector<size_t> offsets_of(const Group& group, const std::vector<size_t>& counts) {
  if (counts.size() != static_cast<size_t>(group.size()))
    throw std::invalid_argument("one count is needed for each rank");
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

// Per chunk, rank b owns block b: peers send it theirs, it reduces them and returns the result.
// A chunk's parity selects its half of the workspace. Signals in program order: in(0), out(0), in(1), out(1), ...
// in(k + 1) overwrites half p only after out(k - 1) of all ranks, which signals that they have read it.
//
// The data is `count` units of `unit` bytes. own(first, length, terms) reduces units of this rank, with one term per
// rank, and returns the address of the result; take(first, length, result) receives the result of another rank.
template <typename Own, typename Take>
void two_shot(Group& group, Call& call, const void* in, size_t count, size_t block, size_t unit, Own&& own,
              Take&& take) {
  const int ranks = group.size();
  const int me = group.rank();
  const size_t chunk = block * static_cast<size_t>(ranks);
  const size_t chunks = ceil_div(count, chunk);
  const size_t half = (chunk + block) * unit;  // a block for every rank, and one for the result
  auto begin_of = [&](size_t k, int b) { return std::min(count, k * chunk + static_cast<size_t>(b) * block); };
  auto length_of = [&](size_t k, int b) { return std::min(count, begin_of(k, b) + block) - begin_of(k, b); };
  auto workspace = [&](int r, size_t k, int b) {
    return call.workspace(r) + (k % 2) * half + static_cast<size_t>(b) * block * unit;
  };
  auto copy_in = [&](size_t k) {
    for (int step = 1; step < ranks; ++step) {
      const int b = (me + step) % ranks;
      copy(workspace(me, k, b), at(in, begin_of(k, b) * unit), length_of(k, b) * unit);
    }
    call.signal(static_cast<uint32_t>(2 * k + 1));
  };
  copy_in(0);
  for (size_t k = 0; k < chunks; ++k) {
    call.wait_all(static_cast<uint32_t>(2 * k + 1));
    std::array<const void*, kMaxRanks> terms;
    for (int r = 0; r < ranks; ++r) terms[r] = r == me ? at(in, begin_of(k, me) * unit) : workspace(r, k, me);
    copy(workspace(me, k, ranks), own(begin_of(k, me), length_of(k, me), terms.data()), length_of(k, me) * unit);
    call.signal(static_cast<uint32_t>(2 * k + 2));
    if (k + 1 < chunks) copy_in(k + 1);
    for (int step = 1; step < ranks; ++step) {
      const int b = (me + step) % ranks;
      call.wait(b, static_cast<uint32_t>(2 * k + 2));
      take(begin_of(k, b), length_of(k, b), workspace(b, k, ranks));
    }
  }
}

}  // namespace

void all_reduce(Group& group, const void* in, void* out, size_t count, const Signature& called) {
  const auto dtype = static_cast<DType>(called.dtype);
  const size_t size = element_size(dtype);
  if (count * size <= kOneShotBytes) {
    const auto call = group.begin(called, count * size, false);
    all_reduce_one_shot(group, *call, in, out, count, dtype);
    call->end();
    return;
  }
  const size_t ranks = static_cast<size_t>(group.size());
  const size_t block = chunk_elements(ceil_div(count, ranks), ranks, size);
  const auto call = group.begin(called, 2 * (ranks + 1) * block * size, false);
  auto own = [&](size_t first, size_t length, const void* const* terms) {
    kernels().sum(at(out, first * size), terms, group.size(), length, dtype);
    return at(out, first * size);
  };
  auto take = [&](size_t first, size_t length, const void* sum) { copy(at(out, first * size), sum, length * size); };
  two_shot(group, *call, in, count, block, size, own, take);
  call->end();
}

// Rank b sums block b of all workspaces into its own, chunk by chunk, and signals each chunk. The signal also means
// that it has read the peers' terms of this chunk, so they overwrite these with the sum. Rejected: each rank sums
// everything into its own memory. The traffic between cores is the same, but one more result passes through caches.
void sum_workspaces(Group& group, Call& call, size_t count, DType dtype) {
  const size_t size = element_size(dtype);
  const int ranks = group.size();
  const int me = group.rank();
  const size_t block = round_up(ceil_div(count * size, static_cast<size_t>(ranks)), kLine) / size;
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
    for (int r = 0; r < ranks; ++r) sources[r] = call.workspace(r) + begin_of(k, me) * size;
    kernels().sum(call.workspace(me) + begin_of(k, me) * size, sources.data(), ranks, length_of(k, me), dtype);
    call.signal(stage);
    for (int step = 1; step < ranks; ++step) {
      const int b = (me + step) % ranks;
      call.wait(b, stage);
      copy(call.workspace(me) + begin_of(k, b) * size, call.workspace(b) + begin_of(k, b) * size,
           length_of(k, b) * size);
    }
  }
  const auto read = static_cast<uint32_t>(chunks + 2);
  call.signal(read);
  call.wait_all(read);
}

// A chunk's parity selects its half of the workspace. Half k % 2 was last read as chunk k - 2, before its reader
// signalled k - 1, and this rank waits for that signal before it fills k.
void reduce_scatter(Group& group, const void* in, void* out, const std::vector<size_t>& counts,
                    const Signature& called) {
  const auto dtype = static_cast<DType>(called.dtype);
  const size_t size = element_size(dtype);
  const int ranks = group.size();
  const int me = group.rank();
  const auto offsets = offsets_of(group, counts);
  const size_t largest = *std::max_element(counts.begin(), counts.end());
  const size_t block = chunk_elements(largest, static_cast<size_t>(ranks), size);
  Signature signature = called;
  if (signature.n_dims < kMaxDims) signature.dims[signature.n_dims++] = static_cast<int64_t>(hash_counts(counts));
  const auto call = group.begin(signature, 2 * static_cast<size_t>(ranks) * block * size, false);
  auto begin_of = [&](size_t k, int r) { return std::min(counts[r], k * block); };
  auto length_of = [&](size_t k, int r) { return std::min(counts[r], (k + 1) * block) - begin_of(k, r); };
  auto workspace = [&](int r, size_t k, int b) {
    return call->workspace(r) + ((k % 2) * static_cast<size_t>(ranks) + static_cast<size_t>(b)) * block * size;
  };
  auto source = [&](size_t k, int b) { return at(in, (offsets[b] + begin_of(k, b)) * size); };
  for (size_t k = 0; k < ceil_div(largest, block); ++k) {
    for (int step = 1; step < ranks; ++step) {
      const int b = (me + step) % ranks;
      copy(workspace(me, k, b), source(k, b), length_of(k, b) * size);
    }
    call->signal(static_cast<uint32_t>(k + 1));
    call->wait_all(static_cast<uint32_t>(k + 1));
    std::array<const void*, kMaxRanks> sources;
    for (int r = 0; r < ranks; ++r) sources[r] = r == me ? source(k, me) : workspace(r, k, me);
    kernels().sum(at(out, begin_of(k, me) * size), sources.data(), ranks, length_of(k, me), dtype);
  }
  call->end();
}

void all_to_all(Group& group, const void* in, void* out, const std::vector<size_t>& send_counts,
                const std::vector<size_t>& receive_counts, DType dtype) {
  const size_t size = element_size(dtype);
  const int ranks = group.size();
  const int me = group.rank();
  const auto send_offsets = offsets_of(group, send_counts);
  const auto receive_offsets = offsets_of(group, receive_counts);
  // The workspace starts with the counts that the rank sends to and expects from each peer: peers find their part by
  // them, and all ranks notice if any two disagree.
  const size_t n = static_cast<size_t>(ranks);
  const size_t table = round_up(2 * n * sizeof(size_t), kLine);
  const auto call = group.begin(make_signature("all_to_all", dtype, {}), table + send_offsets.back() * size, false);
  auto sends = [&](int r) { return reinterpret_cast<size_t*>(call->workspace(r)); };
  auto expects = [&](int r) { return sends(r) + n; };
  std::copy(send_counts.begin(), send_counts.end(), sends(me));
  std::copy(receive_counts.begin(), receive_counts.end(), expects(me));
  copy(call->workspace(me) + table, in, send_offsets.back() * size);
  call->signal(1);
  call->wait_all(1);
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to)
      if (sends(from)[to] != expects(to)[from])
        throw RankMismatchError("ranks disagree about call " + std::to_string(call->number()) + ", all_to_all: rank " +
                                std::to_string(from) + " sends " + std::to_string(sends(from)[to]) +
                                " elements to rank " + std::to_string(to) + ", which expects " +
                                std::to_string(expects(to)[from]));
  for (int step = 0; step < ranks; ++step) {
    const int r = (me + step) % ranks;
    const size_t offset = std::accumulate(sends(r), sends(r) + me, size_t{0});
    copy(at(out, receive_offsets[r] * size), call->workspace(r) + table + offset * size, receive_counts[r] * size);
  }
  call->end();
}

void barrier(Group& group) { group.begin(make_signature("barrier", DType::kU8, {}), 0)->end(); }

void all_reduce_rms_norm(Group& group, const NormArguments& a, DType dtype) {
  const size_t row_bytes = a.columns * element_size(dtype);
  const int ranks = group.size();
  const int me = group.rank();
  Signature signature =
      make_signature("all_reduce_rms_norm", dtype, {static_cast<int64_t>(a.rows), static_cast<int64_t>(a.columns), 0});
  std::memcpy(&signature.dims[2], &a.eps, sizeof a.eps);
  auto norm_row = [&](size_t row, const void* const* partials, int n_partials, bool add_residual) {
    kernels().rms_norm_row({partials, n_partials, add_residual ? at(a.residual, row * row_bytes) : nullptr, a.weight,
                            at(a.new_residual, row * row_bytes), at(a.normed, row * row_bytes), a.columns, a.eps},
                           dtype);
  };
  std::array<const void*, kMaxRanks> partials;
  if (a.rows * row_bytes <= kOneShotBytes) {
    const auto call = group.begin(signature, a.rows * row_bytes, false);
    copy(call->workspace(me), a.partial, a.rows * row_bytes);
    call->signal(1);
    call->wait_all(1);
    for (size_t row = 0; row < a.rows; ++row) {
      for (int r = 0; r < ranks; ++r) partials[r] = at(r == me ? a.partial : call->workspace(r), row * row_bytes);
      norm_row(row, partials.data(), ranks, true);
    }
    call->end();
    return;
  }
  // Two-shot by rows: the owner of a row sums it; the peers normalise the sum that it returns.
  const size_t block = std::max<size_t>({1, kChunkBytes / static_cast<size_t>(ranks) / row_bytes,
                                         ceil_div(a.rows, kMaxChunks * static_cast<size_t>(ranks))});
  const auto call = group.begin(signature, 2 * (static_cast<size_t>(ranks) + 1) * block * row_bytes, false);
  auto own = [&](size_t first, size_t length, const void* const* terms) {
    for (size_t i = 0; i < length; ++i) {
      for (int r = 0; r < ranks; ++r) partials[r] = at(terms[r], i * row_bytes);
      norm_row(first + i, partials.data(), ranks, true);
    }
    return at(a.new_residual, first * row_bytes);
  };
  auto take = [&](size_t first, size_t length, const void* summed) {
    for (size_t i = 0; i < length; ++i) {
      const void* row = at(summed, i * row_bytes);
      norm_row(first + i, &row, 1, false);
    }
  };
  two_shot(group, *call, a.partial, a.rows, block, row_bytes, own, take);
  call->end();
}

}  // namespace fused_tp::shm

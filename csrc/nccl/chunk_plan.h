// Which rows of which rank move in which exchange of a pipeline. Plain arithmetic on what all ranks know, so that the
// plans of any two ranks match: what one sends in exchange i the other receives in its exchange i.
//
// Rows are those of a tensor in rank-major order, `counts[r]` of them with rank r; some ranks may have none. In every
// exchange rank r sends to ranks r + d and receives from ranks r - d, for distances d that are the same on all ranks:
// so no two ranks send to the same one at a time, as they would if all began with rank 0's rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace fused_tp::nccl {

// `count` rows from `start` on, of those that peer `peer` sends or gets.
struct Part {
  int peer;
  int64_t start;
  int64_t count;
};

// What moves at the same time. Parts without rows are left out, on both of their ends.
struct Exchange {
  std::vector<Part> sends;
  std::vector<Part> receives;
};

struct ChunkPlan {
  std::vector<Exchange> exchanges;
  // In how many pieces each rank's rows are cut. Rows of a piece have arrived from all ranks behind its last exchange.
  int pieces = 1;
};

inline int64_t row_offset(const std::vector<int64_t>& counts, int rank) {
  int64_t start = 0;
  for (int r = 0; r < rank; ++r) start += counts[r];
  return start;
}

// Piece `index` of `pieces` of rows [start, start + count): as even as can be, the last ones short or empty.
inline Part piece_of(int peer, int64_t start, int64_t count, int index, int pieces) {
  const int64_t length = (count + pieces - 1) / pieces;
  const int64_t first = std::min(index * length, count);
  return {peer, start + first, std::min(length, count - first)};
}

namespace detail {

inline void add(std::vector<Part>& parts, const Part& part) {
  if (part.count > 0) parts.push_back(part);
}

// The cut into up to `chunks` exchanges: each covers several distances, or a piece of the rows of one.
struct Cuts {
  int pieces = 1;
  int groups = 1;

  Cuts(const std::vector<int64_t>& counts, int chunks) {
    const int distances = static_cast<int>(counts.size()) - 1;
    const int64_t longest = *std::max_element(counts.begin(), counts.end());
    pieces = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(chunks / distances, longest)));
    const int length = (distances + chunks - 1) / chunks;  // 5 distances in 4 groups are 2 + 2 + 1: 3 groups
    groups = (distances + length - 1) / length;
  }

  // The distances of a group: [first, last).
  std::pair<int, int> distances(int group, int world) const {
    const Part part = piece_of(0, 1, world - 1, group, groups);
    return {static_cast<int>(part.start), static_cast<int>(part.start + part.count)};
  }
};

}  // namespace detail

// An all-gather in up to `chunks` exchanges (with all of W - 1 peers in one if it is 1): the own rows are there, those
// of rank - 1 come first, then those of rank - 2, ... Sends start in the own rows, receives in the rows of all ranks.
inline ChunkPlan gather_plan(const std::vector<int64_t>& counts, int rank, int chunks) {
  const int world = static_cast<int>(counts.size());
  ChunkPlan plan;
  if (world == 1) return plan;
  const detail::Cuts cuts(counts, chunks);
  plan.pieces = cuts.pieces;
  for (int group = 0; group < cuts.groups; ++group) {
    const auto [first, last] = cuts.distances(group, world);
    for (int piece = 0; piece < cuts.pieces; ++piece) {
      Exchange exchange;
      for (int distance = first; distance < last; ++distance) {
        const int to = (rank + distance) % world, from = (rank - distance + world) % world;
        detail::add(exchange.sends, piece_of(to, 0, counts[rank], piece, cuts.pieces));
        detail::add(exchange.receives, piece_of(from, row_offset(counts, from), counts[from], piece, cuts.pieces));
      }
      plan.exchanges.push_back(std::move(exchange));
    }
  }
  return plan;
}

// A reduce-scatter's exchange of terms in up to `chunks` exchanges: rows of the farthest owner go first, the own ones
// stay. Piece after piece, so that the terms of the own rows' first piece are together early. Sends start in the rows
// of all ranks, receives in the own rows: the term of rank `peer` for them.
inline ChunkPlan scatter_plan(const std::vector<int64_t>& counts, int rank, int chunks) {
  const int world = static_cast<int>(counts.size());
  ChunkPlan plan;
  if (world == 1) return plan;
  const detail::Cuts cuts(counts, chunks);
  plan.pieces = cuts.pieces;
  for (int piece = 0; piece < cuts.pieces; ++piece) {
    for (int group = cuts.groups - 1; group >= 0; --group) {
      const auto [first, last] = cuts.distances(group, world);
      Exchange exchange;
      for (int distance = last - 1; distance >= first; --distance) {
        const int to = (rank + distance) % world, from = (rank - distance + world) % world;
        detail::add(exchange.sends, piece_of(to, row_offset(counts, to), counts[to], piece, cuts.pieces));
        detail::add(exchange.receives, piece_of(from, 0, counts[rank], piece, cuts.pieces));
      }
      plan.exchanges.push_back(std::move(exchange));
    }
  }
  return plan;
}

// Rows without gaps between them as one part each (their peer is the first one's): what one matmul can take.
inline std::vector<Part> joined(std::vector<Part> parts) {
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.start < b.start; });
  std::vector<Part> found;
  for (const Part& part : parts) {
    if (!found.empty() && found.back().start + found.back().count == part.start) {
      found.back().count += part.count;
    } else {
      found.push_back(part);
    }
  }
  return found;
}

}  // namespace fused_tp::nccl

// h = round(residual + partial_0 + ... + partial_(W-1)); normed = round(h * rsqrt(mean_j h_j^2 + eps) * weight)
//
// The sum, including the residual, is rounded once; separate steps, which add the residual to a rounded sum, are less
// exact. The norm is that of the rounded h, which backward and the next layer use too; it is computed in float and
// rounded once.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#pragma once

#include "copy.cuh"
#include "signals.cuh"

namespace fused_tp::cuda {

// Threads [first, first + threads) of the block: a power of two, and at least a warp, of them.
struct Group {
  int threads;
  __device__ int index() const { return threadIdx.x / threads; }
  __device__ int lane() const { return threadIdx.x % threads; }
  __device__ int count() const { return kThreads / threads; }
};

// The sum of all the group's values, in a fixed order (the same bits on every rank, in every run), for each of its
// threads. All threads of the block must call it together.
__device__ __forceinline__ float sum_over(const Group& group, float value) {
  __shared__ float of_warp[kThreads / kWarpSize];
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  __syncthreads();  // the values of the previous sum have been read
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  const int warps = group.threads / kWarpSize;
  const float* mine = of_warp + group.index() * warps;
  value = mine[0];
  for (int warp = 1; warp < warps; ++warp) value += mine[warp];
  return value;
}

struct AllReduceRmsNorm {
  const void* partial;
  RmsNorm norm;
  int64_t per_block;  // rows; with owners, rows of each owner
  int32_t group_threads;
};

// Packets of its row that a thread keeps in registers; it reads the others again, which it has written itself.
constexpr int kKept = 2;

// The smallest group that keeps a whole row, if a block is enough for that.
inline int group_threads(int64_t packets) {
  int threads = kWarpSize;
  while (threads < kThreads && threads * kKept < packets) threads *= 2;
  return threads;
}

// A matrix of rows, from row `first` on, each `pitch` bytes after the previous one.
struct Rows {
  char* data;
  int64_t pitch;
  int64_t first;
  __device__ char* operator[](int64_t row) const { return data + (row - first) * pitch; }
};

// Packet p of a row of numbers: whole and aligned, or up to the last column.
template <class T, bool kAligned>
__device__ __forceinline__ Packet load_of_row(const char* row, int64_t p, int64_t columns) {
  if constexpr (kAligned) return load_packet(row + p * 16);
  return load_elements<sizeof(T)>(row + p * 16, columns - p * kPacketElements<T>);
}

template <class T, bool kAligned>
__device__ __forceinline__ void store_of_row(char* row, int64_t p, int64_t columns, const Packet& packet) {
  if constexpr (kAligned) {
    store_packet(row + p * 16, packet);
  } else {
    store_elements<sizeof(T)>(row + p * 16, packet, columns - p * kPacketElements<T>);
  }
}

// Terms of a rank's rows: the slots of all other ranks, and its own term in `partial`.
template <int kWorld>
struct RowTerms {
  Rows slots;  // slot 0
  int64_t slot_bytes;
  Rows own;
  int rank, ranks;
  __device__ int count() const { return kWorld ? kWorld : ranks; }
};

// Arrays, or slots, of the results.
struct RowResults {
  Rows residual, normed;
};

// Adds up and norms rows [rows.first, rows.last).
template <class T, int kWorld, bool kAligned>
__device__ __forceinline__ void norm_rows(const AllReduceRmsNorm& job, Share rows, const RowTerms<kWorld>& terms,
                                          const RowResults& own) {
  constexpr int kElements = kPacketElements<T>;
  const RmsNorm& norm = job.norm;
  const int64_t columns = norm.columns, packets = ceil_div(columns, kElements);
  const Group group{job.group_threads};
  const Rows residuals{static_cast<char*>(const_cast<void*>(norm.residual)), own.residual.pitch, 0};
  const char* weight = static_cast<const char*>(norm.weight);

  for (int64_t first = rows.first; first < rows.last; first += group.count()) {
    const int64_t row = first + group.index();
    // Threads without a row take part in the barriers.
    const int64_t last = row < rows.last ? packets : 0;

    float squares = 0;
    auto add_up = [&](int64_t p) -> Packet {
      float total[kElements];
#pragma unroll
      for (int k = 0; k < kElements; ++k) total[k] = -0.0f;
      auto add = [&](const Packet& packet) {
        float values[kElements];
        unpack<T>(packet, values);
#pragma unroll
        for (int k = 0; k < kElements; ++k) total[k] += values[k];
      };
#pragma unroll
      for (int term = 0; term < terms.count(); ++term) {
        const char* slot = terms.slots[row] + term * terms.slot_bytes;
        if constexpr (kAligned) {
          add(load_packet((term == terms.rank ? terms.own[row] : slot) + p * 16));
        } else {
          add(term == terms.rank ? load_of_row<T, false>(terms.own[row], p, columns) : load_packet(slot + p * 16));
        }
      }
      add(load_of_row<T, kAligned>(residuals[row], p, columns));
      const Packet sum = pack<T>(total);
      unpack<T>(sum, total);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        if (kAligned || p * kElements + k < columns) squares = fmaf(total[k], total[k], squares);
      }
      store_of_row<T, kAligned>(own.residual[row], p, columns, sum);
      return sum;
    };

    Packet kept[kKept];
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t p = group.lane() + k * group.threads;
      if (p < last) kept[k] = add_up(p);
    }
#pragma unroll 1
    for (int64_t p = group.lane() + kKept * group.threads; p < last; p += group.threads) add_up(p);
    const float mean = sum_over(group, squares) / static_cast<float>(columns);
    const float inverse = 1.0f / sqrtf(mean + static_cast<float>(norm.eps));

    auto store_normed = [&](int64_t p, const Packet& packet) {
      float values[kElements], weights[kElements];
      unpack<T>(packet, values);
      unpack<T>(load_of_row<T, kAligned>(weight, p, columns), weights);
#pragma unroll
      for (int k = 0; k < kElements; ++k) values[k] = values[k] * inverse * weights[k];
      store_of_row<T, kAligned>(own.normed[row], p, columns, pack<T>(values));
    };
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t p = group.lane() + k * group.threads;
      if (p < last) store_normed(p, kept[k]);
    }
#pragma unroll 1
    for (int64_t p = group.lane() + kKept * group.threads; p < last; p += group.threads) {
      store_normed(p, load_of_row<T, kAligned>(own.residual[row], p, columns));
    }
  }
}

// The arrays of the caller.
template <class T>
__device__ __forceinline__ RowResults given_results(const RmsNorm& norm) {
  const int64_t pitch = norm.columns * static_cast<int64_t>(sizeof(T));
  return {{static_cast<char*>(norm.new_residual), pitch, 0}, {static_cast<char*>(norm.normed), pitch, 0}};
}

// Copies rows of numbers of kBytes: as whole packets if rows are contiguous on both sides, else number by number.
template <int kBytes, bool kAligned>
__device__ __forceinline__ void copy_rows(const Rows& to, const Rows& from, Share rows, int64_t columns) {
  if (rows.first >= rows.last) return;
  if constexpr (kAligned) {
    copy_units<Packet>(to[rows.first], from[rows.first], (rows.last - rows.first) * to.pitch / 16);
  } else {
#pragma unroll 1
    for (int64_t row = rows.first; row < rows.last; ++row) copy_units<Bits<kBytes>>(to[row], from[row], columns);
  }
}

template <class T>
__device__ __forceinline__ void fill_missing_rows(const RmsNorm& norm, Share rows) {
  const RowResults own = given_results<T>(norm);
  if (rows.first >= rows.last) return;
  fill_missing(own.residual[rows.first], (rows.last - rows.first) * own.residual.pitch);
  fill_missing(own.normed[rows.first], (rows.last - rows.first) * own.normed.pitch);
}

}  // namespace fused_tp::cuda

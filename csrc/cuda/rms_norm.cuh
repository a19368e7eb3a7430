// Sum, residual addition and RMSNorm of rows, with h = new_residual:
//
//   h = round(residual + partial_0 + ... + partial_(W-1)),   normed = round(h * rsqrt(mean_j h_j^2 + eps) * weight)
//
// The sum includes the residual and is rounded once. An all-reduce followed by a residual addition rounds twice and is
// less accurate. The norm uses the rounded h, because backward and the next layer use it too. It is computed in fp32.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#pragma once

#include "copy.cuh"
#include "signals.cuh"

namespace fused_tp::cuda {

// The group of consecutive threads, within a block, that computes one row: a power of two, and at least a warp.
struct ThreadGroup {
  int threads;
  __device__ int index() const { return threadIdx.x / threads; }
  __device__ int lane() const { return threadIdx.x % threads; }
  __device__ int count() const { return kThreads / threads; }
};

// Returns the sum of `value` over the threads of the group, to each of its threads. The order is fixed, so the result
// is bitwise identical on all ranks and in all runs. All threads of the block must call it together.
__device__ __forceinline__ float group_sum(const ThreadGroup& group, float value) {
  __shared__ float warp_sums[kThreads / kWarpSize];
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  __syncthreads();  // all threads have read the warp sums of the previous call
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  const int warps = group.threads / kWarpSize;
  const float* group_sums = warp_sums + group.index() * warps;
  value = group_sums[0];
  for (int warp = 1; warp < warps; ++warp) value += group_sums[warp];
  return value;
}

struct AllReduceRmsNorm {
  const void* partial;
  RmsNorm norm;
  int64_t per_block;  // rows per block; two-shot: rows of each owner per block
  int32_t group_threads;
};

// Number of packets of a row that a thread keeps in registers between computing the sum and normalizing. The thread
// rereads any further packets from the memory it has written.
constexpr int kCachedPackets = 2;

// Returns the smallest group that can keep a row of `packets` packets in registers, or a whole block if none can.
inline int group_threads(int64_t packets) {
  int threads = kWarpSize;
  while (threads < kThreads && threads * kCachedPackets < packets) threads *= 2;
  return threads;
}

// Rows from row `first_row` on, `pitch` bytes apart.
struct RowArray {
  char* data;
  int64_t pitch;
  int64_t first_row;
  __device__ char* operator[](int64_t row) const { return data + (row - first_row) * pitch; }
};

// Loads packet p of a row. If not kAligned, elements after the last column are 0.
template <class T, bool kAligned>
__device__ __forceinline__ Packet load_row_packet(const char* row, int64_t p, int64_t columns) {
  if constexpr (kAligned) return load_packet(row + p * 16);
  return load_elements<sizeof(T)>(row + p * 16, columns - p * kPacketElements<T>);
}

template <class T, bool kAligned>
__device__ __forceinline__ void store_row_packet(char* row, int64_t p, int64_t columns, const Packet& packet) {
  if constexpr (kAligned) {
    store_packet(row + p * 16, packet);
  } else {
    store_elements<sizeof(T)>(row + p * 16, packet, columns - p * kPacketElements<T>);
  }
}

// The terms of the sum of a row: those of the peers in slots, this rank's own in `partial`.
template <int kWorld>
struct RowTerms {
  RowArray slots;  // rows in slot 0; slot r is r * slot_bytes behind it
  int64_t slot_bytes;
  RowArray own_rows;
  int rank, ranks;
  __device__ int count() const { return kWorld ? kWorld : ranks; }
};

// Destination of the results: arrays of the caller, or a slot.
struct RowResults {
  RowArray residual, normed;
};

// Computes new_residual and normed for rows [rows.begin, rows.end).
template <class T, int kWorld, bool kAligned>
__device__ __forceinline__ void norm_rows(const AllReduceRmsNorm& job, Share rows, const RowTerms<kWorld>& terms,
                                          const RowResults& own_results) {
  constexpr int kElements = kPacketElements<T>;
  const RmsNorm& norm = job.norm;
  const int64_t columns = norm.columns, packets = ceil_div(columns, kElements);
  const ThreadGroup group{job.group_threads};
  const RowArray residuals{static_cast<char*>(const_cast<void*>(norm.residual)), own_results.residual.pitch, 0};
  const char* weight = static_cast<const char*>(norm.weight);

  for (int64_t first_row = rows.begin; first_row < rows.end; first_row += group.count()) {
    const int64_t row = first_row + group.index();
    // Groups without a row process no packets, but their threads must reach the barriers in group_sum.
    const int64_t end_packet = row < rows.end ? packets : 0;

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
          add(load_packet((term == terms.rank ? terms.own_rows[row] : slot) + p * 16));
        } else {
          add(term == terms.rank ? load_row_packet<T, false>(terms.own_rows[row], p, columns)
                                 : load_packet(slot + p * 16));
        }
      }
      add(load_row_packet<T, kAligned>(residuals[row], p, columns));
      const Packet sum = pack<T>(total);
      unpack<T>(sum, total);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        if (kAligned || p * kElements + k < columns) squares = fmaf(total[k], total[k], squares);
      }
      store_row_packet<T, kAligned>(own_results.residual[row], p, columns, sum);
      return sum;
    };

    Packet cached[kCachedPackets];
#pragma unroll
    for (int k = 0; k < kCachedPackets; ++k) {
      const int64_t p = group.lane() + k * group.threads;
      if (p < end_packet) cached[k] = add_up(p);
    }
#pragma unroll 1
    for (int64_t p = group.lane() + kCachedPackets * group.threads; p < end_packet; p += group.threads) add_up(p);
    const float mean = group_sum(group, squares) / static_cast<float>(columns);
    const float inverse = 1.0f / sqrtf(mean + static_cast<float>(norm.eps));

    auto store_normed = [&](int64_t p, const Packet& packet) {
      float values[kElements], weights[kElements];
      unpack<T>(packet, values);
      unpack<T>(load_row_packet<T, kAligned>(weight, p, columns), weights);
#pragma unroll
      for (int k = 0; k < kElements; ++k) values[k] = values[k] * inverse * weights[k];
      store_row_packet<T, kAligned>(own_results.normed[row], p, columns, pack<T>(values));
    };
#pragma unroll
    for (int k = 0; k < kCachedPackets; ++k) {
      const int64_t p = group.lane() + k * group.threads;
      if (p < end_packet) store_normed(p, cached[k]);
    }
#pragma unroll 1
    for (int64_t p = group.lane() + kCachedPackets * group.threads; p < end_packet; p += group.threads) {
      store_normed(p, load_row_packet<T, kAligned>(own_results.residual[row], p, columns));
    }
  }
}

// Returns the caller's arrays for the results.
template <class T>
__device__ __forceinline__ RowResults caller_results(const RmsNorm& norm) {
  const int64_t pitch = norm.columns * static_cast<int64_t>(sizeof(T));
  return {{static_cast<char*>(norm.new_residual), pitch, 0}, {static_cast<char*>(norm.normed), pitch, 0}};
}

// Copies rows with elements of kBytes bytes. If kAligned, both sides are contiguous and are copied as packets;
// otherwise element by element.
template <int kBytes, bool kAligned>
__device__ __forceinline__ void copy_rows(const RowArray& to, const RowArray& from, Share rows, int64_t columns) {
  if (rows.begin >= rows.end) return;
  if constexpr (kAligned) {
    copy_units<Packet>(to[rows.begin], from[rows.begin], (rows.end - rows.begin) * to.pitch / 16);
  } else {
#pragma unroll 1
    for (int64_t row = rows.begin; row < rows.end; ++row) copy_units<UnsignedBits<kBytes>>(to[row], from[row], columns);
  }
}

template <class T>
__device__ __forceinline__ void fill_nan_rows(const RmsNorm& norm, Share rows) {
  const RowResults own_results = caller_results<T>(norm);
  if (rows.begin >= rows.end) return;
  fill_nan(own_results.residual[rows.begin], (rows.end - rows.begin) * own_results.residual.pitch);
  fill_nan(own_results.normed[rows.begin], (rows.end - rows.begin) * own_results.normed.pitch);
}

}  // namespace fused_tp::cuda

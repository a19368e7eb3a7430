// h = round(residual + partial_0 + ... + partial_(W-1)); normed = round(h * rsqrt(mean_j h_j^2 + eps) * weight)
//
// The sum, the residual included, is rounded once; adding the residual to a sum that is rounded already, as the steps
// one by one do, is further from exact. The norm is taken of the rounded h, because that is what backward has and what
// the next layer sees; it is computed in float and rounded once, to fp8 as well.
// Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
#pragma once

#include <cuda_fp8.h>

#include "copy.cuh"
#include "reduce.cuh"

namespace fused_tp::cuda {

struct AllReduceRmsNorm {
  const void* partial;
  RmsNorm norm;
  int64_t per_block;  // rows, of each owner where there are owners
  int32_t group_threads;
};

// How many packets of its row a thread keeps in registers; it reads others again, which it has written itself.
constexpr int kKept = 2;

constexpr float kFp8Largest = 448.0f;

// The smallest group that keeps a whole row, where a block is enough for that.
inline int group_threads(int64_t packets) {
  int threads = kWarpSize;
  while (threads < kThreads && threads * kKept < packets) threads *= 2;
  return threads;
}

// A matrix of rows, from row `first` on, each `pitch` bytes behind the one before.
struct Rows {
  char* data;
  int64_t pitch;
  int64_t first;
  __device__ char* operator[](int64_t row) const { return data + (row - first) * pitch; }
};

// Packet p of a row of numbers: whole and aligned, or as far as there are columns.
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

// Numbers as e4m3 in the first bytes of a packet, one for each.
template <class T>
__device__ __forceinline__ Packet pack_fp8(const float (&values)[kPacketElements<T>]) {
  Packet packet = {};
#pragma unroll
  for (int k = 0; k < kPacketElements<T>; ++k) {
    const uint32_t bits = __nv_cvt_float_to_fp8(values[k], __NV_SATFINITE, __NV_E4M3);
    packet.words[k / 4] |= bits << (k % 4 * 8);
  }
  return packet;
}

template <class T, bool kAligned>
__device__ __forceinline__ void store_fp8(char* row, int64_t p, int64_t columns, const Packet& packet) {
  constexpr int kElements = kPacketElements<T>;
  char* to = row + p * kElements;
  if constexpr (kAligned) {
#pragma unroll
    for (int word = 0; word < kElements / 4; ++word) reinterpret_cast<uint32_t*>(to)[word] = packet.words[word];
  } else {
    const int64_t valid = columns - p * kElements;
    store_elements<1>(to, packet, valid < kElements ? valid : kElements);
  }
}

// Where a rank's rows are added up from: slots of all ranks, but its own from `partial`.
template <int kWorld>
struct RowTerms {
  Rows slots;  // slot 0
  int64_t slot_bytes;
  Rows own;
  int rank, ranks;
  __device__ int count() const { return kWorld ? kWorld : ranks; }
};

// Arrays, or slots, that results are in.
struct RowResults {
  Rows residual, normed;
  float* scales;  // of row normed.first; null: rows have none
};

// Adds up and norms rows [rows.first, rows.last).
template <class T, int kWorld, bool kAligned>
__device__ __forceinline__ void norm_rows(const AllReduceRmsNorm& job, Share rows, const RowTerms<kWorld>& terms,
                                          const RowResults& own) {
  constexpr int kElements = kPacketElements<T>;
  const RmsNorm& norm = job.norm;
  const int64_t columns = norm.columns, packets = ceil_div(columns, kElements);
  const Group group{job.group_threads};
  const bool per_row = norm.output == NormOutput::kFp8RowScale;
  const float given_scale = norm.output == NormOutput::kFp8StaticScale ? *norm.scale : 1.0f;
  const Rows residuals{static_cast<char*>(const_cast<void*>(norm.residual)), own.residual.pitch, 0};
  const char* weight = static_cast<const char*>(norm.weight);

  for (int64_t first = rows.first; first < rows.last; first += group.count()) {
    const int64_t row = first + group.index();
    // Threads without a row come along to the barriers.
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

    // body(p, values) for this thread's packets of the normed row.
    auto for_normed = [&](auto&& body) {
      auto normed = [&](int64_t p, const Packet& packet) {
        float values[kElements], weights[kElements];
        unpack<T>(packet, values);
        unpack<T>(load_of_row<T, kAligned>(weight, p, columns), weights);
#pragma unroll
        for (int k = 0; k < kElements; ++k) values[k] = values[k] * inverse * weights[k];
        body(p, values);
      };
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const int64_t p = group.lane() + k * group.threads;
        if (p < last) normed(p, kept[k]);
      }
#pragma unroll 1
      for (int64_t p = group.lane() + kKept * group.threads; p < last; p += group.threads) {
        normed(p, load_of_row<T, kAligned>(own.residual[row], p, columns));
      }
    };

    if (norm.output == NormOutput::kSameDtype) {
      for_normed([&](int64_t p, float (&values)[kElements]) {
        store_of_row<T, kAligned>(own.normed[row], p, columns, pack<T>(values));
      });
      continue;
    }
    float scale = given_scale;
    if (per_row) {
      float largest = 0;
      for_normed([&](int64_t p, float (&values)[kElements]) {
#pragma unroll
        for (int k = 0; k < kElements; ++k) {
          if (kAligned || p * kElements + k < columns) largest = fmaxf(largest, fabsf(values[k]));
        }
      });
      largest = max_over(group, largest);
      scale = largest / kFp8Largest;
      if (!(scale > 0)) scale = 1.0f;  // of zeros, or of numbers so small that this rounds to zero
      if (group.lane() == 0 && last > 0) {
        own.scales[row] = scale;
      }
    }
    for_normed([&](int64_t p, float (&values)[kElements]) {
#pragma unroll
      for (int k = 0; k < kElements; ++k) values[k] = values[k] / scale;
      store_fp8<T, kAligned>(own.normed[row], p, columns, pack_fp8<T>(values));
    });
  }
}

// The arrays that the caller has given.
template <class T>
__device__ __forceinline__ RowResults given_results(const RmsNorm& norm) {
  const int64_t pitch = norm.columns * static_cast<int64_t>(sizeof(T));
  return {{static_cast<char*>(norm.new_residual), pitch, 0},
          {static_cast<char*>(norm.normed), norm.columns * normed_bytes(norm.output, sizeof(T)), 0},
          norm.output == NormOutput::kFp8RowScale ? norm.scale : nullptr};
}

// Copies rows of numbers of kBytes: whole packets, one row right behind the other on both sides, or number by number.
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

// Rows of fp8: in units of what a packet of T becomes.
template <class T, bool kAligned>
__device__ __forceinline__ void copy_fp8_rows(const Rows& to, const Rows& from, Share rows, int64_t columns) {
  using Unit = std::conditional_t<kAligned, uint32_t, uint8_t>;
#pragma unroll 1
  for (int64_t row = rows.first; row < rows.last; ++row) {
    copy_units<Unit>(to[row], from[row], columns / static_cast<int64_t>(sizeof(Unit)));
  }
}

template <class T>
__device__ __forceinline__ void fill_missing_rows(const RmsNorm& norm, Share rows) {
  const RowResults own = given_results<T>(norm);
  if (rows.first >= rows.last) return;
  fill_missing(own.residual[rows.first], (rows.last - rows.first) * own.residual.pitch);
  fill_missing(own.normed[rows.first], (rows.last - rows.first) * own.normed.pitch);
  if (own.scales) fill_missing(own.scales + rows.first, (rows.last - rows.first) * 4);
}

}  // namespace fused_tp::cuda

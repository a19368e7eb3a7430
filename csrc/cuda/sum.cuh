// sum_i = round(term_0,i + term_1,i + ... [+ bias_(i mod columns)]), added in float in this order.
#pragma once

#include "vector.cuh"

namespace fused_tp::cuda {

// i mod n; with 32 bits if that is enough, which takes a quarter of the time.
__device__ __forceinline__ int64_t remainder_of(int64_t i, int64_t n) {
  if (((i | n) >> 32) == 0) return static_cast<uint32_t>(i) % static_cast<uint32_t>(n);
  return i % n;
}

// Adds the bias to elements first, first + 1, ...
template <class T>
__device__ __forceinline__ void add_bias(const Bias& bias, float (&total)[kPacketElements<T>], int64_t first) {
  if (!bias.data) return;
  const T* data = static_cast<const T*>(bias.data);
  int64_t column = remainder_of(first, bias.columns);
  Packet packet = {};
  if (is_aligned(data + column, 16) && column + kPacketElements<T> <= bias.columns) {
    packet = load_packet(data + column);
  } else {
    constexpr int kBytes = sizeof(T);
#pragma unroll
    for (int k = 0; k < kPacketElements<T>; ++k) {
      const uint32_t bits = reinterpret_cast<const Bits<kBytes>*>(data)[column];
      packet.words[k * kBytes / 4] |= bits << (k * kBytes % 4 * 8);
      if (++column == bias.columns) column = 0;
    }
  }
  float terms[kPacketElements<T>];
  unpack<T>(packet, terms);
#pragma unroll
  for (int k = 0; k < kPacketElements<T>; ++k) total[k] += terms[k];
}

// Terms in slots, one per rank; this rank's term is in `own` instead. All are whole packets.
template <int kWorld>
struct SlotTerms {
  const char* slots;
  int64_t pitch;  // bytes from slot to slot
  const char* own;
  int rank;
  int ranks;

  __device__ int count() const { return kWorld ? kWorld : ranks; }
  template <int kUnroll>
  __device__ __forceinline__ void load(int term, Packet (&packets)[kUnroll], int64_t i) const {
    // Selects pointers, not branches: loads of all terms can be in flight at once.
    const char* from = (term == rank ? own : slots + term * pitch) + i * 16;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) packets[u] = load_packet(from + u * kThreads * 16);
  }
};

// Terms in one array, at any alignment and of any length.
template <class T>
struct ArrayTerms {
  const T* data;
  int64_t stride;
  int64_t elements;
  int terms;

  __device__ int count() const { return terms; }
  template <int kUnroll>
  __device__ __forceinline__ void load(int term, Packet (&packets)[kUnroll], int64_t i) const {
    Vector<T>(data + term * stride, elements).load(packets, i);
  }
};

// Packets i, i + kThreads, ... of the sum; packet 0 begins with element `first`, as `bias` counts them.
template <class T, int kUnroll, class Terms>
__device__ __forceinline__ void sum(const Terms& terms, const Bias& bias, int64_t first, int64_t i,
                                    Packet (&result)[kUnroll]) {
  constexpr int kElements = kPacketElements<T>;
  float total[kUnroll][kElements];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) total[u][k] = -0.0f;  // added to x it is x, to -0 too
  }
#pragma unroll
  for (int term = 0; term < terms.count(); ++term) {
    Packet packets[kUnroll];
    terms.load(term, packets, i);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float values[kElements];
      unpack<T>(packets[u], values);
#pragma unroll
      for (int k = 0; k < kElements; ++k) total[u][k] += values[k];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    add_bias<T>(bias, total[u], first + (i + u * kThreads) * kElements);
    result[u] = pack<T>(total[u]);
  }
}

// Packets that a thread sums at once: for eight loads in flight, or about as many.
template <int kWorld>
constexpr int kSumUnroll = kWorld == 0 || kWorld == 2 ? 4
                           : kWorld == 4              ? 2
                                                      : 1;

}  // namespace fused_tp::cuda

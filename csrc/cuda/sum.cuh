// sum_i = round(term_0,i + term_1,i + ... [+ bias_(i mod columns)]), added in fp32 in this order.
#pragma once

#include "vector.cuh"

namespace fused_tp::cuda {

// i % n. If both fit into 32 bits, it uses a 32-bit division, which is about four times faster.
__device__ __forceinline__ int64_t fast_modulo(int64_t i, int64_t n) {
  if (((i | n) >> 32) == 0) return static_cast<uint32_t>(i) % static_cast<uint32_t>(n);
  return i % n;
}

// Adds the bias to `total`, which holds elements first_element, first_element + 1, ... of the sum.
template <class T>
__device__ __forceinline__ void add_bias(const Bias& bias, float (&total)[kPacketElements<T>], int64_t first_element) {
  if (!bias.data) return;
  const T* data = static_cast<const T*>(bias.data);
  int64_t column = fast_modulo(first_element, bias.columns);
  Packet packet = {};
  if (is_aligned(data + column, 16) && column + kPacketElements<T> <= bias.columns) {
    packet = load_packet(data + column);
  } else {
    constexpr int kBytes = sizeof(T);
#pragma unroll
    for (int k = 0; k < kPacketElements<T>; ++k) {
      const uint32_t bits = reinterpret_cast<const UnsignedBits<kBytes>*>(data)[column];
      packet.words[k * kBytes / 4] |= bits << (k * kBytes % 4 * 8);
      if (++column == bias.columns) column = 0;
    }
  }
  float terms[kPacketElements<T>];
  unpack<T>(packet, terms);
#pragma unroll
  for (int k = 0; k < kPacketElements<T>; ++k) total[k] += terms[k];
}

// Terms of a sum in slots, one per rank, except for this rank's term, which is at `own_term`. All consist of whole
// packets.
template <int kWorld>
struct SlotTerms {
  const char* slots;
  int64_t pitch;  // bytes between slots
  const char* own_term;
  int rank;
  int ranks;

  __device__ int count() const { return kWorld ? kWorld : ranks; }
  template <int kUnroll>
  __device__ __forceinline__ void load(int term, Packet (&packets)[kUnroll], int64_t i) const {
    // Selects the pointer without a branch, so that the loads of all terms can be in flight at once.
    const char* from = (term == rank ? own_term : slots + term * pitch) + i * 16;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) packets[u] = load_packet(from + u * kThreads * 16);
  }
};

// Terms of a sum in one array, `stride` elements apart, at any alignment and of any length.
template <class T>
struct ArrayTerms {
  const T* data;
  int64_t stride;
  int64_t elements;
  int terms;

  __device__ int count() const { return terms; }
  template <int kUnroll>
  __device__ __forceinline__ void load(int term, Packet (&packets)[kUnroll], int64_t i) const {
    PacketArray<T>(data + term * stride, elements).load(packets, i);
  }
};

// Computes packets i, i + kThreads, ... of the sum. `first_element`: index of the first element of packet 0, for the
// bias.
template <class T, int kUnroll, class Terms>
__device__ __forceinline__ void sum(const Terms& terms, const Bias& bias, int64_t first_element, int64_t i,
                                    Packet (&result)[kUnroll]) {
  constexpr int kElements = kPacketElements<T>;
  float total[kUnroll][kElements];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) total[u][k] = -0.0f;  // -0 + x is x for every x, also for -0
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
    add_bias<T>(bias, total[u], first_element + (i + u * kThreads) * kElements);
    result[u] = pack<T>(total[u]);
  }
}

// Packets that a thread sums at once, so that about eight loads are in flight.
template <int kWorld>
constexpr int kSumUnroll = kWorld == 0 || kWorld == 2 ? 4
                           : kWorld == 4              ? 2
                                                      : 1;

}  // namespace fused_tp::cuda

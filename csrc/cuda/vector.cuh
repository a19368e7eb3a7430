// PacketArray: an array read and written in packets, at any alignment and of any length. Also the distribution of
// packets over blocks and threads, and copies between arrays and slots.
#pragma once

#include <type_traits>

#include "memory.cuh"
#include "plan.h"
#include "signals.cuh"

namespace fused_tp::cuda {

// The part [begin, end) of a range of packets, rows or bytes that one block handles.
struct Share {
  int64_t begin, end;
};

// Returns this block's share of `count` items, with `per_block` per block. It is the same on all ranks.
__device__ __forceinline__ Share block_share(int64_t count, int64_t per_block) {
  const int64_t begin = blockIdx.x * per_block;
  return {begin < count ? begin : count, begin + per_block < count ? begin + per_block : count};
}

__host__ __device__ __forceinline__ bool is_aligned(const void* address, int64_t to) {
  return reinterpret_cast<uintptr_t>(address) % to == 0;
}

template <int kBytes>
using UnsignedBits = std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;

// Loads the first `valid_elements` elements of a packet separately; the others are 0.
template <int kBytes>
__device__ __forceinline__ Packet load_elements(const void* from, int64_t valid_elements) {
  Packet packet = {};
#pragma unroll
  for (int k = 0; k < 16 / kBytes; ++k) {
    const uint32_t bits = k < valid_elements ? static_cast<const UnsignedBits<kBytes>*>(from)[k] : 0;
    packet.words[k * kBytes / 4] |= bits << (k * kBytes % 4 * 8);
  }
  return packet;
}

template <int kBytes>
__device__ __forceinline__ void store_elements(void* to, const Packet& packet, int64_t valid_elements) {
#pragma unroll
  for (int k = 0; k < 16 / kBytes; ++k) {
    const uint32_t bits = packet.words[k * kBytes / 4] >> (k * kBytes % 4 * 8);
    if (k < valid_elements) static_cast<UnsignedBits<kBytes>*>(to)[k] = static_cast<UnsignedBits<kBytes>>(bits);
  }
}

// An array of `count` elements as packets 0, 1, ...; the last packet may be incomplete.
template <class T>
struct PacketArray {
  static constexpr int kElements = kPacketElements<T>;
  char* data;
  int64_t count;

  __device__ PacketArray(const void* data_, int64_t count_)
      : data(static_cast<char*>(const_cast<void*>(data_))), count(count_ > 0 ? count_ : 0) {}
  __device__ int64_t packets() const { return ceil_div(count, kElements); }
  __device__ int64_t bytes() const { return count * static_cast<int64_t>(sizeof(T)); }
  // True if all packets are aligned and complete, so that they can be read in place.
  __device__ bool is_whole() const { return is_aligned(data, 16) && count % kElements == 0; }

  // Load and store packets i, i + kThreads, ...
  template <int kUnroll>
  __device__ __forceinline__ void load(Packet (&packets)[kUnroll], int64_t i) const {
    if (is_aligned(data, 16) && (i + (kUnroll - 1) * kThreads + 1) * kElements <= count) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) packets[u] = load_packet(data + (i + u * kThreads) * 16);
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = i + u * kThreads;
        packets[u] = load_elements<sizeof(T)>(data + at * 16, count - at * kElements);
      }
    }
  }

  template <int kUnroll>
  __device__ __forceinline__ void store(const Packet (&packets)[kUnroll], int64_t i) const {
    if (is_aligned(data, 16) && (i + (kUnroll - 1) * kThreads + 1) * kElements <= count) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) store_packet(data + (i + u * kThreads) * 16, packets[u]);
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = i + u * kThreads;
        store_elements<sizeof(T)>(data + at * 16, packets[u], count - at * kElements);
      }
    }
  }
};

// Stores packets i, i + kThreads, ... of a slot, where all packets are complete and aligned.
template <int kUnroll>
__device__ __forceinline__ void store_slot(char* slot, const Packet (&packets)[kUnroll], int64_t i) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) store_packet(slot + (i + u * kThreads) * 16, packets[u]);
}

// Both call body(count, i) for `count` packets of this thread at once: i, i + kThreads, ... `count` is a
// std::integral_constant, so that the body is unrolled and all its loads can be in flight together. It is kUnroll while
// enough packets remain, then half as many, and so on.
template <int kUnroll, class Body>
__device__ __forceinline__ void for_packets_from(int64_t i, int64_t end, Body&& body) {
  constexpr int kAhead = (kUnroll - 1) * kThreads;
  if (i + kAhead < end) {
    body(std::integral_constant<int, kUnroll>{}, i);
    i += kUnroll * kThreads;
  }
  if constexpr (kUnroll > 1) for_packets_from<kUnroll / 2>(i, end, body);
}

template <int kUnroll, class Body>
__device__ __forceinline__ void for_packets(Share share, Body&& body) {
  int64_t i = share.begin + threadIdx.x;
#pragma unroll 1
  for (; i + (kUnroll - 1) * kThreads < share.end; i += kUnroll * kThreads) {
    body(std::integral_constant<int, kUnroll>{}, i);
  }
  if constexpr (kUnroll > 1) for_packets_from<kUnroll / 2>(i, share.end, body);
}

// Number of packets that a thread loads before it stores them.
constexpr int kCopyUnroll = 8;

// Copy packets [share.begin, share.end) of an array to a slot, or from a slot.
template <int kUnroll, class T>
__device__ __forceinline__ void copy_to_slot(char* slot, const PacketArray<T>& array, Share share) {
  for_packets<kUnroll>(share, [&](auto unroll, int64_t i) {
    Packet packets[decltype(unroll)::value];
    array.load(packets, i);
    store_slot(slot, packets, i);
  });
}

template <int kUnroll, class T>
__device__ __forceinline__ void copy_from_slot(const PacketArray<T>& array, const char* slot, Share share) {
  for_packets<kUnroll>(share, [&](auto unroll, int64_t i) {
    constexpr int kCount = decltype(unroll)::value;
    Packet packets[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) packets[u] = load_packet(slot + (i + u * kThreads) * 16);
    array.store(packets, i);
  });
}

// Addresses of a slot at the same offset on all ranks. [0] is this rank's; [1], [2], ... are those of the following
// ranks modulo W, so that at any time ranks write to different peers. kWorld == 0: any number of ranks.
template <int kWorld>
struct PeerSlots {
  char* at[kWorld];
  __device__ PeerSlots(const Call& call, int64_t offset) {
#pragma unroll
    for (int step = 0; step < kWorld; ++step) {
      const int rank = call.rank() + step;
      at[step] = data_at(call, rank < kWorld ? rank : rank - kWorld) + offset;
    }
  }
  __device__ static constexpr int world() { return kWorld; }
  __device__ char* operator[](int step) const { return at[step]; }
};

template <>
struct PeerSlots<0> {
  const Call& call;
  int64_t offset;
  __device__ PeerSlots(const Call& call_, int64_t offset_) : call(call_), offset(offset_) {}
  __device__ int world() const { return call.world(); }
  __device__ char* operator[](int step) const {
    const int rank = call.rank() + step;
    return data_at(call, rank < call.world() ? rank : rank - call.world()) + offset;
  }
};

// Fills memory with NaN (all bits set is NaN in every floating-point format), so that a result without its input is not
// mistaken for a valid one.
__device__ __forceinline__ void fill_nan(void* to, int64_t bytes) {
  for (int64_t i = threadIdx.x; i < bytes; i += kThreads) static_cast<uint8_t*>(to)[i] = 0xff;
}

// Fills packets [share.begin, share.end) of an array with NaN.
template <class T>
__device__ __forceinline__ void fill_nan(const PacketArray<T>& out, Share share) {
  const int64_t end_byte = share.end * 16 < out.bytes() ? share.end * 16 : out.bytes();
  fill_nan(out.data + share.begin * 16, end_byte - share.begin * 16);
}

}  // namespace fused_tp::cuda

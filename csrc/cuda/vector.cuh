// Arrays of numbers in packets, at any alignment of an element and of any length, and their distribution over blocks
// and threads.
#pragma once

#include <type_traits>

#include "memory.cuh"
#include "plan.h"
#include "signals.cuh"

namespace fused_tp::cuda {

// Indices [first, last).
struct Share {
  int64_t first, last;
};

// This block's share of `count`, with `per_block` per block. A block has the same share on all ranks.
__device__ __forceinline__ Share block_share(int64_t count, int64_t per_block) {
  const int64_t first = blockIdx.x * per_block;
  return {first < count ? first : count, first + per_block < count ? first + per_block : count};
}

__host__ __device__ __forceinline__ bool is_aligned(const void* address, int64_t to) {
  return reinterpret_cast<uintptr_t>(address) % to == 0;
}

template <int kBytes>
using Bits = std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;

// The first `valid` elements of a packet, one by one; the rest is 0.
template <int kBytes>
__device__ __forceinline__ Packet load_elements(const void* from, int64_t valid) {
  Packet packet = {};
#pragma unroll
  for (int k = 0; k < 16 / kBytes; ++k) {
    const uint32_t bits = k < valid ? static_cast<const Bits<kBytes>*>(from)[k] : 0;
    packet.words[k * kBytes / 4] |= bits << (k * kBytes % 4 * 8);
  }
  return packet;
}

template <int kBytes>
__device__ __forceinline__ void store_elements(void* to, const Packet& packet, int64_t valid) {
#pragma unroll
  for (int k = 0; k < 16 / kBytes; ++k) {
    const uint32_t bits = packet.words[k * kBytes / 4] >> (k * kBytes % 4 * 8);
    if (k < valid) static_cast<Bits<kBytes>*>(to)[k] = static_cast<Bits<kBytes>>(bits);
  }
}

// `count` numbers, as packets 0, 1, ...; the last one may be incomplete.
template <class T>
struct Vector {
  static constexpr int kElements = kPacketElements<T>;
  char* data;
  int64_t count;

  __device__ Vector(const void* data_, int64_t count_)
      : data(static_cast<char*>(const_cast<void*>(data_))), count(count_ > 0 ? count_ : 0) {}
  __device__ int64_t packets() const { return ceil_div(count, kElements); }
  __device__ int64_t bytes() const { return count * static_cast<int64_t>(sizeof(T)); }
  // True if all packets are aligned and complete, so that they can be read in place.
  __device__ bool is_whole() const { return is_aligned(data, 16) && count % kElements == 0; }

  // Packets i, i + kThreads, ...
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

// Stores packets i, i + kThreads, ... of a slot, which has room for whole ones.
template <int kUnroll>
__device__ __forceinline__ void store_slot(char* slot, const Packet (&packets)[kUnroll], int64_t i) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) store_packet(slot + (i + u * kThreads) * 16, packets[u]);
}

// Calls body(count, i) for `count` packets i, i + kThreads, ... of this thread. `count` is a constant, so all their
// loads can be in flight at once: kUnroll while there are enough, then half of it, and so on.
template <int kUnroll, class Body>
__device__ __forceinline__ void for_packets_from(int64_t i, int64_t last, Body&& body) {
  constexpr int kAhead = (kUnroll - 1) * kThreads;
  if (i + kAhead < last) {
    body(std::integral_constant<int, kUnroll>{}, i);
    i += kUnroll * kThreads;
  }
  if constexpr (kUnroll > 1) for_packets_from<kUnroll / 2>(i, last, body);
}

template <int kUnroll, class Body>
__device__ __forceinline__ void for_packets(Share share, Body&& body) {
  int64_t i = share.first + threadIdx.x;
#pragma unroll 1
  for (; i + (kUnroll - 1) * kThreads < share.last; i += kUnroll * kThreads) {
    body(std::integral_constant<int, kUnroll>{}, i);
  }
  if constexpr (kUnroll > 1) for_packets_from<kUnroll / 2>(i, share.last, body);
}

// Packets that a thread copies at once.
constexpr int kCopyUnroll = 8;

// Copy a share of an array to a slot, and from one.
template <int kUnroll, class T>
__device__ __forceinline__ void copy_to_slot(char* slot, const Vector<T>& array, Share share) {
  for_packets<kUnroll>(share, [&](auto unroll, int64_t i) {
    Packet packets[decltype(unroll)::value];
    array.load(packets, i);
    store_slot(slot, packets, i);
  });
}

template <int kUnroll, class T>
__device__ __forceinline__ void copy_from_slot(const Vector<T>& array, const char* slot, Share share) {
  for_packets<kUnroll>(share, [&](auto unroll, int64_t i) {
    constexpr int kCount = decltype(unroll)::value;
    Packet packets[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) packets[u] = load_packet(slot + (i + u * kThreads) * 16);
    array.store(packets, i);
  });
}

// Addresses of one slot, at the same offset, on all ranks: [1], [2], ... are the ranks after this one, in turn, so that
// ranks write to different peers at any time; [0] is this rank's own. kWorld 0: any number of ranks.
template <int kWorld>
struct Peers {
  char* at[kWorld];
  __device__ Peers(const Call& call, int64_t offset) {
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
struct Peers<0> {
  const Call& call;
  int64_t offset;
  __device__ Peers(const Call& call_, int64_t offset_) : call(call_), offset(offset_) {}
  __device__ int world() const { return call.world(); }
  __device__ char* operator[](int step) const {
    const int rank = call.rank() + step;
    return data_at(call, rank < call.world() ? rank : rank - call.world()) + offset;
  }
};

// Sets all bits, which is NaN in every format: a result whose input did not arrive cannot look valid.
__device__ __forceinline__ void fill_missing(void* to, int64_t bytes) {
  for (int64_t i = threadIdx.x; i < bytes; i += kThreads) static_cast<uint8_t*>(to)[i] = 0xff;
}

// The same for a share of packets.
template <class T>
__device__ __forceinline__ void fill_missing(const Vector<T>& out, Share share) {
  const int64_t last = share.last * 16 < out.bytes() ? share.last * 16 : out.bytes();
  fill_missing(out.data + share.first * 16, last - share.first * 16);
}

}  // namespace fused_tp::cuda

// Copies of bytes by one block, at any alignment. They use the largest unit (1 to 16 bytes) to which both addresses are
// aligned.
#pragma once

#include "vector.cuh"

namespace fused_tp::cuda {

// Returns the largest power of two, up to 16, that divides all addresses. `address_bits`: the addresses combined by OR.
__host__ __device__ inline int common_unit(uint64_t address_bits) {
  for (int unit = 16; unit > 1; unit /= 2) {
    if (address_bits % unit == 0) return unit;
  }
  return 1;
}

template <class Unit>
__device__ __forceinline__ Unit load_unit(const char* from) {
  return *reinterpret_cast<const Unit*>(from);
}
template <>
__device__ __forceinline__ Packet load_unit<Packet>(const char* from) {
  return load_packet(from);
}
template <class Unit>
__device__ __forceinline__ void store_unit(char* to, Unit value) {
  *reinterpret_cast<Unit*>(to) = value;
}
template <>
__device__ __forceinline__ void store_unit<Packet>(char* to, Packet value) {
  store_packet(to, value);
}

template <class Unit>
__device__ __forceinline__ void copy_units(char* to, const char* from, int64_t count) {
  for_packets<sizeof(Unit) == 16 ? kCopyUnroll : 4>({0, count}, [&](auto unroll, int64_t i) {
    constexpr int kUnroll = decltype(unroll)::value;
    constexpr int64_t kBytes = sizeof(Unit);
    Unit units[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) units[u] = load_unit<Unit>(from + (i + u * kThreads) * kBytes);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) store_unit(to + (i + u * kThreads) * kBytes, units[u]);
  });
}

// Not __forceinline__: the call costs little compared with the copy.
__device__ inline void copy_bytes(char* to, const char* from, int64_t bytes) {
  switch (common_unit(reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from))) {
    case 16: {
      const int64_t packets = bytes / 16;
      copy_units<Packet>(to, from, packets);
      copy_units<uint8_t>(to + packets * 16, from + packets * 16, bytes % 16);
      break;
    }
    case 8:
    case 4: {
      const int64_t words = bytes / 4;
      copy_units<uint32_t>(to, from, words);
      copy_units<uint8_t>(to + words * 4, from + words * 4, bytes % 4);
      break;
    }
    case 2: {
      copy_units<uint16_t>(to, from, bytes / 2);
      copy_units<uint8_t>(to + bytes / 2 * 2, from + bytes / 2 * 2, bytes % 2);
      break;
    }
    default:
      copy_units<uint8_t>(to, from, bytes);
  }
}

}  // namespace fused_tp::cuda

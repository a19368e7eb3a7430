// Packet: 16 bytes, the size of one load or store, and conversion between packets and floats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace fused_tp::cuda {

struct alignas(16) Packet {
  uint32_t words[4];
};

template <class T>
constexpr int kPacketElements = 16 / static_cast<int>(sizeof(T));

template <class To, class From>
__device__ __forceinline__ To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// Conversion between one 32-bit word of a packet and floats: one float for T = float, two for 16-bit types.
template <class T>
struct Word;

template <>
struct Word<float> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* to) { to[0] = bits_as<float>(word); }
  static __device__ __forceinline__ uint32_t pack(const float* from) { return bits_as<uint32_t>(from[0]); }
};

template <>
struct Word<__nv_bfloat16> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* to) {
    to[0] = bits_as<float>(word << 16);  // bf16 is the upper half of a float
    to[1] = bits_as<float>(word & 0xffff0000u);
  }
  static __device__ __forceinline__ uint32_t pack(const float* from) {
    return bits_as<uint32_t>(__floats2bfloat162_rn(from[0], from[1]));
  }
};

template <>
struct Word<__half> {
  static __device__ __forceinline__ void unpack(uint32_t word, float* to) {
    const float2 pair = __half22float2(bits_as<__half2>(word));
    to[0] = pair.x;
    to[1] = pair.y;
  }
  static __device__ __forceinline__ uint32_t pack(const float* from) {
    return bits_as<uint32_t>(__floats2half2_rn(from[0], from[1]));
  }
};

template <class T>
__device__ __forceinline__ void unpack(const Packet& packet, float (&to)[kPacketElements<T>]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) Word<T>::unpack(packet.words[word], to + word * kPacketElements<T> / 4);
}

template <class T>
__device__ __forceinline__ Packet pack(const float (&from)[kPacketElements<T>]) {
  Packet packet;
#pragma unroll
  for (int word = 0; word < 4; ++word) packet.words[word] = Word<T>::pack(from + word * kPacketElements<T> / 4);
  return packet;
}

}  // namespace fused_tp::cuda

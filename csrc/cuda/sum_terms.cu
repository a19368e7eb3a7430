// Local sum, without peers: out_i = round(terms_0,i + terms_1,i + ... [+ bias]). `out` may be one of the terms.
#include "launch.cuh"
#include "sum.cuh"

namespace fused_tp::cuda {

template <class T>
__global__ void __launch_bounds__(kThreads, 1) sum_terms_kernel(const T* terms, int term_count, int64_t stride, T* out,
                                                                int64_t count, int64_t per_block, Bias bias) {
  const PacketArray<T> result(out, count);
  const ArrayTerms<T> from{terms, stride, count, term_count};
  for_packets<4>(block_share(result.packets(), per_block), [&](auto unroll, int64_t i) {
    Packet total[decltype(unroll)::value];
    sum<T>(from, bias, 0, i, total);
    result.store(total, i);
  });
}

int32_t launch_sum_terms(const void* terms, int32_t term_count, int64_t stride, void* out, int64_t count, int32_t dtype,
                         Bias bias, void* stream) {
  return for_dtype(dtype, [&](auto type) -> int32_t {
    using T = typename decltype(type)::type;
    constexpr int64_t kBytes = sizeof(T);
    if (count == 0) return cudaSuccess;
    // The kernel does not wait for other ranks, so its blocks need not all be resident at once.
    const int64_t packets = ceil_div(count, kPacketElements<T>);
    const int32_t blocks = suggested_blocks(count * kBytes, 2048);
    return launch(Kernel<sum_terms_kernel<T>>{}, blocks, kThreads, stream, static_cast<const T*>(terms), term_count,
                  stride, static_cast<T*>(out), count, ceil_div(packets, blocks), bias);
  });
}

}  // namespace fused_tp::cuda

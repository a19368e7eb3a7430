// out_i = round(terms_0,i + terms_1,i + ... [+ bias]), of terms in this GPU's memory. out may be one of the terms.
#pragma once

#include "sum.cuh"

namespace fused_tp::cuda {

template <class T>
__global__ void __launch_bounds__(kThreads, 1) sum_terms_kernel(const T* terms, int count_of_terms, int64_t stride,
                                                                T* out, int64_t count, int64_t per_block, Bias bias) {
  const Vector<T> result(out, count);
  const ArrayTerms<T> from{terms, stride, count, count_of_terms};
  for_packets<4>(block_share(result.packets(), per_block), [&](auto unroll, int64_t i) {
    Packet total[decltype(unroll)::value];
    sum<T>(from, bias, 0, i, total);
    result.store(total, i);
  });
}

}  // namespace fused_tp::cuda

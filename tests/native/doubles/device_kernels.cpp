// A library of device kernels that launches nothing: each function writes its arguments to the memory that its result
// would be put in. Compiled with -DABI=... and, for what it says of itself, -DBUILT_FOR=...
#include <initializer_list>

#include "cuda/launchers.h"
using namespace fused_tp::cuda;

namespace {
template <typename T>
int64_t number(T value) {
  return (int64_t)value;
}

int32_t write(void* to, std::initializer_list<int64_t> values) {
  int64_t* word = static_cast<int64_t*>(to);
  for (int64_t value : values) *word++ = value;
  return 0;
}
// The workspace's error record stands for the result where there is no other.
int32_t barrier(const Workspace* w, void* stream) {
  if (stream) return 700;
  return write(w->error, {number(w->addresses), number(w->state), w->half_bytes, w->timeout_ns, number(w->multicast),
                          w->rank, w->world});
}
int32_t all_reduce(const Workspace* w, Algorithm a, const void* in, void* out, int64_t count, int32_t dtype, Bias bias,
                   int32_t blocks, void* stream) {
  return write(out,
               {w->rank, number(a), number(in), count, dtype, number(bias.data), bias.columns, blocks, number(stream)});
}
int32_t reduce_scatter(const Workspace* w, const void* in, void* out, int64_t count, int64_t chunk, int32_t dtype,
                       Bias bias, int32_t blocks, void* stream) {
  return write(out,
               {w->rank, number(in), count, chunk, dtype, number(bias.data), bias.columns, blocks, number(stream)});
}
int32_t all_gather(const Workspace* w, const void* in, void* out, int64_t count, int64_t chunk, int32_t blocks,
                   void* stream) {
  return write(out, {w->rank, number(in), count, chunk, blocks, number(stream)});
}
int32_t all_to_all(const Workspace* w, const void* in, void* out, const AllToAllLayout* l, int32_t blocks,
                   void* stream) {
  return write(out,
               {w->rank, number(in), l->batches, l->rows, l->row_bytes, l->in_part_stride, l->in_batch_stride,
                l->in_row_stride, l->out_part_stride, l->out_batch_stride, l->out_row_stride, blocks, number(stream)});
}
int32_t all_reduce_rms_norm(const Workspace* w, Algorithm a, const void* partial, const RmsNorm* n, int32_t dtype,
                            int32_t blocks, void* stream) {
  return write(n->normed,
               {w->rank, number(a), number(partial), number(n->residual), number(n->weight), number(n->new_residual),
                n->rows, n->columns, number(n->eps * 1e6), dtype, blocks, number(stream)});
}
int32_t sum_terms(const void* terms, int32_t count_of_terms, int64_t stride, void* out, int64_t count, int32_t dtype,
                  Bias bias, void* stream) {
  return write(out,
               {number(terms), count_of_terms, stride, count, dtype, number(bias.data), bias.columns, number(stream)});
}
const char* error_string(int32_t error) { return error == 700 ? "an illegal memory access" : "the launch timed out"; }

const Launchers launchers{
    ABI, barrier, all_reduce, reduce_scatter, all_gather, all_to_all, all_reduce_rms_norm, sum_terms, error_string};
}  // namespace

#ifdef BUILT_FOR
[[gnu::used]] extern const char built_for[] = "fused_tp device kernels: " BUILT_FOR;
#endif

extern "C" const Launchers* fused_tp_launchers() { return &launchers; }

// A library of device kernels that launches nothing: each function writes its arguments, also those in structs, to
// `recorded`. Compiled with -DABI=... and, for the GPUs that it claims to support, -DBUILT_FOR=...
#include "cuda/launchers.h"
using namespace fused_tp::cuda;

extern "C" {
[[gnu::visibility("default")]] int64_t recorded[32];
}

namespace {
int64_t* place = nullptr;

template <typename... T>
void put(T... values) {
  ((*place++ = (int64_t)values), ...);
}

template <typename T>
void list(T value) {
  put(value);
}
void list(const Workspace* w) {
  put(w->addresses, w->state, w->error, w->half_bytes, w->timeout_ns, w->multicast, w->rank, w->world);
}
void list(Bias bias) { put(bias.data, bias.columns); }
void list(const AllToAllLayout* l) {
  put(l->batches, l->rows, l->row_bytes, l->in_part_stride, l->in_batch_stride, l->in_row_stride, l->out_part_stride,
      l->out_batch_stride, l->out_row_stride);
}
void list(const RmsNorm* n) {
  put(n->residual, n->weight, n->normed, n->new_residual, n->rows, n->columns, n->eps * 1e6);
}

template <typename... T>
int32_t record(T... arguments) {
  place = recorded;
  (list(arguments), ...);
  return place[-1] == -1 ? 700 : 0;  // the stream
}
const char* error_string(int32_t) { return "an illegal memory access"; }

const Launchers launchers{ABI, record, record, record, record, record, record, record, error_string, nullptr};
}  // namespace

#ifdef BUILT_FOR
[[gnu::used]] extern const char built_for[] = "fused_tp device kernels: " BUILT_FOR;
#endif

extern "C" [[gnu::visibility("default")]] const Launchers* fused_tp_launchers() { return &launchers; }

#include "matmul/kernels.h"

#include <algorithm>

#include "isa.h"
#include "threads/scratch.h"
#include "threads/thread_pool.h"

namespace fused_tp::matmul {

const Kernels* select_kernels(DType dtype, bool is_packed, const char* isa) {
#if FUSED_TP_X86
  static const Isa default_isa = detect_isa();
  const Isa selected = isa == nullptr || *isa == '\0' ? default_isa : detect_isa(isa);
  if (selected >= Isa::kAvx512) return &kernels_avx512(dtype, is_packed, selected == Isa::kAvx512Bf16);
  if (selected == Isa::kAvx2) return &kernels_avx2(dtype, is_packed);
#else
  (void)dtype, (void)is_packed, (void)isa;
#endif
  return nullptr;
}

void multiply(const Kernels& kernels, const Problem& problem, int64_t w_rows, int64_t task_rows, int threads) {
  const size_t packed_bytes = kernels.packed_bytes(problem);
  char* const packed = packed_bytes == 0 ? nullptr : scratch_memory().reserve(packed_bytes);
  parallel_for(packed == nullptr ? 0 : (problem.rows + kernels.max_rows - 1) / kernels.max_rows, threads,
               [&](int64_t task, int) { kernels.pack(problem, task * kernels.max_rows, packed); });
  if (threads <= 1) {
    kernels.multiply(problem, packed, 0, w_rows);
  } else {
    parallel_for((w_rows + task_rows - 1) / task_rows, threads, [&](int64_t task, int) {
      kernels.multiply(problem, packed, task * task_rows, std::min((task + 1) * task_rows, w_rows));
    });
  }
  scratch_memory().trim();
}

}  // namespace fused_tp::matmul

// Distribution of columns over threads; kernels.h has the arithmetic.
#include "matmul/few_rows.h"

#include <algorithm>
#include <stdexcept>

#include "isa.h"
#include "matmul/kernels.h"
#include "threads/scratch.h"
#include "threads/thread_pool.h"

namespace fused_tp::matmul {
namespace {

constexpr int64_t kTaskColumns = 96;  // a multiple of kColumns of every kernel

const Kernels* select_kernels(DType dtype, const char* isa) {
#if FUSED_TP_X86
  static const Isa default_isa = detect_isa();
  const Isa selected = isa == nullptr || *isa == '\0' ? default_isa : detect_isa(isa);
  if (selected >= Isa::kAvx512) return &kernels_avx512(dtype, selected == Isa::kAvx512Bf16);
  if (selected == Isa::kAvx2) return &kernels_avx2(dtype);
#else
  (void)dtype, (void)isa;
#endif
  return nullptr;
}

}  // namespace

const char* few_rows_isa(DType dtype, const char* isa) {
  const Kernels* const kernels = select_kernels(dtype, isa);
  return kernels == nullptr ? "" : kernels->isa;
}

void few_rows(const FewRowsProblem& problem, int threads, const char* isa) {
  const Kernels* const supported_kernels = select_kernels(problem.dtype, isa);
  if (supported_kernels == nullptr)
    throw std::invalid_argument("few_rows needs AVX2 or AVX-512; call it only if few_rows_isa returns a name");
  const Kernels& kernels = *supported_kernels;
  char* const packed = scratch_memory().reserve(kernels.packed_bytes(problem));
  kernels.pack(problem, packed);
  if (threads <= 1) {
    kernels.multiply(problem, packed, 0, problem.columns);
  } else {
    const int64_t tasks = (problem.columns + kTaskColumns - 1) / kTaskColumns;
    parallel_for(tasks, threads, [&](int64_t task, int) {
      const int64_t begin = task * kTaskColumns;
      kernels.multiply(problem, packed, begin, std::min(begin + kTaskColumns, problem.columns));
    });
  }
  scratch_memory().trim();
}

}  // namespace fused_tp::matmul

#include "matmul/few_rows.h"

#include <stdexcept>

#include "matmul/kernels.h"

namespace fused_tp::matmul {
namespace {

constexpr int64_t kTaskColumns = 96;  // a multiple of kColumns of every kernel

}  // namespace

const char* few_rows_isa(DType dtype, const char* isa) {
  const Kernels* const kernels = select_kernels(dtype, /*is_packed=*/false, isa);
  return kernels == nullptr ? "" : kernels->isa;
}

void few_rows(const Problem& problem, int threads, const char* isa) {
  const Kernels* const kernels = select_kernels(problem.dtype, /*is_packed=*/false, isa);
  if (kernels == nullptr)
    throw std::invalid_argument("few_rows needs AVX2 or AVX-512; call it only if few_rows_isa returns a name");
  multiply(*kernels, problem, problem.columns, kTaskColumns, threads);
}

}  // namespace fused_tp::matmul

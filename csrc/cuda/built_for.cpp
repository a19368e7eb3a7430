// Targets of the library, readable without loading it (backends/cuda/native_kernels.py).
namespace fused_tp::cuda {

[[gnu::used]] extern const char built_for[] = "fused_tp device kernels: " FUSED_TP_BUILT_FOR;

}  // namespace fused_tp::cuda

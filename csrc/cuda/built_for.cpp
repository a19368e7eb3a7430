// The architectures of the library, as text that backends/cuda/native_kernels.py finds in the file without loading it.
namespace fused_tp::cuda {

[[gnu::used]] extern const char built_for[] = "fused_tp device kernels: " FUSED_TP_BUILT_FOR;

}  // namespace fused_tp::cuda

// Choice of the instruction set for the kernels of csrc/shm, csrc/attention and csrc/matmul. Not for files compiled
// with the flags of one.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>

namespace fused_tp {

enum class Isa { kPlain, kAvx2, kAvx512, kAvx512Bf16 };  // each includes those before it

using CpuFeatures = std::set<std::string>;  // as __builtin_cpu_supports names them

// The highest instruction set that a CPU with `features` supports, but none above `asked`. Throws std::invalid_argument
// if `asked` names none.
inline Isa isa_of(const CpuFeatures& features, const std::string& asked) {
  static const struct {
    std::string name;
    CpuFeatures needs;
  } levels[] = {{"plain", {}},
                {"avx2", {"avx2", "f16c", "fma"}},
                {"avx512", {"avx512bw", "avx512dq", "avx512f", "avx512vl"}},
                {"avx512_bf16", {"avx512bf16"}}};
  std::string name = asked;
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (!name.empty() && std::none_of(std::begin(levels), std::end(levels), [&](auto& one) { return one.name == name; }))
    throw std::invalid_argument("FUSED_TP_ISA is '" + asked + "'; set it to plain, avx2, avx512 or avx512_bf16.");
  const auto runs = [&](const CpuFeatures& needs) {
    return std::includes(features.begin(), features.end(), needs.begin(), needs.end());
  };
  size_t best = 0;
  while (levels[best].name != name && best + 1 < std::size(levels) && runs(levels[best + 1].needs)) ++best;
  return static_cast<Isa>(best);
}

// The same for this CPU; if `asked` is empty, FUSED_TP_ISA is used.
inline Isa isa_here(const std::string& asked = "") {
  CpuFeatures features;
#if FUSED_TP_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) features.insert("avx2");
  if (__builtin_cpu_supports("f16c")) features.insert("f16c");
  if (__builtin_cpu_supports("fma")) features.insert("fma");
  if (__builtin_cpu_supports("avx512f")) features.insert("avx512f");
  if (__builtin_cpu_supports("avx512bw")) features.insert("avx512bw");
  if (__builtin_cpu_supports("avx512vl")) features.insert("avx512vl");
  if (__builtin_cpu_supports("avx512dq")) features.insert("avx512dq");
  if (__builtin_cpu_supports("avx512bf16")) features.insert("avx512bf16");
#endif
  const char* environment = std::getenv("FUSED_TP_ISA");
  return isa_of(features, asked.empty() && environment != nullptr ? environment : asked);
}

}  // namespace fused_tp

// Choice of the instruction set for the kernels of csrc/shm, csrc/attention and csrc/matmul. Files that are compiled
// with -mavx2 or -mavx512* must not include this header: its functions run on every CPU.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>

namespace fused_tp {

enum class Isa { kPlain, kAvx2, kAvx512, kAvx512Bf16 };  // ascending: each level includes all lower levels

using CpuFeatures = std::set<std::string>;  // in the spelling of __builtin_cpu_supports

// Returns the highest instruction set that a CPU with `features` supports, but none above `limit` (empty: no limit).
// Throws std::invalid_argument if `limit` is not the name of an instruction set.
inline Isa select_isa(const CpuFeatures& features, const std::string& limit) {
  static const struct {
    std::string name;
    CpuFeatures required;  // in addition to the features of the lower levels
  } levels[] = {{"plain", {}},
                {"avx2", {"avx2", "f16c", "fma"}},
                {"avx512", {"avx512bw", "avx512dq", "avx512f", "avx512vl"}},
                {"avx512_bf16", {"avx512bf16"}}};
  std::string name = limit;
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (!name.empty() &&
      std::none_of(std::begin(levels), std::end(levels), [&](auto& level) { return level.name == name; }))
    throw std::invalid_argument("FUSED_TP_ISA is '" + limit + "'; set it to plain, avx2, avx512 or avx512_bf16.");
  const auto is_supported = [&](const CpuFeatures& required) {
    return std::includes(features.begin(), features.end(), required.begin(), required.end());
  };
  size_t best = 0;
  while (levels[best].name != name && best + 1 < std::size(levels) && is_supported(levels[best + 1].required)) ++best;
  return static_cast<Isa>(best);
}

// Returns the highest instruction set of this CPU, but none above `limit`, or above FUSED_TP_ISA if `limit` is empty.
inline Isa detect_isa(const std::string& limit = "") {
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
  return select_isa(features, limit.empty() && environment != nullptr ? environment : limit);
}

}  // namespace fused_tp

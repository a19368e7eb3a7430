// FUSED_TP_UNROLL before a loop of constant length unrolls it before register allocation, so that arrays of vectors
// that the loop indexes are kept in registers. FUSED_TP_INLINE is for functions that such a loop calls: a call would
// spill these registers.
#pragma once

#define FUSED_TP_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define FUSED_TP_UNROLL _Pragma("unroll")
#else
#define FUSED_TP_UNROLL _Pragma("GCC unroll 16")
#endif

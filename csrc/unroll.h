// FUSED_TP_UNROLL before a loop of constant length unrolls it before register allocation, so that arrays of vectors
// that the loop indexes are kept in registers.
#pragma once

#if defined(__clang__)
#define FUSED_TP_UNROLL _Pragma("unroll")
#else
#define FUSED_TP_UNROLL _Pragma("GCC unroll 16")
#endif

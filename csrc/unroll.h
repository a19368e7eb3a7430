// FUSED_TP_UNROLL before a loop of constant length: the loop is unrolled before the compiler allocates registers.
#pragma once

#if defined(__clang__)
#define FUSED_TP_UNROLL _Pragma("unroll")
#else
#define FUSED_TP_UNROLL _Pragma("GCC unroll 16")
#endif

// FUSED_TP_UNROLL before a loop of constant length: it is gone when the compiler decides what lies in registers.
#pragma once

#if defined(__clang__)
#define FUSED_TP_UNROLL _Pragma("unroll")
#else
#define FUSED_TP_UNROLL _Pragma("GCC unroll 16")
#endif

// Pairs of 16-bit floats in a register.
#pragma once
#include "ptx/base.cuh"

// Of two pairs the larger magnitudes, of bfloat16, or else float16; NaN stays. The instruction for
// magnitudes leaves both signs, xored, which are taken away: two instructions, where those for a
// magnitude and for a maximum would be three.
template <bool Bf16>
__device__ __forceinline__ u32 larger_size(u32 one, u32 other) {
  u32 word;
  if constexpr (Bf16) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(word) : "r"(one), "r"(other));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(word) : "r"(one), "r"(other));
  }
  return word & 0x7FFF7FFF;
}

// INT4 as tensors store it, two a byte and the earlier one in the low bits, to what tensor cores
// multiply; exact for all of -8 to 7.
#pragma once
#include "epilogue/value.cuh"
#include "ptx/base.cuh"

// Bytes of two words, taken in turn.
__device__ __forceinline__ uint2 in_turn(u32 even, u32 odd) {
  return {__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362)};
}

// Eight codes to E4M3 of code * 2^-9. From 0 to 15 * 2^-9, the subnormals and the first binade, a
// byte of E4M3 counts steps of 2^-9: a magnitude of 0 to 8 stands there as it is, its sign before
// it. Nothing carries into the next nibble.
__device__ __forceinline__ uint2 nibbles_to_e4m3(u32 word) {
  constexpr u32 kLow = 0x0F0F0F0F;
  const u32 signs = word & 0x88888888, one = signs >> 3;
  const u32 size = (word ^ one * 15) + one;  // two's complement: all bits turned, and 1
  return in_turn((size & kLow) | (signs << 4 & ~kLow), (size >> 4 & kLow) | (signs & ~kLow));
}

// Eight codes to as many int8 of code * 16: the upper half of a byte, the lower one zero.
__device__ __forceinline__ uint2 nibbles_to_s8(u32 word) {
  constexpr u32 kHigh = 0xF0F0F0F0;
  return in_turn(word << 4 & kHigh, word & kHigh);
}

// Eight codes to four pairs of 16-bit numbers. Behind 128 in bfloat16 and 1024 in float16 the last
// bits count ones; 136 and 1032 are taken off again.
template <Type T>
__device__ __forceinline__ void nibbles_to_pairs(u32 word, u32 (&pairs)[4]) {
  constexpr u32 kOnes = T == Type::bf16 ? 0x43004300 : 0x64006400, kZero = kOnes | 0x00080008;
  const u32 even = word ^ 0x88888888, odd = even >> 4;  // code + 8
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 both = __byte_perm(even, odd, i | (4 + i) << 8) & 0x000F000F | kOnes;
    if constexpr (T == Type::bf16) {
      asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(both), "r"(kZero));
    } else {
      asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pairs[i]) : "r"(both), "r"(kZero));
    }
  }
}

// Both numbers of a pair times a bfloat16, which `scale` holds twice; rounded once.
template <Type T>
__device__ __forceinline__ u32 scaled_pair(u32 pair, u32 scale) {
  if constexpr (T == Type::bf16) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(scale));
    return product;
  }
  // A scale may be too small for float16, and its product with a code not.
  const float wide = __uint_as_float(scale & 0xFFFF0000);
  return pack<T>(unpack<T>(pair) * wide, unpack<T>(pair >> 16) * wide);
}

// INT4 as tensors store it, two a byte and the earlier one in the low bits, to what tensor cores
// multiply; exact for all of -8 to 7.
#pragma once
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

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

// Two codes to a pair of 16-bit numbers: the earlier code, and the later one times kLater. Bytes 0
// and 2 of the word hold both codes. With code + 8 in the lower half behind 128 (bfloat16) or 1024
// (float16), the last bits count ones. In the upper half it is four bits further up: there float16
// counts sixteens, and bfloat16, without anything before it, steps of 2^-129, over its subnormals
// and its first binade. One multiply-add, exact, takes all that off again.
template <Type T>
struct NibblePair {
  static constexpr bool kBf16 = T == Type::bf16;
  static constexpr u32 kMask = 0x00F0000F, kFlip = kBf16 ? 0x00804308 : 0x64806408;
  static constexpr u32 kTimes = kBf16 ? 0x7F003F80 : 0x2C003C00;  // 1, and 2^127 or 1/16
  static constexpr u32 kPlus = kBf16 ? 0xC000C308 : 0xD480E408;   // -136 and -2, or -1032 and -72
  static constexpr u32 kScale = kBf16 ? 0x40803F80 : 0x3F803F80;  // 1, and 1 / kLater; bfloat16
};

// `times` is kTimes, which ptxas would move to a register anew for each pair if it knew it.
template <Type T>
__device__ __forceinline__ u32 nibbles_to_pair(u32 twice, u32 times) {
  using P = NibblePair<T>;
  u32 bits, pair;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(bits) : "r"(twice), "r"(P::kMask), "r"(P::kFlip));
  if constexpr (P::kBf16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(bits), "r"(times), "r"(P::kPlus));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(bits), "r"(times), "r"(P::kPlus));
  }
  return pair;
}

// The scale that pairs of T are multiplied by: that of both codes, from the bfloat16 in the low
// half.
template <Type T>
__device__ __forceinline__ u32 scale_of_pair(u32 scale) {
  u32 both = __byte_perm(scale, 0, 0x1010);
  if constexpr (NibblePair<T>::kBf16) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(both) : "r"(NibblePair<T>::kScale));
  }
  return both;
}

// Both numbers of a pair times a scale that `scale_of_pair` gave; rounded once.
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

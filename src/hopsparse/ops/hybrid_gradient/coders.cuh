// How hybrid_gradient rounds a block, and subtracts from it what it was rounded to: remainder.py,
// bit by bit. A warp has a block of 128 or 512 values: value 128 j + 4 lane + c is v[4 j + c].
#pragma once

#include "epilogue/value.cuh"
#include "ptx/base.cuh"

namespace hybrid_gradient {

enum class Coder { none, int8, int4, int3h, int3, sign };

constexpr u32 kAll = 0xFFFFFFFF;

template <Coder K>
struct Facts {
  static constexpr bool kLong = K == Coder::int8 || K == Coder::sign;
  static constexpr int kBlock = kLong ? 512 : 128;
  static constexpr int kOfLane = kBlock / 32;
  static constexpr int kMost = K == Coder::int8    ? 127
                               : K == Coder::int4  ? 7
                               : K == Coder::int3h ? 5
                               : K == Coder::int3  ? 3
                                                   : 1;
  static constexpr int kCodeBytes = K == Coder::int8    ? 512
                                    : K == Coder::int3h ? 56
                                    : K == Coder::int3  ? 48
                                                        : 64;
};

__device__ __forceinline__ u32 key_of(float value) { return __float_as_uint(value) & 0x7FFFFFFF; }

// The bits of all lanes whose number differs in these bits.
template <class... Bits>
__device__ __forceinline__ u32 joined(u32 word, Bits... bits) {
  ((word |= __shfl_xor_sync(kAll, word, bits)), ...);
  return word;
}

__device__ __forceinline__ float share(float value) { return __fmul_rn(fabsf(value), 0x1p-9f); }

// Halves are added up, as in remainder.py: a sum does not depend on who adds.
__device__ __forceinline__ float mean_magnitude(const float (&v)[16]) {
  float part[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float low = __fadd_rn(share(v[c]), share(v[8 + c]));
    const float high = __fadd_rn(share(v[4 + c]), share(v[12 + c]));
    part[c] = __fadd_rn(low, high);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      part[c] = __fadd_rn(part[c], __shfl_xor_sync(kAll, part[c], step));
    }
  }
  return __fadd_rn(__fadd_rn(part[0], part[2]), __fadd_rn(part[1], part[3]));
}

template <class C, int Count>
__device__ __forceinline__ float scale_of(const float (&v)[Count]) {
  if constexpr (C::kCoder == Coder::sign) return mean_magnitude(v);
  u32 peak = 0;
#pragma unroll
  for (float value : v) peak = max(peak, key_of(value));
  peak = __reduce_max_sync(kAll, peak);
  return __fdiv_rn(__uint_as_float(peak), float(Facts<C::kCoder>::kMost));
}

// Codes of 128 values, of 0 to 15 each: byte c of `mine` is that of value 4 lane + c.
template <Coder K>
__device__ __forceinline__ void store_small(u8* codes, u32 mine, u32 lane) {
  u32* words = reinterpret_cast<u32*>(codes);
  if constexpr (K == Coder::int4) {
    const u32 word = joined(mine << (lane >= 16 ? 4 : 0), 16);
    if (lane < 16) words[lane] = word;
  } else if constexpr (K == Coder::int3) {
    const u32 low = joined((mine & 0x03030303) << 2 * (lane >> 3), 8, 16);
    const u32 high = joined((mine >> 2 & 0x01010101) << (lane >> 2), 4, 8, 16);
    if (lane < 8) words[lane] = low;
    if (lane < 4) words[8 + lane] = high;
  } else {
    // Eleven times the first of each pair, and the second: 120 at most, so that no byte overflows.
    const u32 pairs = mine * 11 + __shfl_xor_sync(kAll, mine, 16);
    const u32 last = __shfl_sync(kAll, pairs, 14 + (lane & 1));
    const u32 word = pairs | (last >> (lane >> 1 & 7) & 0x01010101) << 7;
    if (lane < 14) words[lane] = word;
  }
}

// Writes the codes and the scale of a block, and leaves what was rounded away.
template <class C, int Count>
__device__ __forceinline__ void code(float (&v)[Count], u8* codes, u16* scale_to, u32 lane) {
  constexpr Coder K = C::kCoder;
  constexpr int kMost = Facts<K>::kMost;
  const u32 bits = pack<Type::bf16>(fminf(scale_of<C>(v), C::kLargestScale), 0.0f) & 0xFFFF;
  const float scale = unpack<Type::bf16>(bits);
  const float divisor = scale == 0 ? __int_as_float(0x7F800000) : scale;
  if (lane == 0) *scale_to = static_cast<u16>(bits);
  u32 signs = 0;
#pragma unroll
  for (int j = 0; j < Count / 4; ++j) {
    u32 word = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float& value = v[4 * j + c];
      int number;
      if constexpr (K == Coder::sign) {
        number = value >= 0 ? 1 : -1;
        signs |= u32(value >= 0) << (8 * c + 2 * j + (lane >= 16));
      } else {
        const float nearest = rintf(__fdiv_rn(value, divisor));
        number = int(fminf(fmaxf(nearest, -float(kMost)), float(kMost)));
        word |= u32(K == Coder::int8 ? number & 255 : number + (kMost + 1 - (K == Coder::int3h)))
                << 8 * c;
      }
      value = __fsub_rn(value, __fmul_rn(float(number), scale));
    }
    if constexpr (K == Coder::int8) reinterpret_cast<u32*>(codes)[32 * j + lane] = word;
    if constexpr (!Facts<K>::kLong) store_small<K>(codes, word, lane);
  }
  if constexpr (K == Coder::sign) {
    signs = joined(signs, 16);
    if (lane < 16) reinterpret_cast<u32*>(codes)[lane] = signs;
  }
}

}  // namespace hybrid_gradient

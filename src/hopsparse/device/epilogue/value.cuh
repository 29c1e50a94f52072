// Conversions between float32 and the 16-bit types of tensors, which are carried as bits.
#pragma once
#include "ptx/base.cuh"

enum class Type { bf16, f16, f32, s32, s8, e4m3 };

// Two numbers, the first in the low half.
template <Type T>
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 word;
  if constexpr (T == Type::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// The number in the low half.
template <Type T>
__device__ __forceinline__ float unpack(u32 word) {
  if constexpr (T == Type::bf16) return __int_as_float(word << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(word)));
  return value;
}

template <Type T>
__device__ __forceinline__ float load_value(const void* tensor, long long at) {
  if constexpr (T == Type::f32) {
    return static_cast<const float*>(tensor)[at];
  } else {
    return unpack<T>(static_cast<const u16*>(tensor)[at]);
  }
}

// The nearest of -127 to 127, halves to even; NaN becomes 0.
__device__ __forceinline__ signed char nearest_s8(float value) {
  int code;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(code) : "f"(value));
  return static_cast<signed char>(max(-127, min(127, code)));
}

// Two codes, the first in the low byte; those of E4M3 are 448 at most, and NaN stays NaN.
template <Type T>
__device__ __forceinline__ u32 code_pair(float low, float high) {
  if constexpr (T == Type::s8) {
    return static_cast<u8>(nearest_s8(low)) | static_cast<u8>(nearest_s8(high)) << 8;
  }
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

template <Type T>
__device__ __forceinline__ void store_value(void* tensor, long long at, float value) {
  if constexpr (T == Type::f32) {
    static_cast<float*>(tensor)[at] = value;
  } else if constexpr (T == Type::s8) {
    static_cast<signed char*>(tensor)[at] = nearest_s8(value);
  } else if constexpr (T == Type::e4m3) {
    static_cast<u8*>(tensor)[at] = static_cast<u8>(code_pair<T>(value, 0.0f));
  } else {
    static_cast<u16*>(tensor)[at] = static_cast<u16>(pack<T>(value, 0.0f));
  }
}

// Sums of either type as the bits of a register, and back.
__device__ __forceinline__ u32 bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ u32 bits(int value) { return static_cast<u32>(value); }
template <class Number>
__device__ __forceinline__ Number number(u32 word);
template <>
__device__ __forceinline__ float number<float>(u32 word) {
  return __uint_as_float(word);
}
template <>
__device__ __forceinline__ int number<int>(u32 word) {
  return static_cast<int>(word);
}

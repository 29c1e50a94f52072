// Conversions between float32 and the 16-bit types of tensors, which are carried as bits.
#pragma once
#include "ptx/base.cuh"

enum class Type { bf16, f16, f32 };

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

template <Type T>
__device__ __forceinline__ void store_value(void* tensor, long long at, float value) {
  if constexpr (T == Type::f32) {
    static_cast<float*>(tensor)[at] = value;
  } else {
    static_cast<u16*>(tensor)[at] = static_cast<u16>(pack<T>(value, 0.0f));
  }
}

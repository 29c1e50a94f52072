// Loads and stores of shared memory whose offsets are immediates: no address arithmetic in loops.
#pragma once
#include "ptx/base.cuh"

template <int Offset>
__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1 + %2];" : "=r"(word) : "r"(address), "n"(Offset) : "memory");
  return word;
}

__device__ __forceinline__ u32 load_shared_u16(u32 address) {
  u16 half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return half;
}

__device__ __forceinline__ uint2 load_shared_x2(u32 address) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}

__device__ __forceinline__ uint4 load_shared_x4(u32 address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

__device__ __forceinline__ void store_shared_u32(u32 address, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared_u8(u32 address, u32 byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(byte) : "memory");
}

__device__ __forceinline__ void store_shared_x4(u32 address, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words.x),
               "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit values, each written transposed: lane i holds row i / 4 and columns
// 2 (i % 4), + 1 of every matrix, and the address of stored row i % 8 of matrix i / 8.
template <int Offset>
__device__ __forceinline__ void store_transposed_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0 + %5], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d), "n"(Offset)
      : "memory");
}

// The way back.
__device__ __forceinline__ void load_transposed_x4(u32* words, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

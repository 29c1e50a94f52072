// Loads from device memory.
#pragma once
#include "ptx/base.cuh"

struct alignas(16) Piece {
  u32 word[4];
};

// 16 bytes that are read once, or zeros. Not a branch, so that all loads of a thread start at once;
// the line is asked for whole, as its other half comes next.
__device__ __forceinline__ Piece load_if(bool inside, const u8* from) {
  Piece p;
  asm("{.reg .pred inside;\n"
      "setp.ne.u32 inside, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@inside ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(p.word[0]), "=&r"(p.word[1]), "=&r"(p.word[2]), "=&r"(p.word[3])
      : "l"(from), "r"(u32(inside)));
  return p;
}

// The same where it stands: loads of data that is used much later start before what follows them.
__device__ __forceinline__ Piece load_here_if(bool inside, const u8* from) {
  Piece p;
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@inside ld.global.nc.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(p.word[0]), "=&r"(p.word[1]), "=&r"(p.word[2]), "=&r"(p.word[3])
      : "l"(from), "r"(u32(inside)));
  return p;
}

// A word, or another where it is not to be read. Not a branch, and it stands where it is written.
__device__ __forceinline__ u32 load_word_if(bool inside, const void* from, u32 otherwise) {
  u32 word;
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %2, 0;\n"
      "mov.b32 %0, %3;\n"
      "@inside ld.global.b32 %0, [%1];}"
      : "=&r"(word)
      : "l"(from), "r"(u32(inside)), "r"(otherwise)
      : "memory");
  return word;
}

// The same into registers that keep what they have where it is not inside: a zero for each would be
// an instruction more.
__device__ __forceinline__ void reload_here_if(Piece& p, bool inside, const u8* from) {
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %5, 0;\n"
      "@inside ld.global.nc.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(p.word[0]), "+r"(p.word[1]), "+r"(p.word[2]), "+r"(p.word[3])
      : "l"(from), "r"(u32(inside)));
}

struct alignas(8) HalfPiece {
  u32 word[2];
};

// 8 bytes that are read once.
__device__ __forceinline__ HalfPiece load_half(const u8* from) {
  HalfPiece p;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];"
      : "=r"(p.word[0]), "=r"(p.word[1])
      : "l"(from));
  return p;
}

// Nothing is read: what others write before it is read is seen.
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
__device__ __forceinline__ void prefetch_l1(const void* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}

// Loads of what the kernel ahead may have written: not by the read-only path, which a kernel that
// starts before the one ahead has ended must not take.
#pragma once
#include "ptx/base.cuh"

// 16 bytes, or zeros; where it stands, so that it comes behind `wait_for_previous`. Not a branch,
// so that all loads of a thread start at once.
__device__ __forceinline__ void load_written(u32 (&words)[4], bool inside, const void* from) {
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@inside ld.global.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(from), "r"(u32(inside)));
}

// The same over what the words hold, which stays where `inside` is false.
__device__ __forceinline__ void load_written_over(u32 (&words)[4], bool inside, const void* from) {
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %5, 0;\n"
      "@inside ld.global.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(from), "r"(u32(inside)));
}

// 8 and 4 bytes of them.
__device__ __forceinline__ void load_written(u32 (&words)[2], bool inside, const void* from) {
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %3, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@inside ld.global.L2::128B.v2.b32 {%0, %1}, [%2];}"
      : "=&r"(words[0]), "=&r"(words[1])
      : "l"(from), "r"(u32(inside)));
}
__device__ __forceinline__ void load_written(u32 (&words)[1], bool inside, const void* from) {
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@inside ld.global.L2::128B.b32 %0, [%1];}"
      : "=&r"(words[0])
      : "l"(from), "r"(u32(inside)));
}

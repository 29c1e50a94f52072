// Memory of other GPUs that this one reads: flags that order it, and loads that no cache answers.
#pragma once
#include "ptx/base.cuh"

// Sets a flag, perhaps on another GPU, behind all that this thread has done and seen.
__device__ __forceinline__ void signal_peer(u32* flag, u32 turn) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(flag), "r"(turn) : "memory");
}

// Waits until a flag of this GPU has come to `turn`; what its writer had done is seen from here on.
// Turns may wrap. A peer that does not come ends in a launch error, not in a hang.
__device__ __forceinline__ void wait_peer(const u32* flag, u32 turn, u32 patience_ms) {
  asm volatile(
      "{.reg .pred there, look, late;\n"
      ".reg .u32 seen, spin, low;\n"
      ".reg .u64 since, now, most;\n"
      "mov.u32 spin, 0;\n"
      "mul.wide.u32 most, %2, 1000000;\n"
      "mov.u64 since, %%globaltimer;\n"
      "again:\n"
      "ld.acquire.sys.global.b32 seen, [%0];\n"
      "sub.u32 seen, seen, %1;\n"
      "setp.ge.s32 there, seen, 0;\n"
      "@there bra ready;\n"
      "add.u32 spin, spin, 1;\n"
      "and.b32 low, spin, 1023;\n"
      "setp.ne.u32 look, low, 0;\n"
      "@look bra again;\n"
      "mov.u64 now, %%globaltimer;\n"
      "sub.u64 now, now, since;\n"
      "setp.gt.u64 late, now, most;\n"
      "@late trap;\n"
      "bra again;\n"
      "ready:}" ::"l"(flag),
      "r"(turn), "r"(patience_ms)
      : "memory");
}

// A word of this GPU that an earlier kernel wrote.
__device__ __forceinline__ u32 load_turn(const u32* from) {
  u32 word;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// 16 bytes of any GPU, or zeros; behind `wait_peer` where it stands. Not a branch, so that all
// loads of a thread start at once.
__device__ __forceinline__ void load_peer(u32 (&words)[4], bool inside, const void* from) {
  asm volatile(
      "{.reg .pred inside;\n"
      "setp.ne.u32 inside, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@inside ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
      : "l"(from), "r"(u32(inside))
      : "memory");
}

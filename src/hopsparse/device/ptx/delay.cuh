// A pause of a warp before it waits or starts a copy, in kernels that are verified under delays
// (compiler/delays.py puts the calls in, and DELAY_SEED); no other kernel has this text.
//
// One of four pauses is long, up to 8191 cycles or about 4 us: a warp that is late by more than a
// ring of stages takes shows who does not wait for it. Which one depends on the seed, the block,
// the warp and what is waited for, and on nothing else: a run can be made again.
#pragma once

__device__ __forceinline__ void delay(unsigned int what) {
  unsigned int mixed = DELAY_SEED ^ what * 0x9E3779B9u ^ threadIdx.x / 32 * 0xC2B2AE35u ^
                       (blockIdx.x + 977 * blockIdx.y + 7919 * blockIdx.z) * 0x85EBCA6Bu;
  mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6Du;
  mixed = (mixed ^ mixed >> 12) * 0x297A2D39u;
  const unsigned int cycles = mixed >> 8 & ((mixed >> 30) == 0 ? 8191 : 63);
  // In PTX for the reason that mbarrier_wait is.
  asm volatile(
      "{.reg .pred more;\n"
      ".reg .u32 begin, now;\n"
      "mov.u32 begin, %%clock;\n"
      "again:\n"
      "mov.u32 now, %%clock;\n"
      "sub.u32 now, now, begin;\n"
      "setp.lt.u32 more, now, %0;\n"
      "@more bra again;}" ::"r"(cycles)
      : "memory");
}

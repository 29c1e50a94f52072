// Two warpgroups that take turns: one multiplies while the other stores.
#pragma once
#include "pipe/ring.cuh"
#include "ptx/base.cuh"

constexpr int kTurnThreads = 256;
constexpr u32 kFirstTurnBarrier = 3;  // of the named barriers; those before are of the epilogue

// Wait until the other one gave its turn away.
__device__ __forceinline__ void wait_for_turn(u32 wg) {
  named_barrier<kTurnThreads>(kFirstTurnBarrier + wg);
}

// Nothing waits here: the other one does.
__device__ __forceinline__ void give_turn_to(u32 wg) {
  asm volatile("bar.arrive %0, %1;" ::"r"(kFirstTurnBarrier + wg), "n"(kTurnThreads) : "memory");
}

// Where a ring is when `count` more stages have passed.
template <int Stages>
__device__ __forceinline__ void pass_over(Ring<Stages>& ring, u32 count) {
  const u32 at = ring.stage + count;
  ring.stage = at % Stages;
  ring.parity ^= at / Stages & 1;
}

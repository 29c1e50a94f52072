// Warpgroups that take the stages of a ring in turn: one works at a stage while the next one waits
// for its own, and what each has is added up at the end.
#pragma once
#include "pipe/ring.cuh"
#include "ptx/base.cuh"

// To the stage that is this warpgroup's turn again.
template <u32 Ways, int Stages>
__device__ __forceinline__ void advance(Ring<Stages>& ring) {
  static_assert(Ways < Stages, "a warpgroup that waits for a stage has one that is not free yet");
  ring.stage += Ways;
  if (ring.stage >= Stages) {
    ring.stage -= Stages;
    ring.parity ^= 1;
  }
}

// The stage of its turn before.
template <u32 Ways, int Stages>
__device__ __forceinline__ u32 previous(const Ring<Stages>& ring) {
  return ring.stage < Ways ? ring.stage + (Stages - Ways) : ring.stage - Ways;
}

// For those who wait at it, without waiting: what was stored before is there for them.
template <int Threads>
__device__ __forceinline__ void arrive_at_barrier(u32 id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

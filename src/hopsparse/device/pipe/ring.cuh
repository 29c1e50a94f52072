// A ring of stages: which one is next, and the parity its barriers have by then.
#pragma once
#include "ptx/base.cuh"

template <int Stages>
struct Ring {
  u32 stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // The stage before this one, which is where `advance` came from.
  __device__ __forceinline__ u32 previous() const { return stage == 0 ? Stages - 1 : stage - 1; }
};

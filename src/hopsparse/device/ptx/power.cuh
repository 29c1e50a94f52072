// Powers of two by the special function unit.
#pragma once
#include "ptx/base.cuh"

// 2^x, off by two units in the last place; 0 for -infinity, and below the normal range.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

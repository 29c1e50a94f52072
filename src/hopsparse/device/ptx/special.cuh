// Functions that a unit of the SM has, a few units in the last place off.
#pragma once

// 2^x; 0 below 2^-126, and NaN of NaN.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

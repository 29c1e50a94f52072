// Division by a number that the host knew.
#pragma once
#include "ptx/base.cuh"

// n / size for n below 2^31; plan/division.py makes the factor.
struct Divisor {
  u32 size, factor, shift;
  __device__ __forceinline__ u32 operator()(u32 n) const { return u64(n) * factor >> shift; }
};

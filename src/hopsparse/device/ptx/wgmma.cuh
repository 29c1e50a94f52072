// What every wgmma kernel shares; the instructions themselves are generated for one shape each by
// compiler/wgmma.py, because their operands are as many as their accumulators.
#pragma once
#include "ptx/base.cuh"

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int InFlight>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(InFlight) : "memory");
}

// Shared-memory operand. Without swizzle: lbo = bytes to the next core matrix (8 rows x 16 bytes)
// along k, sbo = bytes to the next 8 rows.
__device__ __forceinline__ u64 core_matrix_descriptor(u32 address, u32 lbo, u32 sbo) {
  return u64((address & 0x3FFFF) >> 4) | u64(lbo >> 4) << 16 | u64(sbo >> 4) << 32;
}

// Rows of 128 bytes, 128-byte swizzle, k along the row: 8 rows are 1024 bytes.
__device__ __forceinline__ u64 swizzled_descriptor(u32 address) {
  return u64((address & 0x3FFFF) >> 4) | u64(1024 >> 4) << 32 | u64(1) << 62;
}

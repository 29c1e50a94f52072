// The copy engine on bytes that lie side by side: no tensor map.
#pragma once
#include "ptx/base.cuh"

// `bytes`, a multiple of 16, from an address on 16 bytes to one of this block on 16 bytes; they
// count as bytes of the barrier.
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}

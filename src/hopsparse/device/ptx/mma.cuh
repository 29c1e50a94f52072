// Products of a warp on tensor cores: sum [16, 8] += a [16, 16] b [16, 8], in float32.
//
// With lane = 4 g + t: a[0], a[1] hold rows g and g + 8 of columns 2 t, + 1, and a[2], a[3] those
// of columns 2 t + 8, + 9; b0 holds rows 2 t, + 1 of column g, b1 rows 2 t + 8, + 9; sum[0], sum[1]
// row g of columns 2 t, + 1, sum[2], sum[3] row g + 8. The lower number lies in the low half of a
// word.
#pragma once
#include "ptx/base.cuh"

__device__ __forceinline__ void mma_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

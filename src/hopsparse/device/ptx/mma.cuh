// The tensor cores by one warp: mma.sync, and its operands from shared memory.
#pragma once
#include "ptx/base.cuh"

// Four 8 x 8 matrices of 16-bit values: lane i has columns 2 (i % 4), + 1 of row i / 4 of each, and
// gives the address of row i % 8 of matrix i / 8. Rows of x are columns of the operand B.
__device__ __forceinline__ void load_matrix_x4(u32 (&words)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// sum += a @ b for 16 rows, 8 columns and 16 of k; of bfloat16, or else float16.
template <bool Bf16>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  if constexpr (Bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

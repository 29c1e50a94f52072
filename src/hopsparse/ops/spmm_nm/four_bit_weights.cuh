// Kept values of 4 bits: a consumer widens them on their way from shared memory into the registers
// that wgmma takes its operand from. Needs Args, Smem and row_of_panel of kernel.cuh, which
// includes it where they are known.
//
// Values and index words lie as an 8-bit weight has them, values two a byte. A step of it, 64 rows
// x 64 columns, is one instruction in 8 bits and two in 16.
#pragma once

namespace spmm_nm {

// Scales of the columns of one stage, for this thread's two rows of each panel: bfloat16, twice in
// a word. In 16 bits they are multiplied into the weight; sums of 8-bit codes are, stage by stage.
template <class C>
struct FourBitScales {
  static constexpr int kColumns = C::kWords == 2 ? 128 : C::kFine ? 32 : 64;  // that share one
  static constexpr int kCount = C::kUnits * C::kWords * 64 / kColumns;
  static constexpr int kAhead = 1024;  // columns; a sector of scales serves as many, or more
  u32 of[C::kPanels][2][kCount];

  __device__ __forceinline__ void load(const Args& args, int panel0, int unit) {
    const u16* scales = static_cast<const u16*>(args.w_scale);
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (panel0 + p) * 64 + row_of_panel(half);
        const u16* at = scales + (long long)row * args.w_groups;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int group = (unit * C::kWords * 64 + i * kColumns) >> args.w_shift;
          const bool exists = row < args.out && group < args.w_groups;
          const u32 scale = exists ? at[group] : 0;
          of[p][half][i] = scale | scale << 16;
        }
        // One lane of the four that read a row asks for what is read some stages later.
        const int later = (unit * C::kWords * 64 + kAhead) >> args.w_shift;
        if (threadIdx.x % 4 == half && row < args.out && later < args.w_groups) {
          prefetch_l1(at + later);
        }
      }
    }
  }
};

// Of 128 words, that of this thread; where 4 bits become 16, the first of two. A word of 16 bits,
// four windows of two rows, is half of each of two words of 8 bits, eight windows of a row.
template <class C>
__device__ __forceinline__ u32 index_word() {
  return threadIdx.x % 128 & (C::kFourW && C::kWords == 1 ? ~1u : ~0u);
}

template <class C>
__device__ __forceinline__ u32 four_bit_indices(u32 word) {
  if constexpr (C::kWords == 2) return load_shared<0>(word);
  const uint2 rows = load_shared_x2(word);
  return __byte_perm(rows.x, rows.y, threadIdx.x % 2 ? 0x7632 : 0x5410);
}

// The operand of this thread for one step, 1024 bytes from `step` on. In 8 bits that is one
// instruction, `number` of the two of a unit; `sum_promoted` has the scales.
template <class C>
__device__ __forceinline__ void widen_codes(u32 (&a)[8], int number, u32 step) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  // 16 values of a row are 8 bytes; this thread has 4 of them, and 4 of the row 8 further on.
  const u32 at = step + warp * 256 + lane / 4 * 8 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 rows = load_shared_u16(at + i * 64) | load_shared_u16(at + i * 64 + 128) << 16;
    const uint2 wide = C::kWiden == Type::e4m3 ? nibbles_to_e4m3(rows) : nibbles_to_s8(rows);
    a[number * 4 + 2 * i] = wide.x, a[number * 4 + 2 * i + 1] = wide.y;
  }
}

// In 16 bits it is two instructions, of 32 columns each, and all of a unit.
template <class C>
__device__ __forceinline__ void widen_and_scale(u32 (&a)[8], u32 step, const u32* row_scales,
                                                const u32* below_scales) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, pair = lane % 4;
  const u32 at = step + warp * 256 + lane / 4 * 8;
  const u32 mine = pair | (4 + pair) << 4;  // bytes of values 2 pair, 8 + 2 pair, and the next
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint2 row = load_shared_x2(at + i * 64), below = load_shared_x2(at + i * 64 + 128);
    const u32 first = __byte_perm(row.x, row.y, mine), second = __byte_perm(below.x, below.y, mine);
    const u32 r = row_scales[C::kFine ? i : 0], b = below_scales[C::kFine ? i : 0];
    u32 pairs[4];
    nibbles_to_pairs<C::kWiden>(__byte_perm(first, second, 0x5410), pairs);
    a[4 * i] = scaled_pair<C::kWiden>(pairs[0], r);
    a[4 * i + 1] = scaled_pair<C::kWiden>(pairs[2], b);
    a[4 * i + 2] = scaled_pair<C::kWiden>(pairs[1], r);
    a[4 * i + 3] = scaled_pair<C::kWiden>(pairs[3], b);
  }
}

// Step `i` of a stage.
template <class C>
__device__ __forceinline__ void widen_step(u32 (&a)[8], int i, u32 step,
                                           const u32 (&scales)[2][FourBitScales<C>::kCount]) {
  if constexpr (C::kWords == 2) {
    widen_codes<C>(a, i % 2, step);
  } else {
    const int first = C::kFine ? 2 * i : i;
    widen_and_scale<C>(a, step, &scales[0][first], &scales[1][first]);
  }
}

}  // namespace spmm_nm

// Kept values of 4 bits: a consumer widens them on their way from shared memory into the registers
// that wgmma takes its operand from. Needs Args, Smem and row_of_panel of kernel.cuh, which
// includes it where they are known.
//
// Values and index words lie as an 8-bit weight has them, values two a byte. A step of it, 64 rows
// x 64 columns, is one instruction in 8 bits and two in 16.
#pragma once

namespace spmm_nm {

// Where the scales of this thread's two rows of each panel start, and those of one of them, which
// the thread asks for ahead: of the four lanes that read a row two do. Rows past the last, which
// nobody stores, take the scales of the last.
template <class C>
struct FourBitRows {
  const u16 *of[C::kPanels][2], *ahead[C::kPanels];
  u32 times;  // for nibbles_to_pair

  __device__ __forceinline__ FourBitRows(const Args& args, int panel0) {
    if constexpr (!C::kFourW) return;
    // No token count is negative, which ptxas does not know: it keeps this one in a register.
    times = NibblePair<C::kWiden>::kTimes | u32(args.tokens) >> 31;
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min((panel0 + p) * 64 + row_of_panel(half), args.out - 1);
        of[p][half] = static_cast<const u16*>(args.w_scale) + (long long)row * args.w_groups;
      }
      ahead[p] = threadIdx.x % 2 ? of[p][1] : of[p][0];
    }
  }
};

// Scales of the columns of one stage, for this thread's two rows of each panel: bfloat16, in the
// low half of a word as they were loaded, so that nothing waits for them before they are used. In
// 16 bits they are multiplied into the weight; sums of 8-bit codes are, stage by stage.
template <class C>
struct FourBitScales {
  static constexpr int kColumns = C::kWords == 2 ? 128 : C::kFine ? 32 : 64;  // that share one
  static constexpr int kCount = C::kUnits * C::kWords * 64 / kColumns;
  static constexpr int kAhead = 1024;  // columns; a sector of scales serves as many, or more
  u32 of[C::kPanels][2][kCount], times;

  __device__ __forceinline__ void load(const Args& args, const FourBitRows<C>& rows, int unit) {
    times = rows.times;
    const int column = unit * C::kWords * 64;
    const int later = min((column + kAhead) >> args.w_shift, args.w_groups - 1);
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int group = (column + i * kColumns) >> args.w_shift;
        const bool exists = group < args.w_groups;
        of[p][0][i] = exists ? rows.of[p][0][group] : 0;
        of[p][1][i] = exists ? rows.of[p][1][group] : 0;
      }
      prefetch_l1(rows.ahead[p] + later);
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

// Kept values of a step that this thread needs, as they lie in shared memory: all are loaded before
// the first is widened. 16 values of a row are 8 bytes.
template <class C>
struct FourBitStep {
  u32 word[C::kWords == 2 ? 2 : 8];

  __device__ __forceinline__ void load(u32 step) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const u32 at = step + warp * 256 + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (C::kWords == 2) {  // 4 values of a row, and 4 of the row 8 further on
        const u32 mine = at + lane % 4 * 2 + i * 64;
        word[i] = load_shared_u16(mine) | load_shared_u16(mine + 128) << 16;
      } else {
        const uint2 row = load_shared_x2(at + i * 64), below = load_shared_x2(at + i * 64 + 128);
        word[4 * i] = row.x, word[4 * i + 1] = row.y;
        word[4 * i + 2] = below.x, word[4 * i + 3] = below.y;
      }
    }
  }

  // The operand of a step's instruction in 8 bits, where `sum_promoted` has the scales.
  __device__ __forceinline__ void widen(u32 (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 wide =
          C::kWiden == Type::e4m3 ? nibbles_to_e4m3(word[i]) : nibbles_to_s8(word[i]);
      a[2 * i] = wide.x, a[2 * i + 1] = wide.y;
    }
  }

  // In 16 bits: of one of its two instructions, with scales by `scale_of_pair`.
  __device__ __forceinline__ void widen(u32 (&a)[4], int half, u32 scale, u32 below,
                                        u32 times) const {
    constexpr Type T = C::kWiden;
    const u32 first = threadIdx.x % 4 * 0x1111, second = first + 0x4444;
    const u32 *row = word + 4 * half, *next = row + 2;
    a[0] = scaled_pair<T>(nibbles_to_pair<T>(__byte_perm(row[0], row[1], first), times), scale);
    a[1] = scaled_pair<T>(nibbles_to_pair<T>(__byte_perm(next[0], next[1], first), times), below);
    a[2] = scaled_pair<T>(nibbles_to_pair<T>(__byte_perm(row[0], row[1], second), times), scale);
    a[3] = scaled_pair<T>(nibbles_to_pair<T>(__byte_perm(next[0], next[1], second), times), below);
  }
};

// One instruction of a unit: the one before it is in flight while its operand is widened.
template <class C, int Panel, int Half>
__device__ __forceinline__ void multiply_half(Operands<C>& in,
                                              const FourBitStep<C> (&steps)[C::kUnits * C::kWords],
                                              const FourBitScales<C>& scales, int unit, u64 b) {
  u32(&a)[4] = in.a[Panel][2 * unit + Half];
  if constexpr (C::kWords == 2) {
    steps[2 * unit + Half].widen(a);
  } else {
    constexpr Type T = C::kWiden;
    const int group = C::kFine ? 2 * unit + Half : unit;
    steps[unit].widen(a, Half, scale_of_pair<T>(scales.of[Panel][0][group]),
                      scale_of_pair<T>(scales.of[Panel][1][group]), scales.times);
  }
  wgmma_fence();
  const u32 e = in.e[Panel][unit * C::kWords + (C::kWords == 2 ? Half : 0)];
  C::template multiply<2 * Panel + Half>(a, b + (Half * 64 >> 4), e);
  wgmma_commit();
}

template <class C, int Panel = 0>
__device__ __forceinline__ void multiply_widened(
    Operands<C>& in, const FourBitStep<C> (&steps)[C::kPanels][C::kUnits * C::kWords],
    const FourBitScales<C>& scales, int unit, u64 b) {
  if constexpr (Panel < C::kPanels) {
    multiply_half<C, Panel, 0>(in, steps[Panel], scales, unit, b);
    multiply_half<C, Panel, 1>(in, steps[Panel], scales, unit, b);
    multiply_widened<C, Panel + 1>(in, steps, scales, unit, b);
  }
}

// All instructions of a stage that has arrived; its index words from `meta` on, its values from
// `values` on, its tokens by the descriptor `b`.
template <class C>
__device__ __forceinline__ void issue_widened(Operands<C>& in, u32 meta, u32 values, u64 b,
                                              const FourBitScales<C>& scales) {
  constexpr int kSteps = C::kUnits * C::kWords;
  FourBitStep<C> steps[C::kPanels][kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
      steps[p][i].load(values + (i * Smem<C>::kPanels + p) * Smem<C>::kStep);
      in.e[p][i] = four_bit_indices<C>(meta + (p * kSteps + i) * kWordBytes);
    }
  }
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    multiply_widened<C>(in, steps, scales, u, b + (u * C::kTokens * kTokenBytes >> 4));
  }
}

}  // namespace spmm_nm

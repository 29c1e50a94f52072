// Sums of 8-bit products that leave the tensor cores after every stage. Needs Args, Smem, Sums and
// issue_stage of kernel.cuh, which includes it where they are known.
#pragma once

namespace spmm_nm {

// Scales of the columns of one stage, for this thread's two rows of each panel.
template <class C>
struct GroupScales {
  float of[C::kPanels][2];

  __device__ __forceinline__ void load(const Args& args, int panel0, int group) {
#pragma unroll
    for (int i = 0; i < C::kPanels * 2; ++i) {
      const int row = (panel0 + i / 2) * 64 + row_of_panel(i % 2);
      const bool exists = row < args.out && group < args.w_groups;
      of[i / 2][i % 2] = exists ? args.w_scale[(long long)row * args.w_groups + group] : 0.0f;
    }
  }
};

// A tensor core adds 8-bit floats with about 14 bits below the largest addend. Here that holds for
// the sums within a stage only; stages are added in float32, each times the scale of its columns if
// w has scales by group. Nothing of this warpgroup is in flight meanwhile: the others multiply.
template <class C>
__device__ __forceinline__ void sum_promoted(const Args& args, Sums<C>& d, u32 smem, u32 wg,
                                             Ring<C::kStages>& ring, u32 freed, Origin from,
                                             int first_group) {
#pragma unroll
  for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) d[p][i] = 0;
  }
  GroupScales<C> scale;
#pragma unroll 1
  for (int k = 0; k < args.stages_of_k; ++k) {
    if constexpr (C::kGrouped) scale.load(args, from.panel + wg * C::kPanels, first_group + k);
    zero_panels<C>();
    Words<C> e;
    issue_stage<C>(e, smem, wg, ring);
    wgmma_wait<0>();
    Sums<C> part;
    read_panels<C>(part);
    release<C>(freed, ring.stage);
    ring.advance();
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) {
        d[p][i] += C::kGrouped ? part[p][i] * scale.of[p][i / 2 % 2] : part[p][i];
      }
    }
  }
}

}  // namespace spmm_nm

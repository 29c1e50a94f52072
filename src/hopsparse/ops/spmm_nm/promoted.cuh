// Sums of 8-bit products that leave the tensor cores after every stage. Needs Args, Smem, Sums and
// issue_stage of kernel.cuh, which includes it where they are known.
#pragma once

namespace spmm_nm {

// Scales of the columns of one stage, for this thread's two rows of each panel.
template <class C>
struct GroupScales {
  float of[C::kPanels][2];

  __device__ __forceinline__ void load(const Args& args, int panel0, int stage) {
    const float* scales = static_cast<const float*>(args.w_scale);
#pragma unroll
    for (int i = 0; i < C::kPanels * 2; ++i) {
      const int row = (panel0 + i / 2) * 64 + row_of_panel(i % 2);
      const float* at = scales + (long long)row * args.w_groups + stage;
      of[i / 2][i % 2] = row < args.out && stage < args.w_groups ? *at : 0.0f;
      // One lane of the four that read a row asks for the next sector, 8 stages.
      if (threadIdx.x % 4 == i % 4 && row < args.out && stage + 8 < args.w_groups) {
        prefetch_l1(at + 8);
      }
    }
  }
  __device__ __forceinline__ float at(int panel, int half) const { return of[panel][half]; }
};

template <class C, bool Four = C::kFourW>
struct StageScales : GroupScales<C> {
  __device__ __forceinline__ StageScales(const Args&, int) {}
};
template <class C>
struct StageScales<C, true> : FourBitScales<C> {
  const FourBitRows<C> rows;
  __device__ __forceinline__ StageScales(const Args& args, int panel0) : rows(args, panel0) {}
  __device__ __forceinline__ void load(const Args& args, int, int stage) {
    FourBitScales<C>::load(args, rows, stage);
  }
  __device__ __forceinline__ float at(int panel, int half) const {
    return __uint_as_float(this->of[panel][half][0] << 16);
  }
};

// A tensor core adds 8-bit floats with about 14 bits below the largest addend. Here that holds for
// the sums within a stage only; stages are added in float32, each times the scale of its columns if
// w has scales by group. Nothing of this warpgroup is in flight meanwhile: the others multiply.
template <class C>
__device__ __forceinline__ void sum_promoted(const Args& args, Sums<C>& d, u32 smem, u32 wg,
                                             Ring<C::kStages>& ring, u32 freed, int panel0,
                                             int first_stage) {
#pragma unroll
  for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
    for (int i = 0; i < C::kTokens / 2; ++i) d[p][i] = 0;
  }
  StageScales<C> scale(args, panel0);
  FourBitScales<C> none;  // kept values of 4 bits are scaled with their sums
#pragma unroll 1
  for (int k = 0; k < args.stages_of_k; k += C::kWays) {
    if constexpr (C::kGrouped) scale.load(args, panel0, first_stage + k);
    zero_panels<C>();
    Operands<C> in;
    issue_stage<C>(in, smem, wg, ring, none);
    wgmma_wait<0>();
    typename C::Number part[C::kPanels][C::kTokens / 2];
    read_panels<C>(part);
    release<C>(freed, ring.stage);
    advance<C::kWays>(ring);
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
      for (int i = 0; i < C::kTokens / 2; ++i) {
        const typename C::Total sum = part[p][i];
        d[p][i] += C::kGrouped ? sum * scale.at(p, i / 2 % 2) : sum;
      }
    }
  }
}

}  // namespace spmm_nm

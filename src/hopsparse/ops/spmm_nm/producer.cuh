// The producer: one thread that keeps the stages filled by TMA. Needs Args, Smem, Place and
// origin_of of kernel.cuh, which includes it where they are known.
#pragma once

namespace spmm_nm {

// Bytes that come to a stage, this block's and those that others of its cluster send. What has to
// be widened comes another way.
template <class C>
__device__ __forceinline__ void expect_stage(const Args& args, u32 smem, u32 stage) {
  using S = Smem<C>;
  const u32 x = C::kFourX ? 0 : C::kUnits * C::kClusterOut * args.x_rows * kTokenBytes;
  mbarrier_expect(smem + S::kFullAt + stage * 8, x + S::kValues + S::kMeta);
}

// This block's slice of the tokens that it shares, to all who share them.
template <class C>
__device__ __forceinline__ void fill_tokens(const Args& args, u32 smem, Place<C> at, u32 stage,
                                            int k, Origin from) {
  using S = Smem<C>;
  const u32 bar = smem + S::kFullAt + stage * 8;
  const int unit = (at.part * args.stages_of_k + k) * C::kUnits;
  const u32 x = smem + stage * S::kX + at.out * args.x_rows * kTokenBytes;
  const int token = from.token + at.out * args.x_rows;
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    const u32 to = x + u * C::kTokens * kTokenBytes;
    if constexpr (C::kClusterOut == 1) {
      tma_load(to, args.x, bar, (unit + u) * C::kWords * 64, token);
    } else {
      const u16 mask = ((1 << C::kClusterOut) - 1) << (at.first + at.tokens * C::kClusterOut);
      tma_load_multicast(to, args.x, bar, mask, (unit + u) * C::kWords * 64, token);
    }
  }
}

// Its slice of the kept values, likewise, and its own indices.
template <class C>
__device__ __forceinline__ void fill_weights(const Args& args, u32 smem, Place<C> at, u32 stage,
                                             int k, Origin from) {
  using S = Smem<C>;
  constexpr int kSteps = S::kStepsOfUnit * C::kUnits / C::kClusterTokens;
  const u32 bar = smem + S::kFullAt + stage * 8;
  const int unit = (at.part * args.stages_of_k + k) * C::kUnits;
  const u32 values =
      smem + S::kValuesAt + stage * S::kValues + at.tokens * kSteps * S::kPanels * S::kStep;
  const int step = S::kStepsOfUnit * unit + at.tokens * kSteps;
  if constexpr (C::kClusterTokens == 1) {
    tma_load(values, args.values, bar, 0, from.panel, step);
  } else {
    u16 mask = 0;
    for (int i = 0; i < C::kClusterTokens; ++i) {
      mask |= 1 << (at.first + at.out + i * C::kClusterOut);
    }
    tma_load_multicast(values, args.values, bar, mask, 0, from.panel, step);
  }
  const u32 meta = smem + S::kMetaAt + stage * S::kMeta;
  tma_load(meta, args.meta, bar, 0, unit * C::kWords, from.panel);
}

// Weights depend on no kernel ahead of this one: as many stages of them as the host allows come
// before the wait for it, and find their tokens behind it.
template <class C>
__device__ __forceinline__ int fill_ahead(const Args& args, u32 smem, Place<C> at, int index) {
  const int ahead = min(args.ahead, args.stages_of_k);
  if (C::kExperts || ahead == 0) return 0;  // which weights they are the kernel ahead may say
  const Origin from = origin_of<C>(args, smem, index, at);
#pragma unroll 1
  for (int k = 0; k < ahead; ++k) {
    expect_stage<C>(args, smem, k);
    fill_weights<C>(args, smem, at, k, k, from);
  }
  return ahead;
}

template <class C>
__device__ __forceinline__ void produce(const Args& args, u32 smem, Place<C> at) {
  const int tiles = tiles_in_all<C>(args, smem), step = gridDim.x / kBlocks<C>;
  int index = blockIdx.x / kBlocks<C>;
  int ahead = fill_ahead<C>(args, smem, at, index);
  wait_for_previous();
  Ring<C::kStages> ring;
  ring.parity = 1;  // of the phase before the first: every stage starts empty
  for (; index < tiles; index += step) {
    const Origin from = origin_of<C>(args, smem, index, at);
#pragma unroll 1
    for (int k = 0; k < args.stages_of_k; ++k) {
      if (k >= ahead) {
        mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);
        expect_stage<C>(args, smem, ring.stage);
      }
      fill_tokens<C>(args, smem, at, ring.stage, k, from);
      if (k >= ahead) fill_weights<C>(args, smem, at, ring.stage, k, from);
      ring.advance();
    }
    ahead = 0;
  }
}

}  // namespace spmm_nm

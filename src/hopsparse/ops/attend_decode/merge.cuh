// What warps, and then the blocks of a cluster, have seen becomes the result.
#pragma once
#include "./facts.cuh"
#include "ptx/barrier.cuh"
#include "ptx/power.cuh"

namespace attend_decode {

// Of parts with their own maxima: what one of them counts for beside the largest.
__device__ __forceinline__ float part_of(float top, float base) { return power_of_two(top - base); }

// The result of one entry, of parts that were summed.
template <class C>
__device__ __forceinline__ void store(const Args& a, u32 list, u32 at, float top, float sum,
                                      float out) {
  constexpr float kLn2 = 0.693147181f, kLower = C::kType == Type::f16 ? 0x1p-15f : 1.0f;
  const bool empty = top == -infinity() && sum == 0;
  const u64 row = u64(list) * a.group;
  store_value<C::kType>(a.out, row * C::kDim + at, empty ? 0.0f : out / sum);
  if (at % C::kDim != 0) return;
  // Both terms without what weights are raised by: no digits are lost between them.
  const float lse = (base_of(top) + kRaise<C::kType>)*kLn2 + logf(sum * kLower);
  a.lse[row + at / C::kDim] = empty ? top : lse;
}

// What a warp has seen, for all warps of the block.
template <class C>
__device__ __forceinline__ void show(const Seen<C>& seen, Smem<C>& s) {
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* mine = outputs<C>(s, warp);
#pragma unroll
  for (int half = 0; half < Seen<C>::kHalves; ++half) {
    float sum = seen.sum[half];
    sum += of_lane_xor(sum, 1);
    sum += of_lane_xor(sum, 2);
    const u32 head = half * 8 + lane / 4;
    if (lane % 4 == 0) s.top[warp][head] = seen.top[half], s.sum[warp][head] = sum;
#pragma unroll
    for (int step = 0; step < Seen<C>::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 of = half * 8 + lane % 4 * 2 + i % 2, dim = step * 16 + lane / 4 + i / 2 * 8;
        mine[of * (C::kDim + kOutPad) + dim] = seen.out[step][half][i];
      }
    }
  }
  __syncthreads();
}

// A head of the block: its warps, in their order.
template <class C>
struct OfWarps {
  float top, sum, part[C::kWarps];

  __device__ __forceinline__ OfWarps(const Smem<C>& s, u32 head) : top(-infinity()), sum(0) {
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) top = fmaxf(top, s.top[w][head]);
    const float base = base_of(top);
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      part[w] = part_of(s.top[w][head], base);
      sum += part[w] * s.sum[w][head];
    }
  }
};

struct alignas(16) Quad {
  float of[4];
};

// To a place of block `rank`, counted by its barrier: nothing waits for it here, and no fence of
// all memory is needed, as there is for what others come to read.
template <class C>
__device__ __forceinline__ void send(Smem<C>& s, const float* place, u32 rank, const Quad& quad) {
  store_async_x4(cluster_address(shared_address(place), rank),
                 cluster_address(shared_address(&s.arrived), rank), bits(quad.of[0]),
                 bits(quad.of[1]), bits(quad.of[2]), bits(quad.of[3]));
}

// Merges the warps of the block, and stores the result if that is all of it; else sends each four
// entries to the block that finishes them. Fours go round.
template <class C>
__device__ __forceinline__ void merge_warps(Smem<C>& s, const Args& a, u32 list) {
  const u32 quads = a.group * C::kDim / 4, shift = __popc(a.splits - 1);
  for (u32 quad = threadIdx.x; quad < quads; quad += C::kWarps * 32) {
    const u32 head = quad * 4 / C::kDim;
    const u32 place = head * (C::kDim + kOutPad) + quad * 4 % C::kDim;
    const OfWarps<C> warps(s, head);
    Quad out = {};
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
      const Quad of_warp = *reinterpret_cast<const Quad*>(outputs<C>(s, w) + place);
#pragma unroll
      for (int i = 0; i < 4; ++i) out.of[i] += warps.part[w] * of_warp.of[i];
    }
    if (a.splits > 1) {
      const u32 slot = blockIdx.x * (quads >> shift) + (quad >> shift);
      send<C>(s, s.received + slot * 4, quad & a.splits - 1, out);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store<C>(a, list, quad * 4 + i, warps.top, warps.sum, out.of[i]);
      }
    }
  }
  if (a.splits == 1) return;
  for (u32 at = threadIdx.x; at < (a.group + 1) / 2 << shift; at += C::kWarps * 32) {
    const u32 head = (at >> shift) * 2;
    const OfWarps<C> even(s, head), odd(s, head + 1);
    send<C>(s, s.totals[blockIdx.x][head], at & a.splits - 1,
            {even.top, even.sum, odd.top, odd.sum});
  }
}

// Merges the blocks of the cluster, in their order: the entries that were sent to this one.
template <class C, u32 kSplits>
__device__ __forceinline__ void merge_blocks(const Smem<C>& s, const Args& a, u32 list) {
  const u32 entries = a.group * C::kDim / kSplits;
  for (u32 mine = threadIdx.x; mine < entries; mine += C::kWarps * 32) {
    const u32 at = (mine / 4 * kSplits + blockIdx.x) * 4 + mine % 4, head = at / C::kDim;
    float top = -infinity(), sum = 0, out = 0;
#pragma unroll
    for (u32 rank = 0; rank < kSplits; ++rank) top = fmaxf(top, s.totals[rank][head][0]);
    const float base = base_of(top);
#pragma unroll
    for (u32 rank = 0; rank < kSplits; ++rank) {
      const float part = part_of(s.totals[rank][head][0], base);
      sum += part * s.totals[rank][head][1];
      out += part * s.received[rank * entries + mine];
    }
    store<C>(a, list, at, top, sum, out);
  }
}

}  // namespace attend_decode

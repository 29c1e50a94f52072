// The order of scores: ranks of 32 bits, what is forced at either end of a row, and how chosen
// columns are written, ascending.
#pragma once
#include "ptx/base.cuh"

namespace order {

constexpr u32 kDigits = 256, kPasses = 4;  // of a rank, 8 bits each
constexpr u32 kAbsent = 0, kNan = 0xFFFFFFFF;

// In the order of the scores: 0 for -inf, which is not there; NaN is above all.
__device__ __forceinline__ u32 rank_of(float score) {
  if (score != score) return kNan;
  if (score == -__int_as_float(0x7F800000)) return kAbsent;
  const u32 bits = __float_as_uint(__fadd_rn(score, 0.0f));  // -0 becomes 0
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

// Columns of a row; how many are chosen at most; how many are forced at either end.
struct Bounds {
  u32 n, budget, first, last;
};

__device__ __forceinline__ void set_bounds(Bounds& r, int n, int k, int width, int sink,
                                           int recent) {
  k = max(0, min(k, min(n, width)));
  const int last = min(recent, k);
  r.n = n;
  r.budget = k;
  r.last = last;
  r.first = min(min(sink, k - last), n - last);
}

__device__ __forceinline__ bool forced(const Bounds& r, u32 column) {
  return column < r.first || column >= r.n - r.last;
}

// Ranks of neighbouring columns from `begin` on.
struct Part {
  const u32* ranks;
  u32 begin, count;
};

// Ranks above `last` are chosen, and of those that equal it the first `taken`; the first index goes
// to place `base`.
struct Cut {
  u32 last, base, taken;
};

// Of each warp.
struct Tally {
  u32 above[32], ties[32];
};

// A warp has neighbouring columns: first it counts, then it writes behind all warps before it.
template <u32 Threads>
__device__ __forceinline__ void write_chosen(Tally& tally, const Bounds& r, const Part& part,
                                             const Cut& cut, int* to, u32 width) {
  constexpr u32 kWarps = Threads / 32, kEvery = 0xFFFFFFFF;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, lower = (1u << lane) - 1;
  const u32 step = (part.count + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const u32 begin = min(warp * step, part.count), end = min(begin + step, part.count);
  u32 above = 0, ties = 0;
  for (u32 i = begin + lane; i - lane < end; i += 32) {
    const bool in = i < end, held = in && forced(r, part.begin + i);
    const u32 rank = in ? part.ranks[i] : 0;
    above += __popc(__ballot_sync(kEvery, held || (in && rank > cut.last)));
    ties += __popc(__ballot_sync(kEvery, in && !held && rank == cut.last));
  }
  if (lane == 0) tally.above[warp] = above, tally.ties[warp] = ties;
  __syncthreads();
  u32 place = cut.base, tie = 0;
  for (u32 i = 0; i < warp; ++i) place += tally.above[i], tie += tally.ties[i];
  place += min(tie, cut.taken);
  for (u32 i = begin + lane; i - lane < end; i += 32) {
    const bool in = i < end, held = in && forced(r, part.begin + i);
    const u32 rank = in ? part.ranks[i] : 0;
    const bool same = in && !held && rank == cut.last;
    const u32 same_lanes = __ballot_sync(kEvery, same);
    const bool takes = same && tie + __popc(same_lanes & lower) < cut.taken;
    const u32 lanes = __ballot_sync(kEvery, takes || held || (in && rank > cut.last));
    const u32 at = place + __popc(lanes & lower);
    if ((lanes >> lane & 1) && at < width) to[at] = static_cast<int>(part.begin + i);
    place += __popc(lanes);
    tie += __popc(same_lanes);
  }
}

}  // namespace order

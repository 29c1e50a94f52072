// The order of scores: ranks of 32 bits, what is forced at either end of a row, the search for a
// digit of the last rank that is chosen, and how chosen columns are written, ascending.
#pragma once
#include "ptx/base.cuh"

namespace order {

constexpr u32 kDigits = 256, kPasses = 4;  // of a rank, 8 bits each
constexpr u32 kAbsent = 0, kNan = 0xFFFFFFFF, kEvery = 0xFFFFFFFF;

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

// ---- the search ----------------------------------------------------------------------------

struct alignas(16) Four {
  u32 of[4];
};

struct Found {
  u32 digit, before;  // ranks of larger digits
  bool all;           // of the digit are wanted: what follows need not be looked at
};

// By each warp for itself: the first digit, from the largest down, at which `room` ranks are
// reached. Less room is left where fewer ranks are there, which can be so in the first pass; none
// is left where there are none.
__device__ __forceinline__ Found find_digit(const u32* counts, u32& room) {
  constexpr u32 kEach = kDigits / 32;
  const u32 lane = threadIdx.x % 32, from = kDigits - kEach - lane * kEach;
  u32 own[kEach], count = 0;
#pragma unroll
  for (u32 i = 0; i < kEach; i += 4) {
    const Four four = *reinterpret_cast<const Four*>(counts + from + i);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) own[i + j] = four.of[j], count += four.of[j];
  }
  u32 after = count;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 more = __shfl_up_sync(kEvery, after, step);
    if (lane >= step) after += more;
  }
  room = min(room, __shfl_sync(kEvery, after, 31));
  if (room == 0) return {0, 0, true};
  u32 before = after - count, digit = from + kEach - 1, here = own[kEach - 1];
#pragma unroll
  for (u32 i = kEach - 1; i-- > 0;) {
    if (before + here < room) before += here, here = own[i], --digit;
  }
  // Of the first lane that reaches it: 8 bits of the digit, one, and a number of columns.
  const u32 lanes = __ballot_sync(kEvery, after >= room);
  const u32 told = digit | u32(before + here == room) << 8 | before << 9;
  const u32 word = __shfl_sync(kEvery, told, __ffs(lanes) - 1);
  return {word & 0xFF, word >> 9, (word >> 8 & 1) != 0};
}

// The largest rank that is not chosen, where all ranks are that begin with these digits, or larger
// ones. 0 is no rank of what is there.
__device__ __forceinline__ u32 below_digits(u32 digits, u32 pass) {
  const u32 least = digits << (24 - 8 * pass);
  return least - (least > 0);
}

// ---- writing -------------------------------------------------------------------------------

// Ranks of neighbouring columns from `begin` on; those of forced columns are absent.
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

// A warp has neighbouring columns, fewer than 65,536: first it counts, then it writes behind all
// warps before it.
template <u32 Threads>
__device__ __forceinline__ void write_chosen(Tally& tally, const Part& part, const Cut& cut,
                                             int* to, u32 width) {
  constexpr u32 kWarps = Threads / 32;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, lower = (1u << lane) - 1;
  const u32 step = (part.count + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const u32 begin = min(warp * step, part.count), end = min(begin + step, part.count);
  u32 both = 0;  // of the lane: ranks above, and 65536 times those that are equal
#pragma unroll 4
  for (u32 i = begin + lane; i < end; i += 32) {
    const u32 rank = part.ranks[i];
    both += u32(rank > cut.last) | u32(rank == cut.last) << 16;
  }
  both = __reduce_add_sync(kEvery, both);
  if (lane == 0) tally.above[warp] = both & 0xFFFF, tally.ties[warp] = both >> 16;
  __syncthreads();
  u32 place = cut.base, tie = 0;
  for (u32 i = 0; i < warp; ++i) place += tally.above[i], tie += tally.ties[i];
  place += min(tie, cut.taken);
  const bool with_ties = tie < cut.taken;
#pragma unroll 1
  for (u32 i = begin + lane; i - lane < end; i += 32) {
    const u32 rank = i < end ? part.ranks[i] : 0;
    const bool over = rank > cut.last, same = with_ties && i < end && rank == cut.last;
    if (__ballot_sync(kEvery, over || same) == 0) continue;
    const u32 same_lanes = __ballot_sync(kEvery, same);
    const bool takes = same && tie + __popc(same_lanes & lower) < cut.taken;
    const u32 lanes = __ballot_sync(kEvery, takes || over);
    const u32 at = place + __popc(lanes & lower);
    if ((lanes >> lane & 1) && at < width) to[at] = static_cast<int>(part.begin + i);
    place += __popc(lanes);
    tie += __popc(same_lanes);
  }
}

// Forced columns, which are before and behind all others, of a row of which `count` are chosen; and
// -1 behind them. A thread of `threads` has every so manieth place.
__device__ __forceinline__ void write_ends(const Bounds& r, u32 count, u32 thread, u32 threads,
                                           int* to, u32 width) {
#pragma unroll 1
  for (u32 i = thread; i < r.first; i += threads) to[i] = static_cast<int>(i);
#pragma unroll 1
  for (u32 i = thread; i < r.last; i += threads) {
    to[count - r.last + i] = static_cast<int>(r.n - r.last + i);
  }
#pragma unroll 1
  for (u32 i = count + thread; i < width; i += threads) to[i] = -1;
}

}  // namespace order

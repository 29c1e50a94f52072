// Bounds of scores by the tensor cores, where queries have the 16 bits of keys.
//
// For each dimension max(q low, q high) = q+ high + q- low with q+ = max(q, 0) and q- = min(q, 0):
// one of them is 0, and low <= high. So a bound is a product of [high, low] with [q+, q-], and its
// slack one of max(|low|, |high|) with |q|. All are numbers of 16 bits, whose products are exact;
// the scale comes last. Query heads are the 16 rows of an instruction and blocks of keys its 8
// columns, so that the 16 bytes which a lane loads of a row are its operands of two instructions as
// they lie: entries that the instruction takes for 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of its 16
// are four neighbours here, of keys and of queries alike.
//
// An instruction cuts its terms to 24 bits of the largest, and their sum: reference.py derives what
// that may lose, and the slack.
#pragma once
#include "./newest.cuh"
#include "./rows.cuh"
#include "ptx/halves.cuh"
#include "ptx/mma.cuh"

namespace score_blocks {

// A part is 32 entries of 8 rows, low and high. A lane holds some, and asks for another in its
// place when it has used one, so that a block of threads has 64 KB on their way, or 32 for heads
// of 64.
template <class C>
struct Parts {
  static constexpr u32 kAll = C::kRows, kUnits = C::kDim / 32;  // of a turn, and of a row
  // Tiles of 8 rows that a warp has at once, and those that meet one load of queries: two where
  // registers have room for it.
  static constexpr u32 kTiles = kAll / kUnits, kBeside = C::kDim == 128 ? 2 : 1;
  static constexpr u32 kApart = C::kWarps * 8;   // rows from a warp's tile to its next
  static constexpr u32 kTurn = kApart * kTiles;  // rows that a block of threads has at once
  static_assert(!C::kTensor || (kAll % kUnits == 0 && kApart % Facts<C>::kStep == 0),
                "whole pieces");
};

struct alignas(16) Words {
  u32 of[4];
};

// ---- queries -------------------------------------------------------------------------------

// A lane's operand of two instructions: lane / 4 is the head, and that and 8 more, lane % 4 its
// 8 entries of 32.
template <class C>
struct Queries<C, true> {
  static constexpr u32 kPieces = (Parts<C>::kUnits - 1) / C::kWarps + 1,
                       kTiles = (C::kHeads + 7) / 8;
  u32 piece[kPieces][kTiles][4];
};

template <class C>
__device__ __forceinline__ void load_queries(Queries<C, true>& queries, const Args& a) {
  const u8* q = a.q + (u64(blockIdx.z) * a.kv_heads + blockIdx.y) * a.group * C::kDim * 2;
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (u32 i = 0; i < Queries<C>::kPieces; ++i) {
    const u32 unit = i * C::kWarps + threadIdx.x / 32;
#pragma unroll
    for (u32 tile = 0; tile < Queries<C>::kTiles; ++tile) {
      const u32 head = tile * 8 + lane / 4;
      load_written(queries.piece[i][tile], unit < Parts<C>::kUnits && head < a.group,
                   q + (head * C::kDim + unit * 32 + lane % 4 * 8) * 2);
    }
  }
}

// Where an operand lies: of a unit of 32 entries, the first or the second half, q+ or q-.
template <class C>
__device__ __forceinline__ Words& operand(Smem<C>& s, u32 unit, u32 half, u32 sign) {
  return reinterpret_cast<Words*>(s.q)[((unit * 2 + half) * 2 + sign) * 32 + threadIdx.x % 32];
}

// q+ and q-, zeros where there is no head.
template <class C>
__device__ __forceinline__ void keep_queries(Smem<C>& s, const Args&,
                                             const Queries<C, true>& queries) {
  static_assert(!C::kTensor || sizeof(s.q) == Parts<C>::kUnits * 4 * 32 * sizeof(Words), "fits");
#pragma unroll
  for (u32 i = 0; i < Queries<C>::kPieces; ++i) {
    const u32 unit = i * C::kWarps + threadIdx.x / 32;
    if (unit >= Parts<C>::kUnits) break;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      Words up, down;
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        const bool there = j % 2 < Queries<C>::kTiles;
        const u32 word = there ? queries.piece[i][there ? j % 2 : 0][half * 2 + j / 2] : 0;
        const u32 negative = (word >> 15 & 0x00010001) * 0xFFFF;
        up.of[j] = word & ~negative;
        down.of[j] = word & negative;
      }
      operand<C>(s, unit, half, 0) = up;
      operand<C>(s, unit, half, 1) = down;
    }
  }
}

// ---- rows ----------------------------------------------------------------------------------

// The lane's row of its warp's first tile, and where its entries begin; `own` is the tile's first
// row of this block. The row of another tile is kApart * r.size rows further on.
struct Place {
  u32 row;
  const u8 *low, *high;
};

template <class C>
__device__ __forceinline__ Place place_of(const Args& a, const Rows& r, u32 own) {
  Place place;
  place.row = row_at<C>(r, own + threadIdx.x % 32 / 4);
  const long long row = place.row;
  place.low = r.low + row * a.low_block * 2 + threadIdx.x % 4 * 16;
  place.high = r.high + row * a.high_block * 2 + threadIdx.x % 4 * 16;
  return place;
}

// The part of a tile by its unit, over what was held in its place; stays where no row is. Either
// way to its address fits the registers of one number of heads, and has them spilled with the
// other.
template <class C>
__device__ __forceinline__ void load_part(Raw<C>& raw, const Args& a, const Rows& r,
                                          const Place& place, u32 tile, u32 unit) {
  const u32 further = tile * Parts<C>::kApart * r.size, row = place.row + further;
  const u8 *low = place.low, *high = place.high;
  long long rows = further;
  u32 at = unit * 64;
  if constexpr (C::kHeads == 8) low = r.low, high = r.high, rows = row, at += threadIdx.x % 4 * 16;
  load_written_over(raw.low[0], row < r.count, low + rows * a.low_block * 2 + at);
  load_written_over(raw.high[0], row < r.count, high + rows * a.high_block * 2 + at);
}

// Parts of the turn whose first row is this block's row `first`, as many as are held.
template <class C>
__device__ __forceinline__ void load_parts(Raw<C> (&raw)[C::kRows], const Args& a, const Rows& r,
                                           u32 first) {
  const Place place = place_of<C>(a, r, first + threadIdx.x / 32 * 8);
#pragma unroll
  for (u32 part = 0; part < Parts<C>::kAll; ++part) {
    raw[part] = {};
    load_part<C>(raw[part], a, r, place, part / Parts<C>::kUnits, part % Parts<C>::kUnits);
  }
}

// ---- products ------------------------------------------------------------------------------

// Sums of one tile: 4 of 16 heads times 8 rows in each lane.
struct Sums {
  float most[4], size[4];
};

template <class C>
__device__ __forceinline__ void add_part(Sums& sums, const Raw<C>& raw, const Words& up,
                                         const Words& down, u32 half) {
  constexpr bool kBf16 = C::kType == Type::bf16;
  const u32 *high = raw.high[0] + half * 2, *low = raw.low[0] + half * 2;
  multiply_add<kBf16>(sums.most, up.of, high[0], high[1]);
  multiply_add<kBf16>(sums.most, down.of, low[0], low[1]);
  u32 size[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) size[i] = (up.of[i] | down.of[i]) & 0x7FFF7FFF;
  multiply_add<kBf16>(sums.size, size, larger_size<kBf16>(low[0], high[0]),
                      larger_size<kBf16>(low[1], high[1]));
}

struct alignas(8) TwoScores {
  float of[2];
};

// A tile's scores, from `row` of shared memory on, two neighbours of a head at a time: there is
// room for whole pieces, and what lies behind the last row is not read.
template <class C>
__device__ __forceinline__ void keep_sums(Smem<C>& s, const Args& a, const Rows& r,
                                          const Sums& sums, u32 row) {
  static_assert(Facts<C>::kStep % 2 == 0, "neighbours are of one piece");
  const u32 lane = threadIdx.x % 32;
  row += lane % 4 * 2;
  // What tiny numbers may lose, before and after the scale.
  const float least = fmaf(kLeast, a.scale, kLeast);
#pragma unroll
  for (u32 tile = 0; tile < C::kHeads / 8; ++tile) {
    const u32 head = lane / 4 + tile * 8;
    TwoScores two;
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      const u32 at = tile * 2 + i;
      two.of[i] = fmaf(fmaf(a.slack, sums.size[at], sums.most[at]), a.scale, least);
    }
    if (head < a.group && row < r.room) {
      *reinterpret_cast<TwoScores*>(s.scores + head * r.room + row) = two;
    }
  }
}

// Tiles of a turn from `tile` on, which share loads of queries; the first one of the turn has its
// scores at `row` of shared memory. Parts that were used make room for those of the `next` turn.
template <class C>
__device__ __forceinline__ void score_tiles(Smem<C>& s, const Args& a, const Rows& r,
                                            Raw<C> (&held)[C::kRows], const Place& next, u32 tile,
                                            u32 row) {
  constexpr u32 kBeside = Parts<C>::kBeside, kUnits = Parts<C>::kUnits;
  Sums sums[kBeside] = {};
#pragma unroll
  for (u32 step = 0; step < kUnits * 2; ++step) {
    const u32 unit = step / 2, half = step % 2;
    const Words up = operand<C>(s, unit, half, 0), down = operand<C>(s, unit, half, 1);
#pragma unroll
    for (u32 i = 0; i < kBeside; ++i) {
      Raw<C>& raw = held[(tile + i) * kUnits + unit];
      add_part<C>(sums[i], raw, up, down, half);
      if (half == 1) load_part<C>(raw, a, r, next, tile + i, unit);
    }
  }
#pragma unroll
  for (u32 i = 0; i < kBeside; ++i) {
    keep_sums<C>(s, a, r, sums[i], row + (tile + i) * Parts<C>::kApart);
  }
}

// Of parts that are held, the first of which for this warp are of this block's row `first`, those
// of the row that takes in the key become what is kept with it.
template <class C>
__device__ __forceinline__ void put_newest_parts(Raw<C> (&held)[C::kRows], Smem<C>& s,
                                                 const Args& a, const Rows& r, u32 first) {
  const u32 ahead = r.newest - first, tile = ahead / Parts<C>::kApart;
  const u32 at = ahead % Parts<C>::kApart;
  if (tile >= Parts<C>::kTiles || at >= 8) return;
  take_newest<C>(s.newest, a, r);
  u32 lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // places are worked out here, as in take
  if (lane / 4 != at) return;
#pragma unroll
  for (u32 part = 0; part < Parts<C>::kAll; ++part) {
    if (part / Parts<C>::kUnits != tile) continue;
    const u32 from = part % Parts<C>::kUnits * 64 + lane % 4 * 16;
    read_words(held[part].low[0], s.newest.low + from);
    read_words(held[part].high[0], s.newest.high + from);
  }
}

// This block's rows from `begin` to `end`, the first of which are on their way, against every query
// head, into shared memory.
template <class C>
__device__ __forceinline__ void score_parts(Smem<C>& s, const Args& a, const Rows& r,
                                            Raw<C> (&held)[C::kRows], u32 begin, u32 end) {
  const u32 warp = threadIdx.x / 32 * 8;
  const u32 rows = end - begin;
#pragma unroll 1
  for (u32 row = warp; row < rows; row += Parts<C>::kTurn) {
    const Place next = place_of<C>(a, r, begin + row + Parts<C>::kTurn);
    put_newest_parts<C>(held, s, a, r, begin + row);
#pragma unroll
    for (u32 tile = 0; tile < Parts<C>::kTiles; tile += Parts<C>::kBeside) {
      score_tiles<C>(s, a, r, held, next, tile, row);
    }
  }
}

}  // namespace score_blocks

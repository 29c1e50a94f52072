// What the parts of attend_decode share: the argument, shared memory, and what a warp keeps.
#pragma once
#include "epilogue/value.cuh"
#include "ptx/base.cuh"

namespace attend_decode {

constexpr u32 kTile = 16, kMostSplits = 16;
constexpr u32 kAll = 0xFFFFFFFF;

struct Args {
  const u8* q;     // [batch, heads, dim], on 4 bytes
  const u8* keys;  // [pages, kv_heads, page, dim], by strides
  const u8* values;
  const int* table;                         // [batch, table_width]
  const int* lengths;                       // [batch]
  const int* indices;                       // [batch, kv_heads, most], or null: all blocks in order
  const int* counts;                        // [batch, kv_heads], or null: most
  u8* out;                                  // [batch, heads, dim]
  float* lse;                               // [batch, heads]
  long long key_page, key_head, key_token;  // strides in entries
  long long value_page, value_head, value_token;
  u32 pages, page, block, table_width, most, kv_heads, group;
  float scale;  // of q.k, times log2 e: exponentials are of base 2
  u32 splits;   // 1, 2, 4, 8 or 16 blocks of a cluster
};

// A row of 16-byte chunks; chunk c of row r lies at c ^ r % 8, so that neither eight rows of a
// chunk nor eight chunks of a row meet a bank twice.
template <class C>
struct Smem {
  static constexpr u32 kRow = C::kDim * 2;
  alignas(128) u8 tiles[C::kWarps][C::kStages][2][kTile][kRow];  // keys, values
  // Where registers do not hold queries as well: those of each step and lane.
  alignas(16) u32 q[C::kSharedQueries ? C::kDim / 16 : 1][32][4];
  // What the blocks of the cluster send: outputs of the entries that this one finishes, and maxima
  // and sums of all heads.
  alignas(16) float received[C::kHeads * C::kDim];
  alignas(16) float totals[kMostSplits][C::kHeads][2];
  float top[C::kWarps][C::kHeads], sum[C::kWarps][C::kHeads];
  u64 arrived;
};

constexpr u32 kOutPad = 4;  // floats behind a head's outputs: lanes of eight dims and four heads

// Outputs of a warp [heads, dim + kOutPad] lie where its tiles were.
template <class C>
__device__ __forceinline__ float* outputs(Smem<C>& s, u32 warp) {
  static_assert(sizeof(s.tiles[0]) >= sizeof(float) * C::kHeads * (C::kDim + kOutPad), "they fit");
  return reinterpret_cast<float*>(s.tiles[warp]);
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float of_lane(float value, u32 lane) {
  return __uint_as_float(__shfl_sync(kAll, __float_as_uint(value), lane));
}
__device__ __forceinline__ float of_lane_xor(float value, u32 mask) {
  return __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(value), mask));
}

// Weights are at most 2^kRaise: float16 has no normal numbers below 2^-14.
template <Type T>
constexpr float kRaise = T == Type::f16 ? 15.0f : 0.0f;

// What exponents are taken from: the maximum, or 0 where nothing was seen, so that none is NaN.
__device__ __forceinline__ float base_of(float top) { return top == -infinity() ? 0.0f : top; }

// Lane = 4 g + t has heads g and, of 16, g + 8: their queries, maxima, and sums over its own keys;
// and of outputs dims g, g + 8 of every 16 for heads 2 t, + 1, and 8 more.
template <class C>
struct Seen {
  static constexpr int kSteps = C::kDim / 16, kHalves = C::kHeads / 8;
  u32 q[C::kSharedQueries ? 1 : kSteps][4];
  float top[kHalves], sum[kHalves], out[kSteps][kHalves][4];
};

}  // namespace attend_decode

// Tiles of tokens: where each lies, by its list and its table, and how it comes to shared memory.
#pragma once
#include "./facts.cuh"
#include "ptx/async.cuh"
#include "ptx/global.cuh"

namespace attend_decode {

// ---- which tokens --------------------------------------------------------------------------

// Where a tile lies: a page, the first token within it, and how many of its tokens count.
struct Place {
  u32 page, where;  // where = first + (tokens << 8); 0 tokens: nowhere
};

// The block that a tile of the list is of. No branch, and nothing is looked at that has yet to be
// loaded, so that this load, those of `List` and those of queries are under way at once.
__device__ __forceinline__ int block_of(const Args& a, u32 list, u32 tile) {
  const u32 entry = tile / (a.block / kTile);
  const u32 otherwise = a.indices ? 0xFFFFFFFF : entry;
  return static_cast<int>(
      load_word_if(a.indices && entry < a.most, a.indices + u64(list) * a.most + entry, otherwise));
}

__device__ __forceinline__ Place place_of(const Args& a, u32 batch, int block, u32 tile, u32 tiles,
                                          u32 length) {
  const u32 inside = tile % (a.block / kTile) * kTile;
  const long long position = static_cast<long long>(block) * a.block + inside;
  const u32 column = static_cast<u32>(position) / a.page;
  const u32 first = static_cast<u32>(position) % a.page;
  const bool listed = tile < tiles && block >= 0 && position < length && column < a.table_width;
  const u32 page = load_word_if(listed, a.table + u64(batch) * a.table_width + column, 0xFFFFFFFF);
  const u32 tokens = min(kTile, length - static_cast<u32>(position));
  const bool there = listed && page < a.pages;
  return {there ? page : 0, there ? first | tokens << 8 : 0};
}

// How long a list is; the sequence may end within its last tile.
struct List {
  u32 length, counted;

  __device__ __forceinline__ List(const Args& a, u32 list, u32 batch)
      : length(load_word_if(true, a.lengths + batch, 0)),
        counted(load_word_if(a.counts != nullptr, a.counts + list, a.most)) {
    length = max(static_cast<int>(length), 0);
  }
  __device__ __forceinline__ u32 tiles(const Args& a) const {
    const u32 every = (length + a.block - 1) / a.block;
    const u32 most = max(0, min(static_cast<int>(counted), static_cast<int>(a.most)));
    return (a.indices ? most : every) * (a.block / kTile);
  }
};

// ---- loads ---------------------------------------------------------------------------------

// A lane's part of the copies of a tile: it has one chunk of every `kRows`-th row.
template <class C>
struct Copies {
  static constexpr u32 kChunks = C::kDim / 8, kRows = 32 / kChunks, kSteps = kTile / kRows;
  const u8 *key, *value;  // of the lane's chunk in its first row of page 0
  u32 to;                 // and in a stage, before the chunks of a row are exchanged

  __device__ __forceinline__ Copies(const Args& a, u32 head, u32 lane) {
    const u32 row = lane / kChunks, chunk = lane % kChunks;
    key = a.keys + (head * a.key_head + row * a.key_token) * 2 + chunk * 16;
    value = a.values + (head * a.value_head + row * a.value_token) * 2 + chunk * 16;
    to = row * Smem<C>::kRow + (chunk ^ row) * 16;
  }

  // Keys, or values: `from` is the lane's address in the first rows, `step` bytes to the next ones.
  __device__ __forceinline__ void rows(const u8* from, long long step, u32 stage, u32 tokens,
                                       u32 lane) const {
#pragma unroll
    for (u32 i = 0; i < kSteps; ++i, from += step) {
      // row % 8 is (i kRows) % 8 | row of step 0: the exchange falls into two.
      const u32 exchange = i * kRows % 8 * 16;
      copy_async(stage + (to ^ exchange) + i * kRows * Smem<C>::kRow, from,
                 i * kRows + lane / kChunks < tokens);
    }
  }

  // Starts those of a tile. Tokens that do not count become zeros: what lies there may be NaN.
  __device__ __forceinline__ void start(const Args& a, u32 page, u32 where, u32 stage,
                                        u32 lane) const {
    const u32 first = where & 0xFF, tokens = where >> 8;
    if (tokens == 0) return;
    const long long of_key = page * a.key_page + first * a.key_token;
    const long long of_value = page * a.value_page + first * a.value_token;
    rows(key + of_key * 2, kRows * a.key_token * 2, stage, tokens, lane);
    rows(value + of_value * 2, kRows * a.value_token * 2, stage + kTile * Smem<C>::kRow, tokens,
         lane);
  }
};

}  // namespace attend_decode

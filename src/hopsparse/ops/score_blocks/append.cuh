// append_keys: keys that were appended to sequences, into the least, the largest and the sum of
// their blocks, in place, in one launch.
//
// A warp has a sequence, a head of keys and one of the blocks that the new tokens may touch; which
// those are, and how many tokens, is read on the device. A lane has kDim / 32 neighbouring entries
// and takes its tokens one after the other, so that sums are those of the CPU, bit for bit. A block
// whose first token is new begins anew: what was there is not read.
//
// Bound: bytes of the keys, once. One new token a sequence is a matter of latency.

#include "./fold.cuh"
#include "epilogue/value.cuh"
#include "ptx/base.cuh"
#include "ptx/grid.cuh"
#include "ptx/written.cuh"

namespace append_keys {

constexpr int kAhead = 8;  // tokens whose loads are under way

struct Args {
  u8* low;  // [batch, kv_heads, blocks, dim], by strides in entries, like high and total
  u8* high;
  float* total;
  const u8* keys;     // [batch, new, kv_heads, dim], by strides
  const int* starts;  // [batch]
  const int* counts;  // [batch], or null: new
  long long low_batch, low_head, low_block, high_batch, high_head, high_block;
  long long total_batch, total_head, total_block, key_batch, key_token, key_head;
  u32 blocks, block, kv_heads, new_tokens;
};

template <class C>
struct Facts {
  static constexpr int kEntries = C::kDim / 32, kBytes = C::kType == Type::f32 ? 4 : 2;
  static constexpr int kWords = kEntries * kBytes / 4, kPiece = kWords < 4 ? kWords : 4;
};

// The lane's entries of what is kept of a block.
template <class C>
struct Kept {
  float low[Facts<C>::kEntries], high[Facts<C>::kEntries], total[Facts<C>::kEntries];
};

template <class C>
struct Raw {
  u32 piece[Facts<C>::kWords / Facts<C>::kPiece][Facts<C>::kPiece];
};

template <class C>
__device__ __forceinline__ void take(Kept<C>& kept, const Raw<C>& raw) {
#pragma unroll
  for (int i = 0; i < Facts<C>::kEntries; ++i) {
    const int word = i * Facts<C>::kBytes / 4;
    const u32 bits = raw.piece[word / Facts<C>::kPiece][word % Facts<C>::kPiece];
    float key;
    if constexpr (C::kType == Type::f32) {
      key = __uint_as_float(bits);
    } else {
      key = unpack<C::kType>(i % 2 == 0 ? bits & 0xFFFF : bits >> 16);
    }
    fold(kept.low[i], kept.high[i], kept.total[i], key);
  }
}

// Tokens `first` to `last`, counted among the new ones.
template <class C>
__device__ __forceinline__ void take_all(Kept<C>& kept, const Args& a, const u8* keys, u32 first,
                                         u32 last) {
  for (u32 token = first; token < last; token += kAhead) {
    Raw<C> raw[kAhead];
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      const u8* from = keys + static_cast<long long>(token + t) * a.key_token * Facts<C>::kBytes;
#pragma unroll
      for (int i = 0; i < Facts<C>::kWords / Facts<C>::kPiece; ++i) {
        load_written(raw[t].piece[i], token + t < last, from + i * 16);
      }
    }
#pragma unroll
    for (int t = 0; t < kAhead; ++t) {
      if (token + t < last) take<C>(kept, raw[t]);
    }
  }
}

// Grid: heads and touched blocks along x, kWarps a block of threads, sequences along y.
template <class C>
__device__ __forceinline__ void run(const Args& a) {
  constexpr u32 kEntries = Facts<C>::kEntries;
  let_next_start();
  wait_for_previous();
  const u32 number = blockIdx.x * C::kWarps + threadIdx.x / 32, entry = threadIdx.x % 32 * kEntries;
  const u32 head = number % a.kv_heads, batch = blockIdx.y;
  const long long start = a.starts[batch];
  const int fresh = a.counts ? a.counts[batch] : static_cast<int>(a.new_tokens);
  const long long size = a.block, room = size * a.blocks;
  const long long count = min(max(fresh, 0), static_cast<int>(a.new_tokens));
  const long long begin = max(start, 0ll), end = min(start + count, room);
  const long long row = begin / size + number / a.kv_heads, first = row * size;
  if (first >= end || begin >= end) return;
  const long long low = batch * a.low_batch + head * a.low_head + row * a.low_block + entry;
  const long long high = batch * a.high_batch + head * a.high_head + row * a.high_block + entry;
  const long long total = batch * a.total_batch + head * a.total_head + row * a.total_block + entry;
  const bool anew = first >= start;
  Kept<C> kept;
#pragma unroll
  for (u32 i = 0; i < kEntries; ++i) {
    kept.low[i] = anew ? __uint_as_float(0x7F800000) : load_value<C::kType>(a.low, low + i);
    kept.high[i] = anew ? __uint_as_float(0xFF800000) : load_value<C::kType>(a.high, high + i);
    kept.total[i] = anew ? 0.0f : a.total[total + i];
  }
  const u8* keys = a.keys + (batch * a.key_batch + head * a.key_head + entry) * Facts<C>::kBytes;
  const u32 from = static_cast<u32>(max(first, begin) - start);
  take_all<C>(kept, a, keys, from, static_cast<u32>(min(first + size, end) - start));
#pragma unroll
  for (u32 i = 0; i < kEntries; ++i) {
    store_value<C::kType>(a.low, low + i, kept.low[i]);
    store_value<C::kType>(a.high, high + i, kept.high[i]);
    a.total[total + i] = kept.total[i];
  }
}

}  // namespace append_keys

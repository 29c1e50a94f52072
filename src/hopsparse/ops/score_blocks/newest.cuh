// The newest key of a sequence, which a launch takes into its block as append_keys would, bit for
// bit, before that block is scored.
//
// The warp that scores the last row of the sequence takes it in. It asks for the key and for what
// is kept of the block as soon as the length is known, into shared memory, and folds one into the
// other when it comes to that row: where a block of threads has several pieces nobody waits for
// these copies. Nobody else reads that row, so that no barrier is needed. What is kept stays in
// shared memory, where a second turn finds it, and goes to device memory for launches behind.
#pragma once
#include "./fold.cuh"
#include "./rows.cuh"
#include "ptx/async.cuh"

namespace score_blocks {

// Rows of a warp in a piece.
template <class C>
constexpr u32 kOfWarp = Facts<C>::kTeams * C::kRows;

// The warp that scores this block's row `own`: tiles of 8 are counted from where scores begin.
template <class C>
__device__ __forceinline__ u32 warp_of(const Rows& r, u32 own) {
  if constexpr (C::kTensor) return own % r.room % (C::kWarps * 8) / 8;
  return own % Facts<C>::kStep / kOfWarp<C>;
}

// Bytes of an entry of keys, low and high. By mean the kernel is made for none of them.
template <class C>
__device__ __forceinline__ u32 key_bytes(const Args& a) {
  if constexpr (Facts<C>::kRange) return Facts<C>::kBytes;
  return a.key_type == 2 ? 4 : 2;
}

// Where entry 0 of the last row is, in entries of the tensor.
__device__ __forceinline__ long long last_row(const Rows& r, long long batch, long long head,
                                              long long block) {
  return blockIdx.z * batch + blockIdx.y * head + (r.count - 1) * block;
}

// Starts the copies, in the warp that has the row. A key behind the end of the room is none, and so
// is that of a sequence without tokens.
template <class C>
__device__ __forceinline__ void begin_newest(Smem<C>& s, const Args& a, Rows& r, int tokens) {
  const u32 pieces = (r.count + Facts<C>::kStep - 1) / Facts<C>::kStep;
  const bool fits = tokens > 0 && static_cast<u64>(tokens) <= u64(a.blocks) * a.block;
  if (!a.keys || !fits || (pieces - 1) % r.size != r.rank) return;
  r.newest = r.own - 1;
  if (warp_of<C>(r, r.newest) != threadIdx.x / 32) return;
  Newest<C>& n = s.newest;
  const u32 lane = threadIdx.x % 32, bytes = key_bytes<C>(a), row = C::kDim * bytes;
  const u8* key = a.keys + (blockIdx.z * a.key_batch + blockIdx.y * a.key_head) * bytes;
  const u8* low = a.low + last_row(r, a.low_batch, a.low_head, a.low_block) * bytes;
  const u8* high = a.high + last_row(r, a.high_batch, a.high_head, a.high_block) * bytes;
  const u8* total = a.total + last_row(r, a.total_batch, a.total_head, a.total_block) * 4;
  const bool old = r.tokens > 1;  // else the block begins anew: what was there is not read
#pragma unroll 1
  for (u32 at = lane * 16; at < row; at += 512) {
    copy_async(shared_address(n.key + at), key + at, true);
    copy_async(shared_address(n.low + at), low + at, old);
    copy_async(shared_address(n.high + at), high + at, old);
  }
#pragma unroll 1
  for (u32 at = lane * 16; at < C::kDim * 4; at += 512) {
    copy_async(shared_address(n.total + at / 4), total + at, old);
  }
  commit_copies();
  if (lane == 0) n.taken = 0;
}

// Folds the key in. A lane has kDim / 32 neighbouring entries.
template <class C, Type T>
__device__ __forceinline__ void take(Newest<C>& n, const Args& a, const Rows& rows) {
  Rows r = rows;
  u32 lane = threadIdx.x % 32;
  // Places are worked out here: ahead of the loop over pieces they would be registers in all of it.
  asm volatile("" : "+r"(r.count), "+r"(lane));
  // By mean there are three of these loops; tensor cores hold as many registers as there are.
  constexpr u32 kEach = C::kDim / 32, kAtOnce = Facts<C>::kRange && !C::kTensor ? kEach : 1;
  const u32 first = lane * kEach;
  const long long low_at = last_row(r, a.low_batch, a.low_head, a.low_block) + first;
  const long long high_at = last_row(r, a.high_batch, a.high_head, a.high_block) + first;
  const long long total_at = last_row(r, a.total_batch, a.total_head, a.total_block) + first;
  const bool anew = r.tokens == 1;
#pragma unroll kAtOnce
  for (u32 i = 0; i < kEach; ++i) {
    const u32 at = first + i;
    float low = anew ? infinity() : load_value<T>(n.low, at);
    float high = anew ? -infinity() : load_value<T>(n.high, at);
    float total = anew ? 0.0f : n.total[at];
    append_keys::fold(low, high, total, load_value<T>(n.key, at));
    store_value<T>(n.low, at, low);
    store_value<T>(n.high, at, high);
    n.total[at] = total;
    store_value<T>(a.low, low_at + i, low);
    store_value<T>(a.high, high_at + i, high);
    store_value<Type::f32>(a.total, total_at + i, total);
  }
}

// By the warp that has the row, the first time that it comes there.
template <class C>
__device__ __forceinline__ void take_newest(Newest<C>& n, const Args& a, const Rows& r) {
  if (n.taken != 0) return;
  wait_copies<0>();
  __syncwarp();
  if constexpr (Facts<C>::kRange) {
    take<C, C::kType>(n, a, r);
  } else if (a.key_type == 0) {
    take<C, Type::bf16>(n, a, r);
  } else if (a.key_type == 1) {
    take<C, Type::f16>(n, a, r);
  } else {
    take<C, Type::f32>(n, a, r);
  }
  if (threadIdx.x % 32 == 0) n.taken = 1;
  __syncwarp();
}

__device__ __forceinline__ void read_words(u32 (&words)[4], const void* from) {
  const FourWords four = *static_cast<const FourWords*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = four.of[i];
}

// A lane's entries of the row, as load_row has them.
template <class C>
__device__ __forceinline__ void read_newest(Raw<C>& raw, const Newest<C>& n) {
  const u32 lane = threadIdx.x % Facts<C>::kLanes;
  if constexpr (Facts<C>::kRange) {
#pragma unroll
    for (int i = 0; i < Raw<C>::kPieces; ++i) {
      read_words(raw.low[i], n.low + lane * 16 + i * C::kDim * 2);
      read_words(raw.high[i], n.high + lane * 16 + i * C::kDim * 2);
    }
  }
  if constexpr (Facts<C>::kSum) {
    constexpr u32 kApart = Facts<C>::kWide ? C::kDim / 2 : 4, kLane = Facts<C>::kWide ? 4 : 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) read_words(raw.total[i], n.total + lane * kLane + i * kApart);
  }
}

// Of rows that were loaded, the first of which for this warp is this block's row `first`, the one
// that takes in the key becomes what is kept with it.
template <class C>
__device__ __forceinline__ void put_newest(Raw<C> (&rows)[C::kRows], Smem<C>& s, const Args& a,
                                           const Rows& r, u32 first) {
  const u32 at = r.newest - first;
  if (at >= kOfWarp<C>) return;
  take_newest<C>(s.newest, a, r);
  const u32 own = threadIdx.x % 32 / Facts<C>::kLanes * C::kRows;
#pragma unroll
  for (int j = 0; j < C::kRows; ++j) {
    if (own + j == at) read_newest<C>(rows[j], s.newest);
  }
}

}  // namespace score_blocks

// rope_append: q, k and v of new tokens, as one product left them, rotated by their places; keys
// and values go straight into the cache, in one launch.
//
// A block has one token. kLanes lanes have a head: each the same few entries of its lower and of
// its upper half, which a rotation mixes. Every step is rounded where torch rounds it, so that what
// leaves is what transformers computes in a dozen launches. How long sequences are is read on the
// device.
//
// Bound: every byte once.

#include "epilogue/value.cuh"
#include "ptx/base.cuh"
#include "ptx/grid.cuh"
#include "ptx/written.cuh"

namespace rope_append {

struct Args {
  const u8* qkv;  // [batch * tokens, heads and twice those of keys, dim], by rows
  const u8* cos;  // [batch, tokens, dim], by strides in entries, like sin
  const u8* sin;
  const u8* q_norm;  // [dim], or null, like k_norm
  const u8* k_norm;
  const int* ends;  // [batch]: tokens of each sequence with the new ones
  u8* q;            // [batch * tokens, heads, dim]
  u8* keys;         // [batch, kv_heads, room, dim], by strides, like values
  u8* values;
  long long* count;  // takes the new tokens too; or null
  long long row, cos_batch, cos_token, sin_batch, sin_token;
  long long key_batch, key_head, key_token, value_batch, value_head, value_token;
  u32 tokens, heads, kv_heads, room;
  float eps;
};

template <class C>
struct Facts {
  static constexpr u32 kLanes = C::kDim / 4 < 32 ? C::kDim / 4 : 32;
  static constexpr u32 kEntries = C::kDim / 2 / kLanes, kWords = kEntries / 2;
  static constexpr u32 kHeads = C::kThreads / kLanes;  // that a block has at a time
};

// A lane's entries of both halves, two a word.
template <class C>
struct Piece {
  u32 half[2][Facts<C>::kWords];

  __device__ __forceinline__ void load(bool inside, const u8* from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_written(half[i], inside, from + i * C::kDim);
  }
  __device__ __forceinline__ void store(u8* to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (u32 w = 0; w < Facts<C>::kWords; ++w) {
        *reinterpret_cast<u32*>(to + i * C::kDim + w * 4) = half[i][w];
      }
    }
  }
};

template <class C>
__device__ __forceinline__ float first(u32 word) {
  return unpack<C::kType>(word & 0xFFFF);
}
template <class C>
__device__ __forceinline__ float second(u32 word) {
  return unpack<C::kType>(word >> 16);
}

// Products of two pairs, rounded.
template <class C>
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  return pack<C::kType>(__fmul_rn(first<C>(a), first<C>(b)), __fmul_rn(second<C>(a), second<C>(b)));
}

// x / sqrt(mean x^2 + eps), rounded, and times the weight.
template <class C>
__device__ __forceinline__ void normalize(Piece<C>& x, const Piece<C>& weight, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (u32 w = 0; w < Facts<C>::kWords; ++w) {
      const float a = first<C>(x.half[i][w]), b = second<C>(x.half[i][w]);
      sum += a * a + b * b;
    }
  }
#pragma unroll
  for (u32 step = Facts<C>::kLanes / 2; step > 0; step /= 2) {
    sum += __uint_as_float(__shfl_xor_sync(0xFFFFFFFF, __float_as_uint(sum), step));
  }
  const float scale = rsqrtf(sum / C::kDim + eps);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (u32 w = 0; w < Facts<C>::kWords; ++w) {
      const u32 word = x.half[i][w];
      const u32 scaled = pack<C::kType>(first<C>(word) * scale, second<C>(word) * scale);
      x.half[i][w] = times<C>(scaled, weight.half[i][w]);
    }
  }
}

// x cos + (-upper, lower) sin.
template <class C>
__device__ __forceinline__ void rotate(Piece<C>& x, const Piece<C>& cos, const Piece<C>& sin) {
#pragma unroll
  for (u32 w = 0; w < Facts<C>::kWords; ++w) {
    const u32 lower = x.half[0][w], upper = x.half[1][w];
    const u32 across[2] = {times<C>(upper ^ 0x80008000, sin.half[0][w]),
                           times<C>(lower, sin.half[1][w])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 along = times<C>(i == 0 ? lower : upper, cos.half[i][w]);
      x.half[i][w] = pack<C::kType>(__fadd_rn(first<C>(along), first<C>(across[i])),
                                    __fadd_rn(second<C>(along), second<C>(across[i])));
    }
  }
}

// Where a head goes; null for a key or a value that the cache has no room for.
template <class C>
__device__ __forceinline__ u8* place_of(const Args& a, u32 head, u32 batch, long long at) {
  if (head < a.heads) {
    return a.q + (static_cast<long long>(blockIdx.x) * a.heads + head) * C::kDim * 2;
  }
  if (at < 0 || at >= a.room) return nullptr;
  head -= a.heads;
  if (head < a.kv_heads) {
    return a.keys + (batch * a.key_batch + head * a.key_head + at * a.key_token) * 2;
  }
  head -= a.kv_heads;
  return a.values + (batch * a.value_batch + head * a.value_head + at * a.value_token) * 2;
}

// Grid: tokens along x; along y blocks that share the heads of one.
template <class C>
__device__ __forceinline__ void run(const Args& a, u32 shares) {
  using F = Facts<C>;
  const u32 batch = blockIdx.x / a.tokens, token = blockIdx.x % a.tokens;
  const u32 entry = threadIdx.x % F::kLanes * F::kEntries, all = a.heads + 2 * a.kv_heads;
  let_next_start();
  wait_for_previous();
  Piece<C> cos, sin, q_norm, k_norm;
  cos.load(true, a.cos + (batch * a.cos_batch + token * a.cos_token + entry) * 2);
  sin.load(true, a.sin + (batch * a.sin_batch + token * a.sin_token + entry) * 2);
  if constexpr (C::kNorm) {
    q_norm.load(true, a.q_norm + entry * 2);
    k_norm.load(true, a.k_norm + entry * 2);
  }
  const long long at = static_cast<long long>(a.ends[batch]) - a.tokens + token;
  const u8* row = a.qkv + (blockIdx.x * a.row + entry) * 2;
  // All lanes of a warp go round as often: they meet in the norm.
  for (u32 head0 = blockIdx.y * F::kHeads; head0 < all; head0 += shares * F::kHeads) {
    const u32 head = head0 + threadIdx.x / F::kLanes;
    Piece<C> x;
    x.load(head < all, row + static_cast<long long>(head) * C::kDim * 2);
    if constexpr (C::kNorm) {
      Piece<C> normal = x;
      normalize<C>(normal, head < a.heads ? q_norm : k_norm, a.eps);
      if (head < a.heads + a.kv_heads) x = normal;
    }
    if (head < a.heads + a.kv_heads) rotate<C>(x, cos, sin);
    u8* to = head < all ? place_of<C>(a, head, batch, at) : nullptr;
    if (to) x.store(to + entry * 2);
  }
  if (a.count && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *a.count += a.tokens;
}

}  // namespace rope_append

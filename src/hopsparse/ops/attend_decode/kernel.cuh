// attend_decode: one query a head over listed blocks of keys in pages, in one launch.
//
// A cluster of kCluster blocks has a sequence and a head of keys, with all of its query heads. The
// list is cut into even parts by its count, which is read on the device: nothing is planned on the
// host. A warp takes 32 tokens at a time: rows of keys and values come by cp.async, the next 32
// while these are used. A lane scores one token against every query head; then the warp turns, a
// lane has kDim / 32 columns of the output. Each warp keeps its own maximum and sum; warps and then
// blocks are merged in their order, through shared and distributed shared memory, so that the
// result does not depend on who comes first.
//
// Bound: bytes of keys and values. Products are float32 fused ones of ordinary cores, which keep up
// with memory to about four query heads a head of keys; beyond, tensor cores are wanted.

#include "epilogue/value.cuh"
#include "ptx/async.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/cluster.cuh"

namespace attend_decode {

constexpr int kTile = 32, kStages = 2;
constexpr u32 kAll = 0xFFFFFFFF;

struct Args {
  const u8* q;     // [batch, heads, dim]
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
  float scale;
};

template <class C>
struct Smem {
  static constexpr int kRow =
      C::kDim * 2 + 16;  // bytes; lanes that read 32 rows meet no bank twice
  alignas(16) u8 keys[C::kWarps][kStages][kTile][kRow];
  alignas(16) u8 values[C::kWarps][kStages][kTile][kRow];
  alignas(16) float q[C::kGroup][C::kDim];
  alignas(16) float weights[C::kWarps][C::kGroup][kTile];
  float top[C::kWarps][C::kGroup], sum[C::kWarps][C::kGroup];
  // Of the block: what the cluster merges.
  float block_top[C::kGroup], block_sum[C::kGroup];
};

// Outputs of a warp lie where its keys were.
template <class C>
__device__ __forceinline__ float* outputs(Smem<C>& s, u32 warp) {
  static_assert(sizeof(s.keys[0]) >= sizeof(float) * C::kGroup * C::kDim, "outputs of a warp fit");
  return reinterpret_cast<float*>(s.keys[warp]);
}

// Where a token lies, or nowhere.
struct Token {
  long long key, value;
  bool there;
};

template <class C>
__device__ __forceinline__ Token token_at(const Args& a, u32 batch, u32 head, u32 slot, u32 end) {
  Token t = {0, 0, false};
  if (slot >= end) return t;
  const u32 entry = slot / a.block;
  const int listed = a.indices ? a.indices[(u64(batch) * a.kv_heads + head) * a.most + entry]
                               : static_cast<int>(entry);
  const long long position = static_cast<long long>(listed) * a.block + slot % a.block;
  if (listed < 0 || position >= a.lengths[batch]) return t;
  const u64 column = static_cast<u64>(position) / a.page;
  if (column >= a.table_width) return t;
  const int page = a.table[u64(batch) * a.table_width + column];
  if (page < 0 || static_cast<u32>(page) >= a.pages) return t;
  const long long within = position % a.page;
  t.key = page * a.key_page + head * a.key_head + within * a.key_token;
  t.value = page * a.value_page + head * a.value_head + within * a.value_token;
  t.there = true;
  return t;
}

__device__ __forceinline__ long long of_lane(long long value, u32 lane) {
  const u32 low = __shfl_sync(kAll, static_cast<u32>(value), lane);
  const u32 high = __shfl_sync(kAll, static_cast<u32>(value >> 32), lane);
  return static_cast<long long>(u64(high) << 32 | low);
}

// Starts the copies of the rows of a tile; each lane knows where one of them lies.
template <class C>
__device__ __forceinline__ void fetch(Smem<C>& s, const Args& a, const Token& t, u32 stage) {
  constexpr u32 kChunks = C::kDim * 2 / 16, kRows = 32 / kChunks > 0 ? 32 / kChunks : 1;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (u32 first = 0; first < kTile; first += kRows) {
    const u32 row = first + lane / kChunks, chunk = lane % kChunks;
    const long long key = of_lane(t.key, row), value = of_lane(t.value, row);
    const bool there = __shfl_sync(kAll, static_cast<u32>(t.there), row) != 0;
    copy_async(shared_address(&s.keys[warp][stage][row][chunk * 16]), a.keys + key * 2 + chunk * 16,
               there);
    copy_async(shared_address(&s.values[warp][stage][row][chunk * 16]),
               a.values + value * 2 + chunk * 16, there);
  }
}

template <Type T>
__device__ __forceinline__ void unpack_pair(float& low, float& high, u32 word) {
  low = unpack<T>(word);
  high = T == Type::bf16 ? __uint_as_float(word & 0xFFFF0000) : unpack<T>(word >> 16);
}

// The lane's token against every query head.
template <class C>
__device__ __forceinline__ void score(float (&scores)[C::kGroup], const Smem<C>& s, u32 stage) {
  const u32* row = reinterpret_cast<const u32*>(s.keys[threadIdx.x / 32][stage][threadIdx.x % 32]);
#pragma unroll
  for (int g = 0; g < C::kGroup; ++g) scores[g] = 0;
#pragma unroll 4
  for (int d = 0; d < C::kDim; d += 8) {
    float key[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack_pair<C::kType>(key[2 * i], key[2 * i + 1], row[d / 2 + i]);
#pragma unroll
    for (int g = 0; g < C::kGroup; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) scores[g] = fmaf(key[i], s.q[g][d + i], scores[g]);
    }
  }
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(value), step)));
  }
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) {
    value += __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(value), step));
  }
  return value;
}

// exp(value - top), 0 where nothing is; what is NaN stays so.
__device__ __forceinline__ float power(float value, float top) {
  constexpr float kLog2E = 1.44269504f;
  if (top == -__int_as_float(0x7F800000)) return value == top ? 0.0f : value;
  return exp2f((value - top) * kLog2E);
}

// What a warp has seen: maxima, sums of its lanes, and its columns of the outputs.
template <class C>
struct Seen {
  static constexpr int kColumns = C::kDim / 32;
  float top[C::kGroup], sum[C::kGroup], out[C::kGroup][kColumns];
};

template <class C>
__device__ __forceinline__ void take(Seen<C>& seen, Smem<C>& s, const Args& a, bool there,
                                     u32 stage) {
  constexpr int kColumns = Seen<C>::kColumns;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float scores[C::kGroup];
  score<C>(scores, s, stage);
#pragma unroll
  for (int g = 0; g < C::kGroup; ++g) {
    const float value = there ? scores[g] * a.scale : -__int_as_float(0x7F800000);
    const float top = fmaxf(seen.top[g], warp_max(value));
    const float weight = power(value, top), before = power(seen.top[g], top);
    seen.top[g] = top;
    seen.sum[g] = seen.sum[g] * before + weight;
    s.weights[warp][g][lane] = weight;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) seen.out[g][i] *= before;
  }
  __syncwarp();
#pragma unroll 2
  for (int t = 0; t < kTile; ++t) {
    const u32* row = reinterpret_cast<const u32*>(s.values[warp][stage][t]) + lane * kColumns / 2;
    float value[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      unpack_pair<C::kType>(value[2 * i], value[2 * i + 1], row[i]);
    }
#pragma unroll
    for (int g = 0; g < C::kGroup; ++g) {
      const float weight = s.weights[warp][g][t];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) seen.out[g][i] = fmaf(weight, value[i], seen.out[g][i]);
    }
  }
  __syncwarp();  // weights and rows are read before they are written again
}

// All tiles of a warp: the block's slots, in turns with its other warps.
template <class C>
__device__ __forceinline__ void walk(Seen<C>& seen, Smem<C>& s, const Args& a, u32 rank) {
  const u32 head = blockIdx.y, batch = blockIdx.z, lane = threadIdx.x % 32;
  const u32 length = max(a.lengths[batch], 0);
  u32 entries = (length + a.block - 1) / a.block;
  if (a.indices) {
    const int listed = a.counts ? a.counts[u64(batch) * a.kv_heads + head] : a.most;
    entries = max(0, min(listed, static_cast<int>(a.most)));
  }
  const u32 part = (entries + C::kCluster - 1) / C::kCluster;
  const u32 end = min((rank + 1) * part, entries) * a.block;
  u32 slot = rank * part * a.block + threadIdx.x / 32 * kTile;
  Token now = token_at<C>(a, batch, head, slot + lane, end);
  fetch<C>(s, a, now, 0);
  commit_copies();
  for (u32 stage = 0; slot < end; stage ^= 1) {
    slot += C::kWarps * kTile;
    const Token next = token_at<C>(a, batch, head, slot + lane, end);
    fetch<C>(s, a, next, stage ^ 1);
    commit_copies();
    wait_copies<1>();
    __syncwarp();
    take<C>(seen, s, a, now.there, stage);
    now = next;
  }
  wait_copies<0>();
  __syncwarp();
}

// ---- merging -------------------------------------------------------------------------------

// Merges the warps of the block, in their order; its outputs lie where those of warp 0 did.
template <class C>
__device__ __forceinline__ void merge_warps(const Seen<C>& seen, Smem<C>& s) {
  constexpr int kColumns = Seen<C>::kColumns;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* mine = outputs<C>(s, warp);
#pragma unroll
  for (int g = 0; g < C::kGroup; ++g) {
    const float sum = warp_sum(seen.sum[g]);
    if (lane == 0) s.top[warp][g] = seen.top[g], s.sum[warp][g] = sum;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) mine[g * C::kDim + lane * kColumns + i] = seen.out[g][i];
  }
  __syncthreads();
  for (u32 at = threadIdx.x; at < C::kGroup * C::kDim; at += C::kWarps * 32) {
    const u32 g = at / C::kDim;
    float top = s.top[0][g], sum = 0, out = 0;
    for (u32 w = 1; w < C::kWarps; ++w) top = fmaxf(top, s.top[w][g]);
    for (u32 w = 0; w < C::kWarps; ++w) {
      const float part = power(s.top[w][g], top);
      sum += part * s.sum[w][g];
      out += part * outputs<C>(s, w)[at];
    }
    outputs<C>(s, 0)[at] = out;  // read by this thread alone
    if (at % C::kDim == 0) s.block_top[g] = top, s.block_sum[g] = sum;
  }
}

template <class C>
__device__ __forceinline__ float of_block(const float* place, u32 rank) {
  return __uint_as_float(load_cluster(cluster_address(shared_address(place), rank)));
}

// Merges the blocks of the cluster; each of them writes a part of the columns.
template <class C>
__device__ __forceinline__ void merge_blocks(Smem<C>& s, const Args& a, u32 rank) {
  const u64 row = (u64(blockIdx.z) * a.kv_heads + blockIdx.y) * a.group;
  for (u32 at = rank * C::kWarps * 32 + threadIdx.x; at < a.group * C::kDim;
       at += C::kCluster * C::kWarps * 32) {
    const u32 g = at / C::kDim;
    float top = -__int_as_float(0x7F800000), sum = 0, out = 0;
    for (u32 b = 0; b < C::kCluster; ++b) top = fmaxf(top, of_block<C>(&s.block_top[g], b));
    for (u32 b = 0; b < C::kCluster; ++b) {
      const float part = power(of_block<C>(&s.block_top[g], b), top);
      sum += part * of_block<C>(&s.block_sum[g], b);
      out += part * of_block<C>(&outputs<C>(s, 0)[at], b);
    }
    const bool empty = top == -__int_as_float(0x7F800000) && sum == 0;
    store_value<C::kType>(a.out, row * C::kDim + at, empty ? 0.0f : out / sum);
    if (at % C::kDim == 0) a.lse[row + g] = empty ? top : top + logf(sum);
  }
}

// Grid: a cluster along x, heads of keys along y, sequences along z.
template <class C>
__device__ __forceinline__ void run(const Args& a) {
  extern __shared__ __align__(16) u8 memory[];
  Smem<C>& s = *reinterpret_cast<Smem<C>*>(memory);
  const u32 rank = cluster_rank();
  const u64 row = (u64(blockIdx.z) * a.kv_heads + blockIdx.y) * a.group;
  for (u32 at = threadIdx.x; at < C::kGroup * C::kDim; at += C::kWarps * 32) {
    const bool in = at < a.group * C::kDim;
    s.q[at / C::kDim][at % C::kDim] = in ? load_value<C::kType>(a.q, row * C::kDim + at) : 0.0f;
  }
  __syncthreads();
  Seen<C> seen;
#pragma unroll
  for (int g = 0; g < C::kGroup; ++g) {
    seen.top[g] = -__int_as_float(0x7F800000);
    seen.sum[g] = 0;
#pragma unroll
    for (int i = 0; i < Seen<C>::kColumns; ++i) seen.out[g][i] = 0;
  }
  walk<C>(seen, s, a, rank);
  merge_warps<C>(seen, s);
  cluster_sync();
  merge_blocks<C>(s, a, rank);
  cluster_sync();  // nobody leaves while its memory is read
}

}  // namespace attend_decode

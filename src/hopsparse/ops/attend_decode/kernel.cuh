// attend_decode: one query a head over listed blocks of keys in pages, in one launch.
//
// A cluster of `splits` blocks has a sequence and a head of keys, with all of its query heads. A
// tile is 16 tokens, which lie in one page. Warps of the cluster take tiles in turns, as many as
// the counts on the device say: nothing is planned on the host. Rows of keys and values come by
// cp.async into a ring of the warp's own, so that warps wait for nobody, and two blocks of an SM
// keep 128 KB in flight, four times what memory needs to be busy.
//
// Both products are of tensor cores: queries [8 or 16 heads, dim] by keys, so that a lane has four
// or eight weights of one or two heads; then values, transposed as they are loaded, by weights in
// the order in which they are there. Weights are rounded to the dtype of values, sums are not. Each
// warp keeps its own maximum and sum; warps and then blocks are merged in their order: the result
// does not depend on who comes first. A block sends parts of its outputs to those that finish them.
//
// Bound: bytes of keys and values. A tile of 8 KB (dim 128) is due every 436 clocks of an SM, which
// could issue 1744 instructions meanwhile, and issues about 330. docs/design/0008 has the budget.

#include "epilogue/value.cuh"
#include "ptx/async.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

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

// ---- products ------------------------------------------------------------------------------

template <Type T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T == Type::bf16) {
    mma_bf16(sum, a, b0, b1);
  } else {
    mma_f16(sum, a, b0, b1);
  }
}

// Lane = 4 g + t has heads g and, of 16, g + 8: their queries, maxima, and sums over its own keys;
// and of outputs dims g, g + 8 of every 16 for heads 2 t, + 1, and 8 more.
template <class C>
struct Seen {
  static constexpr int kSteps = C::kDim / 16, kHalves = C::kHeads / 8;
  u32 q[C::kSharedQueries ? 1 : kSteps][4];
  float top[kHalves], sum[kHalves], out[kSteps][kHalves][4];
};

// A lane's queries of 16 dims; those of heads that are not there are zeros.
template <class C>
__device__ __forceinline__ void queries_of(u32 (&q)[4], const Args& a, u32 list, int step) {
  const u32 lane = threadIdx.x % 32, head = lane / 4;
  const u32* from = reinterpret_cast<const u32*>(a.q) +
                    (u64(list) * a.group + head) * (C::kDim / 2) + step * 8 + lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i % 2 * 8;  // g, or g + 8
    const bool in = row < C::kHeads && head + row < a.group;
    q[i] = in ? from[row * (C::kDim / 2) + i / 2 * 4] : 0;
  }
}

// Nothing is seen yet; all threads of the block come by.
template <class C>
__device__ __forceinline__ void begin(Seen<C>& seen, Smem<C>& s, const Args& a, u32 list) {
  if constexpr (C::kSharedQueries) {
    for (int step = threadIdx.x / 32; step < Seen<C>::kSteps; step += C::kWarps) {
      queries_of<C>(s.q[step][threadIdx.x % 32], a, list, step);
    }
    __syncthreads();
  } else {
#pragma unroll
    for (int step = 0; step < Seen<C>::kSteps; ++step) queries_of<C>(seen.q[step], a, list, step);
  }
#pragma unroll
  for (int half = 0; half < Seen<C>::kHalves; ++half) {
    seen.top[half] = -infinity();
    seen.sum[half] = 0;
#pragma unroll
    for (int step = 0; step < Seen<C>::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) seen.out[step][half][i] = 0;
    }
  }
}

__device__ __forceinline__ float of_lane(float value, u32 lane) {
  return __uint_as_float(__shfl_sync(kAll, __float_as_uint(value), lane));
}
__device__ __forceinline__ float of_lane_xor(float value, u32 mask) {
  return __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(value), mask));
}

// What exponents are taken from: the maximum, or 0 where nothing was seen, so that none is NaN.
__device__ __forceinline__ float base_of(float top) { return top == -infinity() ? 0.0f : top; }

// Weights of a tile for one of the halves: scores become powers of two, packed for the second
// product; the factor is that of all that was summed before.
template <class C>
__device__ __forceinline__ float weigh(Seen<C>& seen, u32 (&weights)[2], float (&x)[4], int half,
                                       float scale, u32 tokens, u32 lane) {
  // float16 has no normal numbers below 2^-14: weights up to 2^15 rather than 1.
  constexpr float kRaise = C::kType == Type::f16 ? 15.0f : 0.0f;
  float most = -infinity();
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    x[i] *= scale;
    if (i / 2 * 8 + lane % 4 * 2 + i % 2 >= tokens) x[i] = -infinity();
    most = fmaxf(most, x[i]);
  }
  most = fmaxf(most, of_lane_xor(most, 1));
  most = fmaxf(most, of_lane_xor(most, 2));
  const float top = fmaxf(seen.top[half], most - kRaise), base = base_of(top);
  const float factor = exp2f(seen.top[half] - base);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) x[i] = exp2f(x[i] - base);
  seen.top[half] = top;
  seen.sum[half] = seen.sum[half] * factor + ((x[0] + x[1]) + (x[2] + x[3]));
  weights[0] = pack<C::kType>(x[0], x[1]);
  weights[1] = pack<C::kType>(x[2], x[3]);
  return factor;
}

// A tile that has arrived at `stage`. `at` is where the lane's row of a matrix begins: lanes of 8
// name rows 0 to 7 of two chunks, and then rows 8 to 15.
template <class C>
__device__ __forceinline__ void take(Seen<C>& seen, Smem<C>& s, u32 stage, u32 at, float scale,
                                     u32 tokens) {
  constexpr int kSteps = Seen<C>::kSteps, kHalves = Seen<C>::kHalves;
  const u32 lane = threadIdx.x % 32;
  // Heads by tokens 0 to 7, and 8 to 15, of even and of odd steps: chains of half the length.
  float scores[2][2][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 keys[4];
    load_matrices_x4(keys, stage + (at ^ step * 32));
    const u32(&q)[4] = C::kSharedQueries ? s.q[step][lane] : seen.q[step];
    multiply_add<C::kType>(scores[step % 2][0], q, keys[0], keys[1]);
    multiply_add<C::kType>(scores[step % 2][1], q, keys[2], keys[3]);
  }
  u32 weights[kHalves][2];
  float factor[kHalves];
  bool moved = false;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const float before = seen.top[half];
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = scores[0][i / 2][2 * half + i % 2] + scores[1][i / 2][2 * half + i % 2];
    }
    factor[half] = weigh<C>(seen, weights[half], x, half, scale, tokens, lane);
    moved |= before != seen.top[half];
  }
  if (__ballot_sync(kAll, moved)) {  // seldom, after the first tiles
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      // Of heads 2 t and 2 t + 1, which lanes 8 t and 8 t + 4 have.
      const float even = of_lane(factor[half], lane % 4 * 8);
      const float odd = of_lane(factor[half], lane % 4 * 8 + 4);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) seen.out[step][half][i] *= i % 2 ? odd : even;
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 values[4];
    load_transposed_x4(values, stage + kTile * Smem<C>::kRow + (at ^ step * 32));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      multiply_add<C::kType>(seen.out[step][half], values, weights[half][0], weights[half][1]);
    }
  }
}

// All tiles of a warp. A lane knows where one of 32 of them lies; half way the next 32 are looked
// up, so that nothing waits for the list and the table.
template <class C>
__device__ __forceinline__ void walk(Seen<C>& seen, Smem<C>& s, const Args& a, u32 number) {
  constexpr u32 kStage = sizeof(s.tiles[0][0]), kBits = 5;
  static_assert(C::kStages * kBits <= 32 && kTile < 1 << kBits, "counts of the ring fit a word");
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, batch = blockIdx.z;
  const u32 turns = a.splits * C::kWarps, mine = blockIdx.x * C::kWarps + warp;
  const List list(a, number, batch);
  const int first = block_of(a, number, mine + lane * turns);
  begin<C>(seen, s, a, number);
  const u32 length = list.length, tiles = list.tiles(a);
  Place now = place_of(a, batch, first, mine + lane * turns, tiles, length), next = {0, 0};
  const Copies<C> copies(a, blockIdx.y, lane);
  const u32 ring = shared_address(s.tiles[warp]);
  const u32 row = lane / 16 * 8 + lane % 8;
  const u32 at = row * Smem<C>::kRow + (lane / 8 % 2 ^ lane % 8) * 16;
  u32 to = 0, from = 0, waiting = 0;  // stages; tokens of the tiles under way, oldest lowest
  u32 tile = mine;                    // the one that is taken next
  for (u32 ahead = 0; ahead < C::kStages - 1 || tile < tiles; ++ahead) {
    if (ahead % 32 == 16) {
      const u32 of_lane = mine + (ahead + 16 + lane) * turns;
      next = place_of(a, batch, block_of(a, number, of_lane), of_lane, tiles, length);
    }
    if (ahead % 32 == 0 && ahead > 0) now = next;
    const u32 page = __shfl_sync(kAll, now.page, ahead % 32);
    const u32 where = __shfl_sync(kAll, now.where, ahead % 32);
    copies.start(a, page, where, ring + to * kStage, lane);
    commit_copies();
    to = to + 1 == C::kStages ? 0 : to + 1;
    waiting = waiting >> kBits | where >> 8 << kBits * (C::kStages - 1);
    if (ahead < C::kStages - 1) continue;
    wait_copies<C::kStages - 1>();
    __syncwarp();
    const u32 tokens = waiting & (1 << kBits) - 1;
    if (tokens > 0) take<C>(seen, s, ring + from * kStage, at, a.scale, tokens);
    __syncwarp();  // rows are read before others are written there
    from = from + 1 == C::kStages ? 0 : from + 1;
    tile += turns;
  }
  wait_copies<0>();
  __syncwarp();
}

// ---- merging -------------------------------------------------------------------------------

// Of parts with their own maxima: what one of them counts for beside the largest.
__device__ __forceinline__ float part_of(float top, float base) { return exp2f(top - base); }

// The result of one entry, of parts that were summed.
template <class C>
__device__ __forceinline__ void store(const Args& a, u32 list, u32 at, float top, float sum,
                                      float out) {
  constexpr float kLn2 = 0.693147181f;
  const bool empty = top == -infinity() && sum == 0;
  const u64 row = u64(list) * a.group;
  store_value<C::kType>(a.out, row * C::kDim + at, empty ? 0.0f : out / sum);
  if (at % C::kDim == 0) a.lse[row + at / C::kDim] = empty ? top : base_of(top) * kLn2 + logf(sum);
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

// ---- the block -----------------------------------------------------------------------------

// The barrier that counts what is sent to this block. Others send when all have begun.
template <class C>
__device__ __forceinline__ void expect_parts(Smem<C>& s, const Args& a) {
  if (threadIdx.x == 0) {
    const u32 bar = shared_address(&s.arrived);
    mbarrier_init(bar, 1);
    mbarrier_expect(bar, a.group * C::kDim * 4 + a.splits * ((a.group + 1) / 2 * 16));
    mbarrier_init_fence();
  }
  __syncwarp();
  cluster_arrive_relaxed();
}

// Grid: a cluster along x, heads of keys along y, sequences along z.
template <class C>
__device__ __forceinline__ void run(const Args& a) {
  extern __shared__ __align__(128) u8 memory[];
  Smem<C>& s = *reinterpret_cast<Smem<C>*>(memory);
  const u32 list = blockIdx.z * a.kv_heads + blockIdx.y;
  if (a.splits > 1) expect_parts<C>(s, a);
  wait_for_previous();
  Seen<C> seen;
  walk<C>(seen, s, a, list);
  let_next_start();
  show<C>(seen, s);
  if (a.splits > 1) cluster_wait();
  merge_warps<C>(s, a, list);
  if (a.splits == 1) return;
  // All that comes here has come by then, so that nobody has to wait for a block that leaves.
  mbarrier_wait(shared_address(&s.arrived), 0);
  if (a.splits == 2) merge_blocks<C, 2>(s, a, list);
  if (a.splits == 4) merge_blocks<C, 4>(s, a, list);
  if (a.splits == 8) merge_blocks<C, 8>(s, a, list);
  if (a.splits == 16) merge_blocks<C, 16>(s, a, list);
}

}  // namespace attend_decode

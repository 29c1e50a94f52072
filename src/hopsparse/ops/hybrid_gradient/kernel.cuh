// hybrid_gradient: the k largest of gradient + residual, exactly and in the order of their places;
// the others rounded, and what was rounded away, in little more than one pass over the data.
//
// 1. sample     a histogram of 2^18 magnitudes; `settle` takes a threshold that about 1.25 k reach.
// 2. code_all   reads gradient and residual once. A block that nothing in it reaches the threshold
//               of is rounded here; one with candidates is held, and its sums are kept as they are.
//               A second histogram is that of the candidates. Were there too few, or was there Inf
//               or NaN, it runs once more with everything held; else that launch returns at once.
// 3. refine     the lower 16 bits of the candidates around the k-th: `settle` knows it exactly
// then.
// 4. count      how many of each tile of 16,384 values are taken; `settle` adds them up.
// 5. emit       writes those, and rounds what was held.
// A histogram is the same in whatever order it is counted, so that nothing depends on the order of
// blocks. The host reads nothing, and every launch is the same for all data: a graph may hold them.
//
// Bound: device memory. 12.5 bytes a value of float32 at least with int4; at k = 0.1 % a sixth of
// the blocks of 128 is held, and costs another 8 to 16 bytes a value.

#include "./coders.cuh"
#include "ptx/global.cuh"

namespace hybrid_gradient {

constexpr int kStrip = 512;  // values that a warp has at a time
constexpr int kOfTile = 32;  // strips; a tile lies in one chunk of 65,536 places
constexpr u32 kNothing = 0xFFFFFFFF;
constexpr u32 kHighBins = 1 << 15, kLowBins = 1 << 16, kBins = 3 * kHighBins + kLowBins;
constexpr int kSettlers = 1024;

struct State {
  u64 wanted;     // of the bin, and of those equal to the k-th, how many are taken
  u32 threshold;  // what has at least this key is a candidate
  u32 bin;        // upper 16 bits of the key of the k-th; kNothing where k is 0
  u32 kth;        // its key; kNothing where k is 0
  u32 not_finite, zeros, again;
};

struct Args {
  const u8* gradient;     // [n]
  const float* residual;  // [n] or null
  float* values;          // [k]
  u32* counts;            // [n / 65536, rounded up]
  u16* offsets;           // [k]
  u8* codes;              // [rows, code bytes]
  u16* scales;            // [rows]
  float* rest;            // [strips * 512]
  u8* finite;
  State* state;
  u64* histogram;  // the one that this launch counts in or looks through; of `clear`, all of them
  u64* tiles;      // [tiles, 2]: above the k-th, and equal to it; then those of all tiles before
  u8* held;        // [strips]: a bit for each 128 values
  u64 n, k, blocks, wanted_samples, stride;
  u32 samples, every, phase;
  u32 vector;  // gradient and residual start on what four values take
  u32 stage;
};

__device__ __forceinline__ u64 strips_of(const Args& a) { return (a.n + kStrip - 1) / kStrip; }
__device__ __forceinline__ u64 tiles_of(const Args& a) {
  return (strips_of(a) + kOfTile - 1) / kOfTile;
}
__device__ __forceinline__ u32 lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ u64 first_warp() {
  return (u64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
}
__device__ __forceinline__ u64 warps() { return u64(gridDim.x) * blockDim.x / 32; }

// ---- read ----------------------------------------------------------------------------------

template <Type T>
__device__ __forceinline__ float sum_at(const Args& a, u64 at) {
  const float kept = a.residual == nullptr ? 0.0f : a.residual[at];
  return __fadd_rn(load_value<T>(a.gradient, static_cast<long long>(at)), kept);
}

template <Type T>
__device__ __forceinline__ void unpack_four(float* to, const u8* from) {
  if constexpr (T == Type::f32) {
    const Piece p = load_if(true, from);
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = __uint_as_float(p.word[c]);
  } else {
    const HalfPiece p = load_half(from);
#pragma unroll
    for (int c = 0; c < 4; ++c) to[c] = unpack<T>(p.word[c / 2] >> c % 2 * 16);
  }
}

// Gradient and residual of a strip; zeros behind the end.
template <Type T>
__device__ __forceinline__ void load_sums(float (&v)[16], const Args& a, u64 strip, u32 lane) {
  const u64 first = strip * kStrip + 4 * lane;
  if (a.vector && (strip + 1) * kStrip <= a.n) {
    float kept[16];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u64 at = first + 128 * j;
      unpack_four<T>(v + 4 * j, a.gradient + at * (T == Type::f32 ? 4 : 2));
      const Piece p =
          load_if(a.residual != nullptr, reinterpret_cast<const u8*>(a.residual) + at * 4);
#pragma unroll
      for (int c = 0; c < 4; ++c) kept[4 * j + c] = __uint_as_float(p.word[c]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fadd_rn(v[i], kept[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const u64 at = first + i / 4 * 128 + i % 4;
    v[i] = at < a.n ? sum_at<T>(a, at) : 0.0f;
  }
}

__device__ __forceinline__ void load_rest(float* to, const Args& a, u64 first) {
  const Piece p = *reinterpret_cast<const Piece*>(a.rest + first);
#pragma unroll
  for (int c = 0; c < 4; ++c) to[c] = __uint_as_float(p.word[c]);
}

__device__ __forceinline__ void store_rest(const float* v, const Args& a, u64 first) {
  *reinterpret_cast<Piece*>(a.rest + first) = {__float_as_uint(v[0]), __float_as_uint(v[1]),
                                               __float_as_uint(v[2]), __float_as_uint(v[3])};
}

// ---- count ---------------------------------------------------------------------------------

// One more in a bin for each lane that says so; equal bins of a warp are added at once.
__device__ __forceinline__ void tally(u64* histogram, u32 bin, bool counts) {
  if (__ballot_sync(kAll, counts) == 0) return;
  const u32 same = __match_any_sync(kAll, counts ? bin : kNothing);
  const u32 earlier = (1u << lane_id()) - 1;
  if (counts && (same & earlier) == 0) atomicAdd(histogram + bin, u64(__popc(same)));
}

__device__ __forceinline__ void clear(const Args& a) {
  const u64 thread = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 threads = u64(gridDim.x) * blockDim.x, chunks = (a.n + 65535) / 65536;
  for (u64 i = thread; i < kBins; i += threads) a.histogram[i] = 0;
  for (u64 i = thread; i < chunks; i += threads) a.counts[i] = 0;
  if (thread == 0) *a.state = State{};
}

// A value of each stretch of `stride`, or all of them where that is 1.
template <class C>
__device__ __forceinline__ void sample(const Args& a) {
  const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  // The same number of turns for every lane of a warp, which votes.
  for (u32 start = thread - lane_id(); start < a.samples; start += threads) {
    const u32 i = start + lane_id();
    const u32 mixed = (i * 2654435761u) ^ (i * 2246822519u >> 15);
    const u64 at = u64(i) * a.stride + (a.stride > 1 ? mixed % a.stride : 0);
    const bool counts = i < a.samples;
    const u32 key = counts ? key_of(sum_at<C::kType>(a, at)) : 0;
    tally(a.histogram, key >> 16, counts);
  }
}

// ---- settle --------------------------------------------------------------------------------

// Sums of all threads before this one, and of all; the block has kSettlers of them.
__device__ __forceinline__ u64 sums_before(u64 mine, u64& all) {
  __shared__ u64 of_warp[kSettlers / 32];
  u64 sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(kAll, sum, step);
    if (lane_id() >= step) sum += other;
  }
  __syncthreads();  // of_warp may still be read
  if (lane_id() == 31) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  u64 before = 0;
  all = 0;
  for (u32 warp = 0; warp < kSettlers / 32; ++warp) {
    if (warp == threadIdx.x / 32) before = all;
    all += of_warp[warp];
  }
  return before + sum - mine;
}

struct Found {
  u32 bin;   // kNothing where all bins hold less than was wanted
  u64 left;  // how many of that bin are wanted
};

// The bin in which the `wanted`-th is, from the highest down. A warp has neighbouring bins, and the
// one that has it reads its own again, 32 at a time.
template <u32 Bins>
__device__ __forceinline__ Found find(const u64* histogram, u64 wanted) {
  constexpr u32 kTurns = Bins / kSettlers;
  __shared__ Found found;
  if (threadIdx.x == 0) found = {kNothing, 0};
  const u32 highest = Bins - 1 - threadIdx.x / 32 * kTurns * 32 - lane_id();
  u64 mine = 0, all;
#pragma unroll 16
  for (u32 i = 0; i < kTurns; ++i) mine += histogram[highest - i * 32];
  // Of this warp, and of those before it.
  const u64 before_lane = sums_before(mine, all);
  u64 before = __shfl_sync(kAll, before_lane, 0);
  const u64 after = __shfl_sync(kAll, before_lane + mine, 31);
  if (before < wanted && wanted <= after) {
#pragma unroll 1
    for (u32 bin = highest;; bin -= 32) {
      u64 up_to = histogram[bin];
      const u64 own = up_to;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const u64 other = __shfl_up_sync(kAll, up_to, step);
        if (lane_id() >= step) up_to += other;
      }
      up_to += before;
      const u32 reached = __ballot_sync(kAll, up_to >= wanted);
      if (reached != 0) {
        const bool is_first = lane_id() + 1 == __ffs(static_cast<int>(reached));
        if (is_first) found = {bin, wanted - (up_to - own)};
        break;
      }
      before = __shfl_sync(kAll, up_to, 31);
    }
  }
  __syncthreads();
  const Found result = found;
  __syncthreads();
  return result;
}

__device__ __forceinline__ void add_up_tiles(const Args& a) {
  const u64 tiles = tiles_of(a), each = (tiles + kSettlers - 1) / kSettlers;
  const u64 first = min(threadIdx.x * each, tiles), last = min(first + each, tiles);
  u64 sum[2] = {}, all;
  for (u64 i = first; i < last; ++i) sum[0] += a.tiles[2 * i], sum[1] += a.tiles[2 * i + 1];
  const u64 above = sums_before(sum[0], all), equal = sums_before(sum[1], all);
  sum[0] = above, sum[1] = equal;
  for (u64 i = first; i < last; ++i) {
    const u64 own[2] = {a.tiles[2 * i], a.tiles[2 * i + 1]};
    a.tiles[2 * i] = sum[0], a.tiles[2 * i + 1] = sum[1];
    sum[0] += own[0], sum[1] += own[1];
  }
}

// One block, between the others: what the stage before has counted becomes what the next one uses.
__device__ __forceinline__ void settle(const Args& a) {
  State& s = *a.state;
  if (a.stage == 4) return add_up_tiles(a);
  const bool is_first = threadIdx.x == 0, not_finite = s.not_finite;
  if (a.stage == 2 && !s.again) return;
  const u64 wanted = a.stage == 0 ? a.wanted_samples : a.stage == 3 ? s.wanted : a.k;
  Found found = {kNothing, 0};
  if (a.k > 0) {
    found =
        a.stage == 3 ? find<kLowBins>(a.histogram, wanted) : find<kHighBins>(a.histogram, wanted);
  }
  if (!is_first) return;
  const u32 everything = a.k > 0 ? 0 : kNothing;
  if (a.stage == 0) {
    s.threshold = found.bin == kNothing ? everything : found.bin << 16;
  } else if (a.stage == 3) {
    s.kth = a.k > 0 ? s.bin << 16 | found.bin : kNothing;
    s.wanted = found.left;
    *a.finite = !not_finite;
  } else if (a.stage == 1 && (not_finite || (a.k > 0 && found.bin == kNothing))) {
    s.again = 1, s.zeros = not_finite, s.threshold = everything;
  } else {
    s.bin = found.bin, s.wanted = found.left;
  }
}

// ---- the pass over all data ----------------------------------------------------------------

// Rounds a block, if it is one of those that are sent.
template <class C, int Count>
__device__ __forceinline__ void code_block(float (&v)[Count], const Args& a, u64 block, u32 lane) {
  if constexpr (C::kCoder != Coder::none) {
    u64 row = block;
    bool is_sent = block < a.blocks;
    if (a.every > 1) {
      row = block / a.every;
      is_sent = is_sent && block - row * a.every == a.phase;
    }
    if (!is_sent) return;
    code<C>(v, a.codes + row * Facts<C::kCoder>::kCodeBytes, a.scales + row, lane);
  }
}

template <class C>
__device__ __forceinline__ void code_all(const Args& a) {
  using F = Facts<C::kCoder>;
  constexpr int kParts = kStrip / F::kBlock, kCount = F::kOfLane;
  const u32 lane = lane_id(), threshold = a.state->threshold, zeros = a.state->zeros;
  if (a.stage == 1 && !a.state->again) return;
  u32 peak = 0;
  for (u64 strip = first_warp(); strip < strips_of(a); strip += warps()) {
    float v[16];
    load_sums<C::kType>(v, a, strip, lane);
    u32 held = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float (&mine)[kCount] = *reinterpret_cast<float (*)[kCount]>(v + part * kCount);
      u32 largest = 0;
#pragma unroll
      for (float& value : mine) {
        if (zeros) value = 0;
        largest = max(largest, key_of(value));
      }
      peak = max(peak, largest);
      if (__any_sync(kAll, largest >= threshold)) {
        held |= (1u << kCount / 4) - 1 << part * kCount / 4;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int place = part * kCount + i;
          const u64 at = strip * kStrip + place / 4 * 128 + 4 * lane + place % 4;
          tally(a.histogram, key_of(mine[i]) >> 16, key_of(mine[i]) >= threshold && at < a.n);
        }
      } else {
        code_block<C>(mine, a, strip * kParts + part, lane);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) store_rest(v + 4 * j, a, strip * kStrip + 128 * j + 4 * lane);
    if (lane == 0) a.held[strip] = static_cast<u8>(held);
  }
  if (__any_sync(kAll, peak >= 0x7F800000) && lane == 0) atomicOr(&a.state->not_finite, 1u);
}

// ---- what was held -------------------------------------------------------------------------

// Calls what follows for each held strip of a tile, in order, with a bit for each 128 values.
template <class Visit>
__device__ __forceinline__ void each_held(const Args& a, u64 tile, Visit visit) {
  const u64 mine = tile * kOfTile + lane_id();
  const u32 held = mine < strips_of(a) ? a.held[mine] : 0;
  for (u32 left = __ballot_sync(kAll, held != 0); left != 0; left &= left - 1) {
    const u32 number = __ffs(static_cast<int>(left)) - 1;
    visit(tile * kOfTile + number, __shfl_sync(kAll, held, number));
  }
}

// Calls what follows for each held value of a tile, with its key; a warp comes together each time.
template <class Visit>
__device__ __forceinline__ void each_key(const Args& a, u64 tile, Visit visit) {
  each_held(a, tile, [&](u64 strip, u32 held) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!(held >> j & 1)) continue;
      const u64 first = strip * kStrip + 128 * j + 4 * lane_id();
      float v[4];
      load_rest(v, a, first);
#pragma unroll
      for (int c = 0; c < 4; ++c) visit(key_of(v[c]), first + c < a.n);
    }
  });
}

__device__ __forceinline__ void refine(const Args& a) {
  const u32 bin = a.state->bin;
  for (u64 tile = first_warp(); tile < tiles_of(a); tile += warps()) {
    each_key(a, tile, [&](u32 key, bool inside) {
      tally(a.histogram, key & 0xFFFF, inside && key >> 16 == bin);
    });
  }
}

__device__ __forceinline__ void count(const Args& a) {
  const u32 kth = a.state->kth;
  for (u64 tile = first_warp(); tile < tiles_of(a); tile += warps()) {
    u32 above = 0, equal = 0;
    each_key(a, tile, [&](u32 key, bool inside) {
      above += inside && key > kth;
      equal += inside && key == kth;
    });
    above = __reduce_add_sync(kAll, above), equal = __reduce_add_sync(kAll, equal);
    if (lane_id() == 0) a.tiles[2 * tile] = above, a.tiles[2 * tile + 1] = equal;
  }
}

// Writes those of 128 values that are taken, and leaves zeros. `above` and `equal` are how many
// before them are larger than the k-th, and equal to it.
__device__ __forceinline__ void take(float* v, const Args& a, u64 first, u64& above, u64& equal) {
  const u32 kth = a.state->kth, earlier = (1u << lane_id()) - 1;
  const u64 wanted = a.state->wanted;
  u64 above_here = above, equal_here = equal;
  bool larger[4], same[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const bool inside = first + c < a.n;
    larger[c] = inside && key_of(v[c]) > kth, same[c] = inside && key_of(v[c]) == kth;
    const u32 both[2] = {__ballot_sync(kAll, larger[c]), __ballot_sync(kAll, same[c])};
    above_here += __popc(both[0] & earlier), equal_here += __popc(both[1] & earlier);
    above += __popc(both[0]), equal += __popc(both[1]);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (larger[c] || (same[c] && equal_here < wanted)) {
      const u64 place = above_here + min(equal_here, wanted);
      a.values[place] = v[c];
      a.offsets[place] = static_cast<u16>(first + c) ^ 0x8000;  // less 32,768
      v[c] = 0;
    }
    above_here += larger[c], equal_here += same[c];
  }
}

template <class C>
__device__ __forceinline__ void emit(const Args& a) {
  using F = Facts<C::kCoder>;
  constexpr int kParts = kStrip / F::kBlock, kCount = F::kOfLane;
  const u32 lane = lane_id();
  const u64 wanted = a.state->wanted;
  for (u64 tile = first_warp(); tile < tiles_of(a); tile += warps()) {
    u64 above = a.tiles[2 * tile], equal = a.tiles[2 * tile + 1];
    const u64 before = above + min(equal, wanted);
    each_held(a, tile, [&](u64 strip, u32 held) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!(held >> part * kCount / 4 & 1)) continue;
        float v[kCount];
        const u64 first = strip * kStrip + part * F::kBlock + 4 * lane;
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) load_rest(v + 4 * j, a, first + 128 * j);
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) take(v + 4 * j, a, first + 128 * j, above, equal);
        code_block<C>(v, a, strip * kParts + part, lane);
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) store_rest(v + 4 * j, a, first + 128 * j);
      }
    });
    const u32 taken = u32(above + min(equal, wanted) - before);
    if (lane == 0 && taken > 0) atomicAdd(a.counts + tile * kOfTile * kStrip / 65536, taken);
  }
}

}  // namespace hybrid_gradient

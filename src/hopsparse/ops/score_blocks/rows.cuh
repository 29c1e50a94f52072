// What score_blocks is asked, and how a block of threads reads it: queries, and rows of its blocks.
#pragma once
#include "epilogue/value.cuh"
#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/written.cuh"

namespace score_blocks {

enum class Kind { bound, mean, mass };

constexpr u32 kAll = 0xFFFFFFFF, kEntries = 8;
constexpr float kLeast = 0x1p-126f;  // what products of tiny numbers may lose, added to the slack

struct Args {
  const u8* q;  // [batch, kv_heads, group, dim]
  u8* low;      // [batch, kv_heads, blocks, dim], by strides in entries, like high and total
  u8* high;
  u8* total;
  const int* lengths;  // [batch]
  float* scores;       // [batch, kv_heads, blocks], or [batch, kv_heads, group, blocks]
  const u8* keys;      // [batch, kv_heads, dim], by strides: the newest ones, taken in; or null
  long long low_batch, low_head, low_block, high_batch, high_head, high_block;
  long long total_batch, total_head, total_block, key_batch, key_head;
  u32 blocks, block, kv_heads, group;
  u32 q_type, per_head;
  u32 ask_first, ask_later;  // whether rows are asked for before they are loaded (starts.py)
  u32 key_type;              // of keys, low and high, as q_type has it
  float scale, slack;
};

template <class C>
struct Facts {
  static constexpr bool kRange = C::kKind != Kind::mean, kSum = C::kKind != Kind::bound;
  static constexpr bool kWide = C::kType == Type::f32;
  static constexpr u32 kLanes = C::kDim / kEntries, kTeams = 32 / kLanes;
  static constexpr u32 kBytes = kWide ? 4 : 2;
  static constexpr u32 kMost = C::kHeads >= 4 ? 16 : C::kHeads;  // query heads
  static constexpr u32 kOfTeam = C::kTensor ? 2 : C::kRows;      // rows of a piece
  static constexpr u32 kThreads = C::kWarps * 32, kStep = C::kWarps * kTeams * kOfTeam;
  // A half of q, where twice the centre of a range, and twice a mean, are taken.
  static constexpr float kOfQuery = kRange ? 0.5f : 1.0f, kOfMean = kRange ? 2.0f : 1.0f;
};

// The newest key of the sequence, and what is kept of its block with it, as they are stored.
template <class C>
struct Newest {
  static constexpr u32 kRow = C::kDim * Facts<C>::kBytes;
  alignas(16) u8 key[kRow];
  alignas(16) u8 low[kRow];
  alignas(16) u8 high[kRow];
  alignas(16) float total[C::kDim];
  u32 taken, unused[3];
};

template <class C>
struct Smem {
  alignas(16) float q[Facts<C>::kMost][C::kDim];
  float top[16], sum[16];  // of each query head, over this block's rows
  float whole[16];
  alignas(16) float parts[16][16][2];  // of every block of the cluster: largest scores and sums
  alignas(16) u64 parts_are_there;     // a barrier
  Newest<C> newest;
  alignas(16) float scores[C::kScores];  // [query head][row]
};

struct alignas(16) FourWords {
  u32 of[4];
};

// What a block of threads knows of its rows. They come in pieces of kStep, which the blocks of the
// cluster take in turns: the first piece is known before the length is, and any length is shared.
struct Rows {
  u64 head;  // of keys, counted over all sequences
  const u8 *low, *high, *total;
  u32 rank, size;  // of the cluster
  u32 room;        // rows that shared memory has room for, whole pieces
  u32 count;       // rows of the sequence
  u32 own;         // and of them this block's
  u32 tokens;      // of the last row of the sequence
  u32 newest;      // this block's row that takes in the newest key, or kAll
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000); }

__device__ __forceinline__ float shuffled(float value, u32 mask) {
  return __uint_as_float(__shfl_xor_sync(kAll, __float_as_uint(value), mask));
}

// exp(value - top), 0 where nothing is; what is NaN stays so.
__device__ __forceinline__ float power(float value, float top) {
  constexpr float kLog2E = 1.44269504f;
  if (top == -infinity()) return value == top ? 0.0f : value;
  return exp2f((value - top) * kLog2E);
}

// ---- reading -------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ Rows rows_of(const Args& a, u32 rank, u32 size) {
  Rows r;
  const u32 batch = blockIdx.z, head = blockIdx.y;
  r.head = u64(batch) * a.kv_heads + head;
  r.low = a.low + (batch * a.low_batch + head * a.low_head) * Facts<C>::kBytes;
  r.high = a.high + (batch * a.high_batch + head * a.high_head) * Facts<C>::kBytes;
  r.total = a.total + (batch * a.total_batch + head * a.total_head) * 4;
  r.rank = rank;
  r.size = size;
  r.room = C::kScores / a.group / Facts<C>::kStep * Facts<C>::kStep;
  r.count = a.blocks;  // until the length is known
  r.newest = kAll;
  return r;
}

template <class C>
__device__ __forceinline__ void end_rows(Rows& r, const Args& a, int tokens) {
  constexpr u32 kStep = Facts<C>::kStep;
  const u32 most = static_cast<u32>(min(u64(a.blocks) * a.block, u64(0x7FFFFFFF)));
  const u32 length = static_cast<u32>(min(max(tokens, 0), static_cast<int>(most)));
  r.count = (length + a.block - 1) / a.block;
  r.tokens = length - (r.count > 0 ? r.count - 1 : 0) * a.block;
  const u32 pieces = (r.count + kStep - 1) / kStep;
  r.own = (pieces + r.size - 1 - r.rank) / r.size * kStep;
  // Only the last piece may be cut.
  if (pieces > 0 && (pieces - 1) % r.size == r.rank) r.own -= pieces * kStep - r.count;
}

// The row of the sequence that is this block's row `own`.
template <class C>
__device__ __forceinline__ u32 row_at(const Rows& r, u32 own) {
  return (own / Facts<C>::kStep * r.size + r.rank) * Facts<C>::kStep + own % Facts<C>::kStep;
}

// Where entry d of a row lies among those of q: entries 0 to 3 of all lanes, then 4 to 7, so that
// lanes that read 16 bytes each meet no bank twice.
template <class C>
__device__ __forceinline__ u32 place_of(u32 d) {
  if (Facts<C>::kWide) return d;
  return d % kEntries / 4 * (C::kDim / 2) + d / kEntries * 4 + d % 4;
}

// The thread's pieces of q, 16 bytes each: asked for first and used when rows are on their way.
template <class C, bool Tensor = C::kTensor>
struct Queries {
  static constexpr u32 kPieces =
      (Facts<C>::kMost * C::kDim * 4 - 1) / (Facts<C>::kThreads * 16) + 1;
  u32 piece[kPieces][4];
};

template <class C>
__device__ __forceinline__ void load_queries(Queries<C, false>& queries, const Args& a) {
  const u32 bytes = a.group * C::kDim * (a.q_type == 2 ? 4 : 2);
  const u8* q = a.q + (u64(blockIdx.z) * a.kv_heads + blockIdx.y) * bytes;
#pragma unroll
  for (u32 i = 0; i < Queries<C>::kPieces; ++i) {
    const u32 at = (i * Facts<C>::kThreads + threadIdx.x) * 16;
    load_written(queries.piece[i], at < bytes, q + at);
  }
}

// Entries from `at` on, which are neighbours in shared memory too.
template <class C>
__device__ __forceinline__ void store_queries(Smem<C>& s, const Args& a, u32 at,
                                              const float (&value)[4]) {
  float* to = &s.q[at / C::kDim][place_of<C>(at % C::kDim)];
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = value[i] * a.scale * Facts<C>::kOfQuery;
}

// Heads up to the next multiple of kHeads are zeros.
template <class C>
__device__ __forceinline__ void keep_queries(Smem<C>& s, const Args& a,
                                             const Queries<C, false>& queries) {
  const u32 end = (a.group + C::kHeads - 1) / C::kHeads * C::kHeads * C::kDim;
#pragma unroll
  for (u32 p = 0; p < Queries<C>::kPieces; ++p) {
    const u32 number = p * Facts<C>::kThreads + threadIdx.x, *words = queries.piece[p];
    float value[4];
    if (a.q_type == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) value[i] = __uint_as_float(words[i]);
      if (number * 4 < end) store_queries<C>(s, a, number * 4, value);
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 bits = words[half * 2 + i / 2] >> i % 2 * 16 & 0xFFFF;
        value[i] = a.q_type == 0 ? unpack<Type::bf16>(bits) : unpack<Type::f16>(bits);
      }
      if (number * 8 < end) store_queries<C>(s, a, number * 8 + half * 4, value);
    }
  }
}

// A lane's entries of one row, as they are stored.
template <class C>
struct Raw {
  static constexpr int kPieces = Facts<C>::kWide ? 2 : 1;
  u32 low[Facts<C>::kRange ? kPieces : 1][4], high[Facts<C>::kRange ? kPieces : 1][4];
  u32 total[Facts<C>::kSum ? 2 : 1][4];
};

template <class C>
__device__ __forceinline__ void load_row(Raw<C>& raw, const Args& a, const Rows& r, u32 row) {
  const bool in = row < r.count;
  const u32 lane = threadIdx.x % Facts<C>::kLanes;
  const long long at = row;
  if constexpr (Facts<C>::kRange) {
    const u8* low = r.low + at * a.low_block * Facts<C>::kBytes + lane * 16;
    const u8* high = r.high + at * a.high_block * Facts<C>::kBytes + lane * 16;
#pragma unroll
    for (int i = 0; i < Raw<C>::kPieces; ++i) {
      load_written(raw.low[i], in, low + i * C::kDim * 2);  // entries of a half row are 4 bytes
      load_written(raw.high[i], in, high + i * C::kDim * 2);
    }
  }
  if constexpr (Facts<C>::kSum) {
    // Beside entries of 16 bits: 8 of them in a line; else 4 of either half of the row.
    constexpr u32 kApart = Facts<C>::kWide ? C::kDim * 2 : 16, kLane = Facts<C>::kWide ? 16 : 32;
    const u8* total = r.total + at * a.total_block * 4 + lane * kLane;
#pragma unroll
    for (int i = 0; i < 2; ++i) load_written(raw.total[i], in, total + i * kApart);
  }
}

// Lines of 128 bytes of this block's rows from `own` on, a number of pieces, of rows of kRow bytes,
// to the L2 cache: a thread has some.
template <class C, u32 kRow, u32 kPieces>
__device__ __forceinline__ void prefetch_lines(const u8* from, long long row_bytes, const Rows& r,
                                               u32 own) {
  constexpr u32 kLines = kRow / 128, kAll = kPieces * Facts<C>::kStep * kLines;
#pragma unroll
  for (u32 first = 0; first < kAll; first += Facts<C>::kThreads) {
    const u32 line = first + threadIdx.x, row = row_at<C>(r, own + line / kLines);
    if (line < kAll && row < r.count) prefetch_l2(from + row * row_bytes + line % kLines * 128);
  }
}

// Rows come to the L2 cache before registers have room for them, and while the kernel ahead still
// runs. It may write them: that cache shows what it wrote, and nothing is read here.
template <class C, u32 kPieces>
__device__ __forceinline__ void prefetch_rows(const Args& a, const Rows& r, u32 own) {
  if constexpr (Facts<C>::kRange) {
    constexpr u32 kBytes = Facts<C>::kBytes, kRow = C::kDim * kBytes;
    prefetch_lines<C, kRow, kPieces>(r.low, a.low_block * kBytes, r, own);
    prefetch_lines<C, kRow, kPieces>(r.high, a.high_block * kBytes, r, own);
  }
  if constexpr (Facts<C>::kSum) {
    prefetch_lines<C, C::kDim * 4, kPieces>(r.total, a.total_block * 4, r, own);
  }
}

template <class C>
__device__ __forceinline__ float entry(const u32 (*pieces)[4], int i) {
  if constexpr (C::kType == Type::f32) {
    return __uint_as_float(pieces[i / 4][i % 4]);
  } else {
    const u32 word = pieces[0][i / 2];
    if (i % 2 == 0) return unpack<C::kType>(word);
    return C::kType == Type::bf16 ? __uint_as_float(word & 0xFFFF0000)
                                  : unpack<C::kType>(word >> 16);
  }
}

}  // namespace score_blocks

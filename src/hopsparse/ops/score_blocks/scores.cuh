// Scores of blocks of keys in shared memory, and what takes a head's share of them: the text that
// both kernels have, the one that writes scores and the one that chooses by them.
#pragma once
#include "./corners.cuh"
#include "./newest.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid.cuh"

namespace score_blocks {

// ---- scores --------------------------------------------------------------------------------

// What no query head changes.
template <class C>
struct Row {
  float centre[Facts<C>::kRange ? kEntries : 1];  // twice
  float reach[Facts<C>::kRange ? kEntries : 1];   // twice: with the slack, but for mass
  float size[C::kKind == Kind::mass ? kEntries : 1];
  float mean[Facts<C>::kSum ? kEntries : 1];
};

template <class C>
__device__ __forceinline__ void widen(Row<C>& row, const Raw<C>& raw, float slack, float of_sum) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(kEntries); ++i) {
    if constexpr (Facts<C>::kRange) {
      const float low = entry<C>(raw.low, i), high = entry<C>(raw.high, i);
      const float centre = low + high, range = high - low;
      row.centre[i] = centre;
      if constexpr (C::kKind == Kind::bound) {
        row.reach[i] = fmaf(range, 1.0f + slack, slack * fabsf(centre));
      } else {
        row.reach[i] = range;
        row.size[i] = range + fabsf(centre);
      }
    }
    if constexpr (Facts<C>::kSum) {
      row.mean[i] = __uint_as_float(raw.total[i / 4][i % 4]) * of_sum;
    }
  }
}

// Sums over the lanes of a team: afterwards lane t has that of value t / (lanes / N).
template <class C, int N>
__device__ __forceinline__ float gathered(float (&value)[N]) {
  constexpr int kLanes = Facts<C>::kLanes;
  static_assert(N <= kLanes, "a lane ends with one value");
  int left = N;
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    if (left == 1) {
      value[0] += shuffled(value[0], mask);
      continue;
    }
    left /= 2;
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if (i >= left) break;
      const float low = value[i], high = value[i + left];
      value[i] = (upper ? high : low) + shuffled(upper ? low : high, mask);
    }
  }
  return value[0];
}

// Log of the most that exp(score) of the tokens can sum to, rounded up: n scores between two ends
// with a known mean sum to at most those at both ends with that mean.
__device__ __forceinline__ float mass_of(float centre, float reach, float slack, float mean,
                                         float log_tokens) {
  const float high = centre + reach + slack, low = centre - reach - slack;
  float width = high - low;
  if (width < kLeast) width = kLeast;
  float share = ((mean - low) + slack) / width;  // NaN passes all of these
  if (share < 0.0f) share = 0.0f;
  if (share > 1.0f) share = 1.0f;
  const float part = logf(share + (1.0f - share) * expf(-width));
  const float lost = 0x1p-20f * (1.0f + fabsf(high) + fabsf(low) + log_tokens);
  return high + part + log_tokens + lost;
}

template <class C>
__device__ __forceinline__ void add_products(float (&sum)[4], const Row<C>& row, float q, int i) {
  const float size = fabsf(q);
  if constexpr (Facts<C>::kRange) sum[0] = fmaf(q, row.centre[i], sum[0]);
  if constexpr (C::kKind == Kind::bound) sum[0] = fmaf(size, row.reach[i], sum[0]);
  if constexpr (C::kKind == Kind::mean) sum[0] = fmaf(q, row.mean[i], sum[0]);
  if constexpr (C::kKind == Kind::mass) {
    sum[1] = fmaf(size, row.reach[i], sum[1]);
    sum[2] = fmaf(size, row.size[i], sum[2]);
    sum[3] = fmaf(q, row.mean[i], sum[3]);
  }
}

// The rows of a team, the first of which is this block's row `own`, against `kHeads` query heads.
template <class C>
__device__ __forceinline__ void score_heads(Smem<C>& s, const Args& a,
                                            const Row<C> (&rows)[C::kRows], const Rows& r,
                                            u32 first, u32 own, u32 begin, u32 end) {
  constexpr int kValues = C::kHeads * C::kRows, kSums = C::kKind == Kind::mass ? 4 : 1;
  constexpr u32 kLanes = Facts<C>::kLanes, kEach = kLanes / kValues;
  const u32 lane = threadIdx.x % kLanes;
  float values[kSums][kValues];
#pragma unroll
  for (int g = 0; g < C::kHeads; ++g) {
    float q[kEntries];
#pragma unroll
    for (int i = 0; i < static_cast<int>(kEntries); ++i) {
      q[i] = s.q[first + g][i / 4 * (C::kDim / 2) + lane * 4 + i % 4];
    }
#pragma unroll
    for (int j = 0; j < C::kRows; ++j) {
      float sum[4] = {};
#pragma unroll
      for (int i = 0; i < static_cast<int>(kEntries); ++i) add_products<C>(sum, rows[j], q[i], i);
#pragma unroll
      for (int k = 0; k < kSums; ++k) values[k][g * C::kRows + j] = sum[k];
    }
  }
  float sum[kSums];
#pragma unroll
  for (int k = 0; k < kSums; ++k) sum[k] = gathered<C, kValues>(values[k]);
  const u32 mine = lane / kEach, head = first + mine / C::kRows;
  own += mine % C::kRows;
  float score = sum[0];
  if constexpr (C::kKind == Kind::bound) score += kLeast;
  if constexpr (C::kKind == Kind::mass) {
    const bool last = row_at<C>(r, own) + 1 == r.count;
    const float tokens = static_cast<float>(last ? r.tokens : a.block);
    score = mass_of(sum[0], sum[1], fmaf(a.slack, sum[2], kLeast), sum[3], logf(tokens));
  }
  if (lane % kEach == 0 && head < a.group && own < end) {
    s.scores[head * r.room + own - begin] = score;
  }
}

// A team's rows of a piece whose first is this block's row `first`.
template <class C>
__device__ __forceinline__ void load_piece(Raw<C> (&raw)[C::kRows], const Args& a, const Rows& r,
                                           u32 first) {
  const u32 row = row_at<C>(r, first) + threadIdx.x / Facts<C>::kLanes * C::kRows;
#pragma unroll
  for (int j = 0; j < C::kRows; ++j) load_row<C>(raw[j], a, r, row + j);
}

// Pieces by float32 products.
template <class C>
__device__ __forceinline__ void score_pieces(Smem<C>& s, const Args& a, const Rows& r,
                                             Raw<C> (&now)[C::kRows], u32 begin, u32 end) {
  constexpr u32 kStep = Facts<C>::kStep;
  const float whole = Facts<C>::kOfMean / static_cast<float>(a.block);
  const float last = Facts<C>::kOfMean / static_cast<float>(max(r.tokens, 1u));
  const u32 team = threadIdx.x / Facts<C>::kLanes * C::kRows;
#pragma unroll 1
  for (u32 first = begin; first + threadIdx.x / 32 * kOfWarp<C> < end; first += kStep) {
    Raw<C> next[C::kRows];
    load_piece<C>(next, a, r, first + kStep);
    if (a.ask_later) prefetch_rows<C, 1>(a, r, first + C::kAhead * kStep);
    put_newest<C>(now, s, a, r, first + threadIdx.x / 32 * kOfWarp<C>);
    const u32 row = row_at<C>(r, first) + team;
    Row<C> rows[C::kRows];
#pragma unroll
    for (int j = 0; j < C::kRows; ++j) {
      widen<C>(rows[j], now[j], a.slack, row + j + 1 == r.count ? last : whole);
      now[j] = next[j];
    }
#pragma unroll 1
    for (u32 head = 0; head < a.group; head += C::kHeads) {
      score_heads<C>(s, a, rows, r, head, first + team, begin, end);
    }
  }
}

// What is loaded first of this block's rows from `first` on.
template <class C>
__device__ __forceinline__ void load_rows(Raw<C> (&raw)[C::kRows], const Args& a, const Rows& r,
                                          u32 first) {
  if constexpr (C::kTensor) {
    load_parts<C>(raw, a, r, first);
  } else {
    load_piece<C>(raw, a, r, first);
  }
}

// This block's rows from `begin` to `end`, the first of which are on their way, against every query
// head, into shared memory.
template <class C>
__device__ __forceinline__ void score(Smem<C>& s, const Args& a, const Rows& r,
                                      Raw<C> (&now)[C::kRows], u32 begin, u32 end) {
  if constexpr (C::kTensor) {
    score_parts<C>(s, a, r, now, begin, end);
  } else {
    score_pieces<C>(s, a, r, now, begin, end);
  }
}

// ---- parts of a head's mass ----------------------------------------------------------------

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) value = fmaxf(value, shuffled(value, step));
  return value;
}
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) value += shuffled(value, step);
  return value;
}

// Adds rows to the largest score of each query head, and to the sum of exp below it; NaN is in the
// sum. A head always has the same warp.
template <class C>
__device__ __forceinline__ void add_up(Smem<C>& s, const Args& a, u32 room, u32 count) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u32 head = threadIdx.x / 32; head < a.group; head += C::kWarps) {
    const float* scores = s.scores + head * room;
    const float before = s.top[head];
    float top = before, sum = 0;
    for (u32 i = lane; i < count; i += 32) top = fmaxf(top, scores[i]);
    top = warp_max(top);
    for (u32 i = lane; i < count; i += 32) sum += power(scores[i], top);
    sum = warp_sum(sum);
    __syncwarp();
    if (lane == 0) s.sum[head] = s.sum[head] * power(before, top) + sum, s.top[head] = top;
  }
}

// The barrier that counts what is sent to this block. Others send when all have begun.
template <class C>
__device__ __forceinline__ void expect_parts(Smem<C>& s, const Args& a, u32 blocks_of_cluster) {
  if (threadIdx.x == 0) {
    const u32 bar = shared_address(&s.parts_are_there);
    mbarrier_init(bar, 1);
    mbarrier_expect(bar, blocks_of_cluster * ((a.group + 1) / 2 * 16));
    mbarrier_init_fence();
  }
  __syncwarp();
  cluster_arrive_relaxed();
}

// The largest score and the sum of each query head, of this block, to all blocks of the cluster:
// nobody waits for a fence of all memory, as there is where others come to read.
template <class C>
__device__ __forceinline__ void send_parts(Smem<C>& s, const Args& a, const Rows& r) {
  const u32 pairs = (a.group + 1) / 2;
  for (u32 i = threadIdx.x; i < r.size * pairs; i += Facts<C>::kThreads) {
    const u32 to = i % r.size, head = i / r.size * 2;
    store_async_x4(cluster_address(shared_address(s.parts[r.rank][head]), to),
                   cluster_address(shared_address(&s.parts_are_there), to),
                   __float_as_uint(s.top[head]), __float_as_uint(s.sum[head]),
                   __float_as_uint(s.top[head + 1]), __float_as_uint(s.sum[head + 1]));
  }
}

// Log of the sum of exp of all scores of each query head: a lane has a block. Where it is not
// finite scores stay as they are.
template <class C>
__device__ __forceinline__ void merge(Smem<C>& s, const Args& a, u32 blocks_of_cluster) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll 1
  for (u32 head = threadIdx.x / 32; head < a.group; head += C::kWarps) {
    const bool in = lane < blocks_of_cluster;
    const float own = in ? s.parts[lane][head][0] : -infinity();
    const float part = in ? s.parts[lane][head][1] : 0.0f;
    const float top = warp_max(own);
    const float sum = warp_sum(part * (own == top ? 1.0f : power(own, top)));
    const float whole = top + logf(sum);
    if (lane == 0) s.whole[head] = fabsf(whole) < infinity() ? whole : 0.0f;
  }
}

struct alignas(16) FourScores {
  float of[4];
};

// The largest part of any query head's mass that rows may have, as logarithms: `N` neighbours from
// `at` on in shared memory, 1 or 4.
template <class C, int N>
__device__ __forceinline__ void most_of(float (&most)[N], const Smem<C>& s, const Args& a,
                                        const Rows& r, u32 at) {
#pragma unroll 1
  for (u32 g = 0; g < a.group; ++g) {
    const float* scores = s.scores + g * r.room + at;
    const float whole = s.whole[g];
    FourScores four;
    if constexpr (N == 4) four = *reinterpret_cast<const FourScores*>(scores);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = (N == 4 ? four.of[i] : scores[i]) - whole;
      most[i] = g == 0 || value > most[i] || value != value ? value : most[i];  // NaN stays
    }
  }
}

// ---- the order of both kernels -------------------------------------------------------------

// What a kernel does beside the end of the one ahead.
template <class C>
__device__ __forceinline__ void begin(Smem<C>& s, const Args& a, const Rows& r) {
  if (!a.per_head) expect_parts<C>(s, a, r.size);
  let_next_start();
  if (threadIdx.x < 16) s.top[threadIdx.x] = -infinity(), s.sum[threadIdx.x] = 0;
  if (a.ask_first) prefetch_rows<C, C::kAhead>(a, r, 0);
}

// All rows of this block, whose first ones are on their way: scored, the heads' sums merged, and
// then given to `use`, in tiles that shared memory has room for. Rows that it has no room for, and
// scores of query heads, are computed where they are used.
template <class C, class Use>
__device__ __forceinline__ void score_rows(Smem<C>& s, const Args& a, const Rows& r,
                                           Raw<C> (&now)[C::kRows], Use use) {
  const u32 tiles = max((r.own + r.room - 1) / r.room, 1u);
  const bool once = tiles == 1 && !a.per_head;
#pragma unroll 1
  for (u32 turn = a.per_head; turn < 2; ++turn) {
#pragma unroll 1
    for (u32 tile = 0; tile < tiles; ++tile) {
      const u32 begin = tile * r.room, end = min(begin + r.room, r.own);
      if (turn == 0 || !once) {
        // The first ones are on their way.
        if (turn != a.per_head || tile != 0) load_rows<C>(now, a, r, begin);
        score<C>(s, a, r, now, begin, end);
        __syncthreads();
      }
      if (turn == 0) {
        add_up<C>(s, a, r.room, end - begin);
      } else {
        use(begin, end);
      }
      __syncthreads();  // scores are read before they are written again
    }
    if (turn == 0) {
      cluster_wait();
      send_parts<C>(s, a, r);
      // All that comes here has come by then: nobody has to wait for a block that leaves.
      mbarrier_wait(shared_address(&s.parts_are_there), 0);
      merge<C>(s, a, r.size);
      __syncthreads();
    }
  }
}

}  // namespace score_blocks

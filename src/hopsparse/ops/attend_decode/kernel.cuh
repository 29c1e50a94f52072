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
// On an H200 62 to 64 % of the rate of a copy at 8 sequences of 2,048 tokens, 90 % at 32.

#include "./facts.cuh"
#include "./merge.cuh"
#include "./pages.cuh"
#include "epilogue/value.cuh"
#include "ptx/async.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/grid.cuh"
#include "ptx/mma.cuh"
#include "ptx/power.cuh"
#include "ptx/shared.cuh"

namespace attend_decode {

// ---- products ------------------------------------------------------------------------------

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

// Weights of a tile for one of the halves: scores become powers of two, packed for the second
// product; the factor is that of all that was summed before.
template <class C>
__device__ __forceinline__ float weigh(Seen<C>& seen, u32 (&weights)[2], float (&x)[4], int half,
                                       float scale, u32 tokens, u32 lane) {
  float most = -infinity();
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    x[i] *= scale;
    if (i / 2 * 8 + lane % 4 * 2 + i % 2 >= tokens) x[i] = -infinity();
    most = fmaxf(most, x[i]);
  }
  most = fmaxf(most, of_lane_xor(most, 1));
  most = fmaxf(most, of_lane_xor(most, 2));
  const float top = fmaxf(seen.top[half], most - kRaise<C::kType>), base = base_of(top);
  const float factor = power_of_two(seen.top[half] - base);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) x[i] = power_of_two(x[i] - base);
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
  constexpr bool kBf16 = C::kType == Type::bf16;
  const u32 lane = threadIdx.x % 32;
  // Heads by tokens 0 to 7, and 8 to 15, of even and of odd steps: chains of half the length.
  float scores[2][2][4] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 keys[4];
    load_matrix_x4(keys, stage + (at ^ step * 32));
    const u32(&q)[4] = C::kSharedQueries ? s.q[step][lane] : seen.q[step];
    multiply_add<kBf16>(scores[step % 2][0], q, keys[0], keys[1]);
    multiply_add<kBf16>(scores[step % 2][1], q, keys[2], keys[3]);
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
      multiply_add<kBf16>(seen.out[step][half], values, weights[half][0], weights[half][1]);
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

// y[tokens, out] = act(alpha * x[tokens, k] @ w[out, k]^T + bias) + residual for a block-sparse w
// of 16 bits, as strips.py lays it out: strips of kPanels x 64 rows, each a list of steps of 64
// columns, gathered from kGroups places of k.
//
//   item       one strip by kTokens tokens, transposed in registers: out-features are wgmma's M
//   consumers  two warpgroups, which take the items of a block in turns: one stores while the
//              other multiplies (90 % of zeros leave a strip of 4096 columns 7 steps)
//   producer   one thread, which keeps kStages steps filled: the weights of a step lie side by
//              side, its tokens are kGroups boxes of kWidth columns
//   grid       persistent; items by falling number of steps, dealt out forth and back
// Only what a strip keeps is read, so that tokens that arrive at an SM bound a tile of 64 rows:
// 40 KiB for the 512 clocks of 64 x 256 x 64. Measured: docs/ops/spmm_bsr.md.

#include "epilogue/activation.cuh"
#include "epilogue/value.cuh"
#include "pipe/ring.cuh"
#include "pipe/turns.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/bulk.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/raster.cuh"

namespace spmm_bsr {

struct Args {
  TensorMap x;           // [tokens, k], boxes of x_rows tokens x Config::kWidth columns
  const u8* values;      // [steps, kPanels x 64 rows, 128 bytes], chunks where wgmma looks for them
  const int* columns;    // [steps, kGroups]: the first column of each group
  const int4* strips;    // [strips]: strip, its first step, its steps (1 or more), 0; falling steps
  void* y;               // [tokens, out], contiguous
  const void* bias;      // [out], or null
  const void* residual;  // [tokens, out], contiguous; read if Config::kResidual
  float alpha;
  int tokens, out;
  int strip_count, token_tiles;
  int raster_group;
  int x_rows;  // tokens that a step loads: kTokens, less where x has fewer
};

// ---- Shared memory -----------------------------------------------------------------------------

constexpr u32 kRowBytes = 128;  // a step of one row of w, or of one token

template <class C>
struct Smem {
  static constexpr int kGroups = 64 / C::kWidth;
  static constexpr u32 kX = C::kTokens * kRowBytes;
  static constexpr u32 kGroup = kX / kGroups;  // rows of 2 x kWidth bytes, swizzled in that span
  static constexpr u32 kPanel = 64 * kRowBytes;
  static constexpr u32 kValues = C::kPanels * kPanel;
  static constexpr u32 kStore = C::kDirect ? 0 : C::kStoreTokens * 128;

  static constexpr u32 kValuesAt = C::kStages * kX;
  static constexpr u32 kStoreAt = kValuesAt + C::kStages * kValues;
  static constexpr u32 kFullAt = kStoreAt + 2 * 2 * kStore;
  static constexpr u32 kEmptyAt = kFullAt + C::kStages * 8;
  static constexpr u32 kBytes = kEmptyAt + C::kStages * 8;
};

template <class C>
__device__ __forceinline__ void init_barriers(u32 smem) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(smem + Smem<C>::kFullAt + s * 8, 1);
      mbarrier_init(smem + Smem<C>::kEmptyAt + s * 8, 4);  // the warps of the one that reads it
    }
    mbarrier_init_fence();
  }
}

// ---- Items -------------------------------------------------------------------------------------

struct Item {
  int strip, first, steps, token;
};

// The item that a block has in a round; the list ends where this is past it. Blocks are dealt to
// forth and back, as items become shorter: who got the longest of a round gets the shortest of
// the next. plan.py has the same, to predict how even that is.
__device__ __forceinline__ int dealt(int round) {
  const int block = blockIdx.x, blocks = gridDim.x;
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// All strips for some tokens, then for the next ones, so that x stays in L2. The last tokens start
// where all of a tile is inside: TMA takes longer for what it fills with zeros. What two items
// then both store, they both computed in the same way.
template <class C>
__device__ __forceinline__ Item item_at(const Args& args, int index) {
  const TileAt tile = raster(index, args.strip_count, args.token_tiles, args.raster_group);
  const int4 strip = args.strips[tile.out];
  const int token = min(tile.tokens * C::kTokens, max(0, args.tokens - C::kTokens));
  return {strip.x, strip.y, strip.z, token};
}

// ---- Producer ----------------------------------------------------------------------------------

template <class C>
struct Columns {
  int first[Smem<C>::kGroups];

  __device__ __forceinline__ void load(const Args& args, int step) {
    const int* from = args.columns + (long long)step * Smem<C>::kGroups;
#pragma unroll
    for (int g = 0; g < Smem<C>::kGroups; ++g) first[g] = from[g];
  }
};

template <class C>
__device__ __forceinline__ void fill_stage(const Args& args, u32 smem, u32 stage, int step,
                                           int token, const Columns<C>& columns) {
  using S = Smem<C>;
  const u32 bar = smem + S::kFullAt + stage * 8, x = smem + stage * S::kX;
  mbarrier_expect(bar, S::kValues + args.x_rows * kRowBytes);
#pragma unroll
  for (int g = 0; g < S::kGroups; ++g) {
    tma_load(x + g * S::kGroup, args.x, bar, columns.first[g], token);
  }
  bulk_load(smem + S::kValuesAt + stage * S::kValues, args.values + (long long)step * S::kValues,
            S::kValues, bar);
}

template <class C>
__device__ __forceinline__ void produce(const Args& args, u32 smem) {
  const int items = args.strip_count * args.token_tiles;
  Ring<C::kStages> ring;
  ring.parity = 1;  // of the phase before the first: every stage starts empty
  for (int round = 0; dealt(round) < items; ++round) {
    const Item item = item_at<C>(args, dealt(round));
    Columns<C> next;
    next.load(args, item.first);
#pragma unroll 1
    for (int s = 0; s < item.steps; ++s) {
      const Columns<C> columns = next;
      // A step ahead: else each would wait for L2 once more.
      if (s + 1 < item.steps) next.load(args, item.first + s + 1);
      mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);
      fill_stage<C>(args, smem, ring.stage, item.first + s, item.token, columns);
      ring.advance();
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

template <class C>
using Sums = float[C::kPanels][C::kTokens / 2];

// The 16 columns that an instruction multiplies, of rows whose bytes lie swizzled in 2 x kWidth.
template <class C>
__device__ __forceinline__ u64 token_descriptor(u32 x, int slice) {
  constexpr u32 kSpan = 2 * C::kWidth, kSlices = C::kWidth / 16;
  constexpr u64 kSwizzle = kSpan == 128 ? 1 : kSpan == 64 ? 2 : 3;
  const u32 at = x + slice / kSlices * Smem<C>::kGroup + slice % kSlices * 32;
  return u64((at & 0x3FFFF) >> 4) | u64(8 * kSpan >> 4) << 32 | kSwizzle << 62;
}

template <class C, int Panel = 0>
__device__ __forceinline__ void multiply_panels(u64 a, const u64 (&b)[4]) {
  if constexpr (Panel < C::kPanels) {
    const u64 values[4] = {a, a + (32 >> 4), a + (64 >> 4), a + (96 >> 4)};
    C::template multiply<Panel>(values, b);
    multiply_panels<C, Panel + 1>(a + (Smem<C>::kPanel >> 4), b);
  }
}

template <class C, int Panel = 0>
__device__ __forceinline__ void zero_panels() {
  if constexpr (Panel < C::kPanels) {
    C::template zero<Panel>();
    zero_panels<C, Panel + 1>();
  }
}

template <class C, int Panel = 0>
__device__ __forceinline__ void read_panels(Sums<C>& d) {
  if constexpr (Panel < C::kPanels) {
    C::template read<Panel>(d[Panel]);
    read_panels<C, Panel + 1>(d);
  }
}

// The products of the step that the ring is at, once it is there, as one batch.
template <class C>
__device__ __forceinline__ void issue_step(u32 smem, Ring<C::kStages> ring) {
  using S = Smem<C>;
  const u32 x = smem + ring.stage * S::kX;
  const u64 a = swizzled_descriptor(smem + S::kValuesAt + ring.stage * S::kValues);
  const u64 b[4] = {token_descriptor<C>(x, 0), token_descriptor<C>(x, 1), token_descriptor<C>(x, 2),
                    token_descriptor<C>(x, 3)};
  mbarrier_wait(smem + S::kFullAt + ring.stage * 8, ring.parity);
  wgmma_fence();
  multiply_panels<C>(a, b);
  wgmma_commit();
}

// Each warp says that it has read a stage.
template <class C>
__device__ __forceinline__ void release(u32 smem, u32 stage) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(smem + Smem<C>::kEmptyAt + stage * 8);
}

// All steps of an item. The stages of one item come after those of the item before, so the other
// warpgroup has to have seen all of its own: before that, the parity of a barrier could be that of
// the round of the ring before.
template <class C>
__device__ __forceinline__ void sum(Sums<C>& d, u32 smem, u32 wg, Ring<C::kStages>& ring, int steps,
                                    bool first, bool last) {
  zero_panels<C>();
  if (!first) wait_for_turn(wg);
  // do, not while: a path around the loop makes ptxas copy the sums while they are in flight.
  int s = 0;
#pragma unroll 1
  do {
    issue_step<C>(smem, ring);
    wgmma_wait<1>();  // the step before this one is read
    if (s > 0) release<C>(smem, ring.previous());
    ring.advance();
  } while (++s < steps);
  if (!last) give_turn_to(1 - wg);
  wgmma_wait<0>();
  read_panels<C>(d);
  release<C>(smem, ring.previous());
}

}  // namespace spmm_bsr

#include "./epilogue.cuh"

namespace spmm_bsr {

template <class C>
__device__ __forceinline__ void consume(const Args& args, u32 smem, u32 wg) {
  const int items = args.strip_count * args.token_tiles;
  C::declare();
  Ring<C::kStages> ring;
  u32 turn = 0;
  for (int round = 0; dealt(round) < items; ++round) {
    const Item item = item_at<C>(args, dealt(round));
    if (round % 2 != wg) {
      pass_over(ring, item.steps);
      continue;
    }
    Sums<C> d;
    const Terms<C> terms(args, item);
    sum<C>(d, smem, wg, ring, item.steps, round == 0, dealt(round + 1) >= items);
    store_item<C>(args, d, smem, wg, turn, item, terms);
  }
}

template <class C>
__device__ __forceinline__ void run(const Args& args, u8* dynamic) {
  const u32 smem = shared_address(dynamic);
  if (smem % 1024 != 0) __trap();            // swizzled tiles start on 1024 bytes
  if (threadIdx.x == 256) prefetch(args.x);  // else the first load waits for it
  init_barriers<C>(smem);
  __syncthreads();
  const u32 wg = uniform(threadIdx.x / 128);
  if (wg == 2) {
    keep_registers<C::kProducerRegisters>();
    if (threadIdx.x / 32 % 4 == 0 && elect_one()) produce<C>(args, smem);
    __syncwarp();
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(args, smem, wg);
  }
}

}  // namespace spmm_bsr

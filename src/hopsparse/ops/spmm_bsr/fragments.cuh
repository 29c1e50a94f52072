// y[tokens, out] = act(alpha * x[tokens, k] @ w[out, k]^T + bias) + residual for a block-sparse w
// of 16 bits whose blocks have multiples of 16 rows and columns, as fragments.py lays it out.
//
//   item       one strip of 16 slots by kTokens tokens; a slot is kHeight x 16 rows
//   consumers  16 warps, one slot each: what a slot has in a slab of 128 columns is multiplied by
//              mma.sync, weights from registers, tokens by ldmatrix; nothing is shared but stages
//   producer   one warp (of four, which have registers to give), which keeps kStages slabs of
//   tokens filled by TMA; the blocks of a cluster
//              have the two strips of a pair and load half of each slab for both
//   grid       persistent; items by falling number of pieces, dealt out forth and back
// A piece of 16 columns costs kTokens x 32 bytes of ldmatrix (32 clocks for 128 tokens) and as many
// clocks of the tensor cores for each fragment, a slab twice its bytes. Measured, a piece takes 60
// to 66 clocks with 128 tokens and 52 with 64, more than those: docs/design/0010-small-blocks.md.

#include "epilogue/activation.cuh"
#include "epilogue/value.cuh"
#include "pipe/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/raster.cuh"

namespace spmm_bsr {

struct Args {
  TensorMap x;           // [tokens, k], boxes of x_rows tokens x 64 columns
  const u8* values;      // [pieces, kHeight, 32 lanes, 16 bytes]: fragments.py
  const u32* words;      // [pieces]: 8 x the slab, as its pair counts them, + column there
  const int4* slots;     // [pairs, 2, 16]: first row, first piece, end of its pieces, 0
  const int* slabs;      // slabs of k that each pair walks
  const int4* pairs;     // [pairs]: pair, its first slab, its slabs, 0; falling pieces
  void* y;               // [tokens, out], contiguous
  const void* bias;      // [out], or null
  const void* residual;  // [tokens, out], contiguous; read if Config::kResidual
  float alpha;
  int tokens, out;
  int pair_count, token_tiles;
  int raster_group;
  int x_rows;  // tokens that a block loads: kTokens / kCluster, less where x has fewer
};

constexpr int kSlots = 16, kStrips = 2, kSlabColumns = 128;
constexpr u32 kRowBytes = 128;  // 64 columns of a token: the span of the swizzle

// ---- Shared memory -----------------------------------------------------------------------------

template <class C>
struct Smem {
  static constexpr u32 kBox = C::kTokens * kRowBytes;
  static constexpr u32 kSlab = kSlabColumns / 64 * kBox;
  static constexpr u32 kLine = C::kHeight * 32;  // what a slot has of one token of y
  static constexpr u32 kStore = C::kDirect ? 0 : 16 * kLine;

  static constexpr u32 kStoreAt = C::kStages * kSlab;
  static constexpr u32 kFullAt = kStoreAt + kSlots * 2 * kStore;
  static constexpr u32 kEmptyAt = kFullAt + C::kStages * 8;
  static constexpr u32 kBytes = kEmptyAt + C::kStages * 8;
};

template <class C>
__device__ __forceinline__ void init_barriers(u32 smem) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(smem + Smem<C>::kFullAt + s * 8, 1);
      mbarrier_init(smem + Smem<C>::kEmptyAt + s * 8, kSlots * C::kCluster);
    }
    mbarrier_init_fence();
  }
}

// ---- Items -------------------------------------------------------------------------------------

// Where this block stands: which of its cluster it is, and which cluster that is of how many.
template <class C>
struct Place {
  int rank, cluster, clusters;

  __device__ __forceinline__ Place()
      : rank(blockIdx.x % C::kCluster),
        cluster(blockIdx.x / C::kCluster),
        clusters(gridDim.x / C::kCluster) {}

  // The item that it has in a round, as in kernel.cuh.
  __device__ __forceinline__ int dealt(int round) const {
    return round * clusters + (round % 2 == 0 ? cluster : clusters - 1 - cluster);
  }
};

struct Item {
  int strip, first, slabs, token;
};

template <class C>
__device__ __forceinline__ int items_in_all(const Args& args) {
  return args.pair_count * (kStrips / C::kCluster) * args.token_tiles;
}

// All strips for some tokens, then for the next ones, so that x stays in L2. The last tokens start
// where all of a tile is inside; what two items then both store, they both computed alike.
template <class C>
__device__ __forceinline__ Item item_at(const Args& args, Place<C> at, int index) {
  constexpr int kOfPair = kStrips / C::kCluster;
  const TileAt tile = raster(index, args.pair_count * kOfPair, args.token_tiles, args.raster_group);
  const int4 pair = args.pairs[tile.out / kOfPair];
  const int strip = pair.x * kStrips + (kOfPair == 1 ? at.rank : tile.out % kOfPair);
  return {strip, pair.y, pair.z, min(tile.tokens * C::kTokens, max(0, args.tokens - C::kTokens))};
}

// ---- Producer ----------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void fill_stage(const Args& args, u32 smem, Place<C> at, u32 stage,
                                           int slab, int token) {
  using S = Smem<C>;
  const u32 bar = smem + S::kFullAt + stage * 8;
  const u32 x = smem + stage * S::kSlab + at.rank * args.x_rows * kRowBytes;
  mbarrier_expect(bar, kSlabColumns / 64 * C::kCluster * args.x_rows * kRowBytes);
#pragma unroll
  for (int box = 0; box < kSlabColumns / 64; ++box) {
    const int column = slab * kSlabColumns + box * 64, row = token + at.rank * args.x_rows;
    if constexpr (C::kCluster == 1) {
      tma_load(x + box * S::kBox, args.x, bar, column, row);
    } else {
      tma_load_multicast(x + box * S::kBox, args.x, bar, (1 << C::kCluster) - 1, column, row);
    }
  }
}

// All of a warp: its lanes ask for the next 32 slabs at once, since one at a time would wait for L2
// at each.
template <class C>
__device__ __forceinline__ void produce(const Args& args, u32 smem, Place<C> at) {
  const int lane = threadIdx.x % 32, items = items_in_all<C>(args);
  Ring<C::kStages> ring;
  ring.parity = 1;  // of the phase before the first: every stage starts empty
  for (int round = 0; at.dealt(round) < items; ++round) {
    const Item item = item_at<C>(args, at, at.dealt(round));
    int known = 0;
#pragma unroll 1
    for (int s = 0; s < item.slabs; ++s) {
      if (s % 32 == 0) known = s + lane < item.slabs ? args.slabs[item.first + s + lane] : 0;
      const int slab = __shfl_sync(0xFFFFFFFF, known, s % 32);
      if (lane == 0) {
        mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);
        fill_stage<C>(args, smem, at, ring.stage, slab, item.token);
      }
      __syncwarp();
      ring.advance();
    }
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

template <class C>
using Sums = float[C::kHeight][C::kTokens / 8][4];

// The pieces of a slot: kHeld of them in registers, asked for that long before they are needed, and
// kBehind more on their way to L1. Held in turns, since moving one would wait for it.
template <class C>
struct Pieces {
  const u8* from;
  int left;  // that were not asked for yet
  Piece a[C::kHeld][C::kHeight];

  __device__ __forceinline__ Pieces(const Args& args, int first, int end)
      : from(args.values + first * (512LL * C::kHeight) + threadIdx.x % 32 * 16),
        left(end - first),
        a{} {
#pragma unroll
    for (int i = 0; i < C::kHeld; ++i) ask(i);
  }
  __device__ __forceinline__ void ask(int i) {
#pragma unroll
    for (int h = 0; h < C::kHeight; ++h) {
      reload_here_if(a[i][h], left > 0, from + h * 512);
      if (C::kBehind > 0 && left > C::kBehind) {
        prefetch_l1(from + C::kBehind * 512 * C::kHeight + h * 512);
      }
    }
    from += 512 * C::kHeight;
    --left;
  }
};

// Their words, 32 at a time in the lanes of a warp and as many behind them: all lanes asking for
// one word made the compiler wait for it at once, to have it in a uniform register.
struct Words {
  const u32* from;
  int count;
  u32 now, next;

  __device__ __forceinline__ Words(const Args& args, int first, int end)
      : from(args.words + first), count(end - first), now(lanes_from(0)), next(lanes_from(32)) {}
  __device__ __forceinline__ u32 lanes_from(int piece) const {
    const int at = piece + threadIdx.x % 32;
    return at < count ? from[at] : 0;
  }
  // Of the pieces one after the other, and one more.
  __device__ __forceinline__ u32 at(int piece) {
    if (piece > 0 && piece % 32 == 0) {
      now = next;
      next = lanes_from(piece + 32);
    }
    return __shfl_sync(0xFFFFFFFF, now, piece % 32);
  }
};

// Where this lane reads the rows of ldmatrix: tokens 0 to 15 of a box, two chunks of 8 columns,
// swizzled by the token.
__device__ __forceinline__ u32 lane_in_box() {
  const u32 lane = threadIdx.x % 32;
  return (lane / 16 * 8 + lane % 8) * kRowBytes + ((lane / 8 % 2) ^ lane % 8) * 16;
}

// A piece by all tokens of a stage. A column of the slab is 32 bytes of a token: four to a box,
// where the swizzle makes a sum of them an xor.
template <class C>
__device__ __forceinline__ void multiply_piece(Sums<C>& d, u32 word, const Piece (&a)[C::kHeight],
                                               u32 stage) {
  constexpr int kLoads = C::kTokens / 16, kBuffers = kLoads < 3 ? kLoads : 3;
  const u32 x = (stage + word / 4 % 2 * Smem<C>::kBox) ^ (word % 4 * 32);
  u32 b[kBuffers][4];
#pragma unroll
  for (int i = 0; i < kBuffers - 1; ++i) load_matrix_x4(b[i], x + i * 16 * kRowBytes);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int next = i + kBuffers - 1;
    if (next < kLoads) load_matrix_x4(b[next % kBuffers], x + next * 16 * kRowBytes);
#pragma unroll
    for (int h = 0; h < C::kHeight; ++h) {
      const u32(&now)[4] = b[i % kBuffers];
      multiply_add<C::kNumbers == Type::bf16>(d[h][2 * i], a[h].word, now[0], now[1]);
      multiply_add<C::kNumbers == Type::bf16>(d[h][2 * i + 1], a[h].word, now[2], now[3]);
    }
  }
}

// This warp has read a stage: told to each block that fills it.
template <class C>
__device__ __forceinline__ void release(u32 address, u32 stage) {
  __syncwarp();
  if (threadIdx.x % 32 < C::kCluster) {
    if constexpr (C::kCluster == 1) {
      mbarrier_arrive(address + stage * 8);
    } else {
      mbarrier_arrive_remote(address + stage * 8);
    }
  }
}

// What this lane tells to: the empty barriers of one block of the cluster.
template <class C>
__device__ __forceinline__ u32 release_address(u32 smem) {
  const u32 empty = smem + Smem<C>::kEmptyAt;
  if constexpr (C::kCluster == 1) return empty;
  return cluster_address(empty, threadIdx.x % C::kCluster);
}

// The slabs of an item, one after the other, each waited for and released once.
template <class C>
struct Walk {
  u32 smem, empty;  // the latter: whom this lane tells that a stage was read
  Ring<C::kStages> ring;
  int slab;

  __device__ __forceinline__ void wait() {
    mbarrier_wait(smem + Smem<C>::kFullAt + ring.stage * 8, ring.parity);
  }
  __device__ __forceinline__ void leave() {
    release<C>(empty, ring.stage);
    ring.advance();
  }
  __device__ __forceinline__ void go_to(int next) {
#pragma unroll 1
    for (; slab < next; ++slab) {
      leave();
      wait();
    }
  }
};

template <class C>
__device__ __forceinline__ void sum_slot(const Args& args, Sums<C>& d, Walk<C>& walk, u32 lane_at,
                                         const int4& slot, int slabs) {
  if (slabs == 0) return;
  const int count = slot.z - slot.y;
  Words words(args, slot.y, slot.z);
  Pieces<C> pieces(args, slot.y, slot.z);
  walk.slab = 0;
  walk.wait();
  u32 word = words.at(0);
#pragma unroll 1
  for (int piece = 0; piece < count; piece += C::kHeld) {
#pragma unroll
    for (int i = 0; i < C::kHeld; ++i) {
      if (piece + i < count) {
        walk.go_to(word / 8);
        const u32 stage = lane_at + walk.ring.stage * Smem<C>::kSlab, now = word;
        word = words.at(piece + i + 1);
        multiply_piece<C>(d, now, pieces.a[i], stage);
        pieces.ask(i);
      }
    }
  }
  walk.go_to(slabs - 1);
  walk.leave();
}

}  // namespace spmm_bsr

#include "./slot_epilogue.cuh"

namespace spmm_bsr {

template <class C>
__device__ __forceinline__ void consume(const Args& args, u32 smem, Place<C> at, u32 warp) {
  const int items = items_in_all<C>(args);
  Walk<C> walk = {smem, release_address<C>(smem)};
  u32 lane_at = smem + lane_in_box();
  asm volatile("" : "+r"(lane_at));  // else it is computed again for every piece
  for (int round = 0; at.dealt(round) < items; ++round) {
    const Item item = item_at<C>(args, at, at.dealt(round));
    const int4 slot = args.slots[item.strip * kSlots + warp];
    Sums<C> d = {};
    sum_slot<C>(args, d, walk, lane_at, slot, item.slabs);
    store_slot<C>(args, d, smem, warp, slot.x, item.token);
  }
}

template <class C>
__device__ __forceinline__ void run(const Args& args, u8* dynamic) {
  const u32 smem = shared_address(dynamic);
  if (smem % 1024 != 0) __trap();  // swizzled boxes start on 1024 bytes
  if (threadIdx.x == kSlots * 32) prefetch(args.x);
  init_barriers<C>(smem);
  if constexpr (C::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const u32 warp = uniform(threadIdx.x / 32);
  const Place<C> at;
  if (warp >= kSlots) {
    keep_registers<C::kProducerRegisters>();
    if (warp == kSlots) produce<C>(args, smem, at);
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(args, smem, at, warp);
  }
  // The other block of the cluster still writes here and arrives on barriers of this one.
  __syncwarp();
  if constexpr (C::kCluster > 1) cluster_sync();
}

}  // namespace spmm_bsr

// y[tokens, out] = act(alpha * x[tokens, k] @ w[out, k]^T + bias) + residual for a packed 2:4 w, of
// 16 bits, or of 8 with scales of w and of x. Either may have 4 bits in memory.
//
// wgmma.sp wants its sparse operand on the side of M = 64 rows: that is w, so a block computes a
// tile of y transposed, out-features x tokens, and stores it back transposed.
//   consumers  Config::kWarpgroups warpgroups, each kPanels panels of 64 out-features x kTokens;
//              kWays of them have the same ones, and take the stages in turn
//   producer   one thread, which keeps kStages stages of kUnits units of k filled by TMA; a unit is
//              128 bytes of a token: kWords times 64 columns, an index word of each for a thread;
//              all its threads where x has 4 bits
//   cluster    kClusterOut blocks share their tokens, kClusterTokens blocks their weights: each
//              loads a slice and multicasts it; kClusterK blocks share a tile, each a part of k
//   grid       persistent; tiles in the order of tile/raster.cuh
//   experts    w may be several weights, one below the other; tokens are sorted by which they meet
// Bound: tensor cores from some hundred tokens on, weight bytes below. Measured:
// docs/ops/spmm_nm.md.

#include "epilogue/activation.cuh"
#include "epilogue/nibbles.cuh"
#include "epilogue/value.cuh"
#include "pipe/ring.cuh"
#include "pipe/ways.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/raster.cuh"

namespace spmm_nm {

struct Args {
  TensorMap x;           // [tokens, k], boxes of x_rows tokens x a unit; not if Config::kFourX
  TensorMap values;      // [steps, panels, Smem::kStep bytes]
  TensorMap meta;        // [panels, k / 64, 128 words]
  void* y;               // [tokens, out / Config::kFold], contiguous
  const void* bias;      // [out], of type Config::kBias, or null
  const void* residual;  // [tokens, out], contiguous; read if Config::kResidual
  const void* w_scale;   // float32 [out, w_groups], or [1] where w_groups is 0, if Config::kScaled;
                         // bfloat16 [out, w_groups] if Config::kFourW
  const float* x_scale;  // [tokens], or [1] where x_scale_step is 0; read if Config::kScaled
  const u8* x_codes;     // [tokens, k / 2], rows x_pitch apart, if Config::kFourX
  const int* ends;       // [experts], one past the last token of each, if Config::kExperts
  float alpha;
  float out_multiplier;        // of y in 8 bits, before it is rounded
  int tokens, out;             // the latter of one expert
  int stages_of_k;             // even: k in stages, rounded up; what lies past k is zero
  int out_tiles, token_tiles;  // in tiles of a cluster
  int raster_group;
  int x_rows;  // tokens that a block loads: its slice of a tile, less where x has fewer
  int w_groups, x_scale_step;
  int x_pitch, x_bytes;  // of x_codes: from row to row, and of a row, both multiples of 16
  int w_shift;           // 1 << w_shift columns share a scale, if Config::kFourW
  int experts;
  int ahead;  // stages of weights that are loaded before the kernel ahead has ended
};

// ---- Shared memory ---------------------------------------------------------------------------

constexpr u32 kWordBytes = 512;   // index words of 64 rows x 64 columns
constexpr u32 kTokenBytes = 128;  // a unit of one token
constexpr int kMostExperts = 256;

template <class C>
struct Smem {
  static constexpr int kTeams = C::kWarpgroups / C::kWays;  // warpgroups with panels of their own
  static constexpr int kPanels = kTeams * C::kPanels;
  static constexpr u32 kX = C::kUnits * C::kTokens * kTokenBytes;
  // Kept values of 64 rows x one instruction; of 4 bits, of 64 rows x 64 columns.
  static constexpr u32 kStep = C::kFourW ? 1024 : 2048;
  static constexpr int kStepsOfUnit = C::kFourW ? C::kWords : 2;
  static constexpr u32 kValues = kStepsOfUnit * C::kUnits * kPanels * kStep;
  static constexpr u32 kMeta = C::kUnits * C::kWords * kPanels * kWordBytes;
  static constexpr u32 kStore = C::kDirect ? 0 : C::kStoreTokens * 128;

  static constexpr u32 kValuesAt = C::kStages * kX;
  static constexpr u32 kStoreAt = kValuesAt + C::kStages * kValues;
  static constexpr u32 kMetaAt = kStoreAt + 2 * kTeams * kStore;
  static constexpr u32 kFullAt = kMetaAt + C::kStages * kMeta;
  static constexpr u32 kEmptyAt = kFullAt + C::kStages * 8;
  static constexpr u32 kPartsAt = kEmptyAt + C::kStages * 8;
  static constexpr u32 kExpertsAt = kPartsAt + (C::kClusterK > 1 ? 8 : 0);

  // Sums of a part of k: of another block, where stages were; and of another warpgroup.
  static constexpr u32 kPart = kPanels * 64 * C::kTokens * 4;
  static constexpr u32 kWaysAt = (kExpertsAt + (C::kExperts ? kMostExperts * 4 : 0) + 15) / 16 * 16;
  static constexpr u32 kBytes = C::kWays > 1 ? kWaysAt + (C::kWays - 1) * kPart
                                             : kExpertsAt + (C::kExperts ? kMostExperts * 4 : 0);
  static_assert((C::kClusterK - 1) * kPart <= kStoreAt);
};

// ---- Barriers ----------------------------------------------------------------------------------

// Blocks of a cluster that share a part of k, and all of them.
template <class C>
constexpr int kShare = C::kClusterOut * C::kClusterTokens;
template <class C>
constexpr int kBlocks = kShare<C> * C::kClusterK;

// Where a block stands in its cluster.
template <class C>
struct Place {
  u32 out, tokens, part, first;  // the last: rank of the first block of its part of k

  __device__ __forceinline__ explicit Place(u32 rank) {
    out = rank % C::kClusterOut;
    tokens = rank / C::kClusterOut % C::kClusterTokens;
    part = rank / kShare<C>;
    first = part * kShare<C>;
  }
};

// Blocks whose stages this block fills too: those of its row and of its column in the cluster.
template <class C>
constexpr int kReaders = C::kClusterOut + C::kClusterTokens - 1;

template <class C>
__device__ __forceinline__ void init_barriers(u32 smem) {
  using S = Smem<C>;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(smem + S::kFullAt + s * 8, C::kFourX ? 1 + 4 : 1);
      mbarrier_init(smem + S::kEmptyAt + s * 8, 4 * S::kTeams * kReaders<C>);
    }
    if constexpr (C::kClusterK > 1) {
      mbarrier_init(smem + S::kPartsAt, 1);
      mbarrier_expect(smem + S::kPartsAt, (C::kClusterK - 1) * S::kPart);
    }
    mbarrier_init_fence();
  }
}

// What this lane tells when its warp is done with a stage: the empty barrier of one block that
// fills it. Lanes past the last of them tell nothing.
template <class C>
__device__ __forceinline__ u32 release_address(u32 smem, Place<C> at) {
  const u32 lane = threadIdx.x % 32, empty = smem + Smem<C>::kEmptyAt;
  if constexpr (kReaders<C> == 1) return empty;
  u32 block = lane + at.tokens * C::kClusterOut;  // the blocks that share my tokens
  if (lane >= C::kClusterOut) {                   // and those that share my weights
    const u32 other = lane - C::kClusterOut;
    block = at.out + (other < at.tokens ? other : other + 1) * C::kClusterOut;
  }
  return cluster_address(empty, at.first + (lane < kReaders<C> ? block : 0));
}

template <class C>
__device__ __forceinline__ void release(u32 address, u32 stage) {
  if (threadIdx.x % 32 < kReaders<C>) {
    if constexpr (kReaders<C> == 1) {
      mbarrier_arrive(address + stage * 8);
    } else {
      mbarrier_arrive_remote(address + stage * 8);
    }
  }
}

// ---- Tiles -------------------------------------------------------------------------------------

// Where a block's tile starts in y. One at an edge is moved back until all of it is inside, as far
// as it can: TMA takes longer for what it fills with zeros than for what it loads (384 tokens
// took 1.7 times as long as 512). What two tiles then both store, they both computed in the same
// way.
struct Origin {
  int panel, token;
  int expert_panel, end;  // where the rows of its expert start, and where its tokens end
};

template <class C>
__device__ __forceinline__ Origin origin_in(const Args& args, TileAt tile, Place<C> at,
                                            int expert_panel, int begin, int end) {
  const int panel = (tile.out * C::kClusterOut + at.out) * Smem<C>::kPanels;
  const int token = begin + (tile.tokens * C::kClusterTokens + at.tokens) * C::kTokens;
  const int panels = (args.out + 63) / 64;
  return {expert_panel + min(panel, max(0, panels - Smem<C>::kPanels)),
          min(token, max(begin, end - C::kTokens)), expert_panel, end};
}

}  // namespace spmm_nm

#include "./experts.cuh"

namespace spmm_nm {

template <class C>
__device__ __forceinline__ int tiles_in_all(const Args& args, u32 smem) {
  if constexpr (C::kExperts) return token_tiles_until<C>(smem, args.experts) * args.out_tiles;
  return args.out_tiles * args.token_tiles;
}

template <class C>
__device__ __forceinline__ Origin origin_of(const Args& args, u32 smem, int index, Place<C> at) {
  if constexpr (C::kExperts) return origin_of_expert<C>(args, smem, index, at);
  const TileAt tile = raster(index, args.out_tiles, args.token_tiles, args.raster_group);
  return origin_in<C>(args, tile, at, 0, 0, args.tokens);
}

}  // namespace spmm_nm

#include "./producer.cuh"

namespace spmm_nm {

// ---- Consumers ---------------------------------------------------------------------------------

template <class C>
using Sums = typename C::Total[C::kPanels][C::kTokens / 2];
// The two rows of a panel that this thread has sums of.
__device__ __forceinline__ int row_of_panel(int half) {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + half * 8;
}

// What of a stage is in registers: index words and, where they have 4 bits, kept values.
template <class C>
struct Operands {
  u32 e[C::kPanels][C::kUnits * C::kWords];
  u32 a[C::kFourW ? C::kPanels : 1][C::kFourW ? 2 * C::kUnits : 1][4];
};

}  // namespace spmm_nm

#include "./four_bit_weights.cuh"

namespace spmm_nm {

template <class C, int Panel = 0>
__device__ __forceinline__ void multiply_panels(u64 a, u64 b, const Operands<C>& in, int unit) {
  if constexpr (Panel < C::kPanels) {
    const u64 values[2] = {a, a + (Smem<C>::kPanels * Smem<C>::kStep >> 4)};
    const u64 tokens[2] = {b, b + (64 >> 4)};
    u32 words[C::kWords];
#pragma unroll
    for (int i = 0; i < C::kWords; ++i) words[i] = in.e[Panel][unit * C::kWords + i];
    C::template multiply<Panel>(values, tokens, words);
    multiply_panels<C, Panel + 1>(a + (Smem<C>::kStep >> 4), b, in, unit);
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
__device__ __forceinline__ void read_panels(typename C::Number (&d)[C::kPanels][C::kTokens / 2]) {
  if constexpr (Panel < C::kPanels) {
    C::template read<Panel>(d[Panel]);
    read_panels<C, Panel + 1>(d);
  }
}

// The products of the stage that the ring is at, once it is full: what registers hold of it into
// some that no wgmma in flight reads, then all instructions as one batch.
template <class C>
__device__ __forceinline__ void issue_stage(Operands<C>& in, u32 smem, u32 wg,
                                            Ring<C::kStages> ring, const FourBitScales<C>& scales) {
  using S = Smem<C>;
  constexpr u32 kStepsApart = S::kPanels * S::kStep;
  constexpr int kOfPanel = C::kUnits * C::kWords;
  const u32 meta = smem + S::kMetaAt + ring.stage * S::kMeta +
                   wg * C::kPanels * kOfPanel * kWordBytes + index_word<C>() * 4;
  const u32 values = smem + S::kValuesAt + ring.stage * S::kValues + wg * C::kPanels * S::kStep;
  const u64 b = swizzled_descriptor(smem + ring.stage * S::kX);
  mbarrier_wait(smem + S::kFullAt + ring.stage * 8, ring.parity);
  if constexpr (C::kFourW) {
    issue_widened<C>(in, meta, values, b, scales);
  } else {
#pragma unroll
    for (int p = 0; p < C::kPanels; ++p) {
#pragma unroll
      for (int i = 0; i < kOfPanel; ++i) {
        in.e[p][i] = load_shared<0>(meta + (p * kOfPanel + i) * kWordBytes);
      }
    }
    const u64 a = core_matrix_descriptor(values, 128, 256);
    wgmma_fence();
#pragma unroll
    for (int u = 0; u < C::kUnits; ++u) {
      const u64 bu = b + (u * C::kTokens * kTokenBytes >> 4);
      multiply_panels<C>(a + (2 * u * kStepsApart >> 4), bu, in, u);
    }
    wgmma_commit();
  }
}

// Batches of a stage: one, or one for each instruction where the next one is widened meanwhile.
template <class C>
constexpr int kBatches = C::kFourW ? 2 * C::kUnits * C::kPanels : 1;

// One stage; the stage before it is released once this one alone is in flight.
template <class C>
__device__ __forceinline__ void multiply_stage(Operands<C>& in, u32 smem, u32 wg,
                                               Ring<C::kStages>& ring, u32 freed, bool first,
                                               const FourBitScales<C>& scales) {
  issue_stage<C>(in, smem, wg, ring, scales);
  wgmma_wait<kBatches<C>>();
  if (!first) release<C>(freed, previous<C::kWays>(ring));
  advance<C::kWays>(ring);
}

// All of k in the registers of the tensor cores, which for 8-bit floats keep fewer bits of a sum
// than float32 has.
template <class C>
__device__ __forceinline__ void sum_fast(const Args& args, Sums<C>& d, u32 smem, u32 wg,
                                         Ring<C::kStages>& ring, u32 freed, int panel0,
                                         int first_stage) {
  zero_panels<C>();
  Operands<C> in[2];
  FourBitScales<C> scales[2];
  const FourBitRows<C> rows(args, panel0);
  if constexpr (C::kFourW) scales[0].load(args, rows, first_stage * C::kUnits);
  // do, not while: a path around the loop makes ptxas copy the sums while they are in flight.
  int k = 0;
#pragma unroll 1
  do {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      if constexpr (C::kFourW) {  // of the stage after this one
        const int next = first_stage + (k + odd + 1) * C::kWays;
        scales[1 - odd].load(args, rows, next * C::kUnits);
      }
      multiply_stage<C>(in[odd], smem, wg, ring, freed, k + odd == 0, scales[odd]);
    }
    k += 2;
  } while (k * C::kWays < args.stages_of_k);
  wgmma_wait<0>();
  read_panels<C>(d);
  release<C>(freed, previous<C::kWays>(ring));
}

}  // namespace spmm_nm

#include "./epilogue.cuh"
#include "./four_bit_tokens.cuh"
#include "./promoted.cuh"

namespace spmm_nm {

// ---- Consumer ----------------------------------------------------------------------------------

// The parts of k of one tile become one sum, in the first block, which then has the tile: parts 1,
// 2 and on are added in this order, whoever comes first. A cluster of this kind has one tile, so
// that nothing is loaded any more where the parts arrive.
template <class C>
__device__ __forceinline__ void add_parts(Sums<C>& d, u32 smem, u32 wg, Place<C> at) {
  using S = Smem<C>;
  constexpr u32 kOfWarpgroup = S::kPart / S::kTeams;
  const u32 mine = smem + wg * kOfWarpgroup + threadIdx.x % 128 * 16;
  cluster_sync_relaxed();  // no block reads its stages any more
  if (at.part > 0) {
    const u32 rank = at.tokens * C::kClusterOut + at.out;
    const u32 to = cluster_address(mine + (at.part - 1) * S::kPart, rank);
    const u32 bar = cluster_address(smem + S::kPartsAt, rank);
#pragma unroll
    for (int i = 0; i < C::kPanels * C::kTokens / 2; i += 4) {
      const auto* sums = &d[i / (C::kTokens / 2)][i % (C::kTokens / 2)];
      store_async_x4(to + i / 4 * 2048, bar, bits(sums[0]), bits(sums[1]), bits(sums[2]),
                     bits(sums[3]));
    }
    return;
  }
  mbarrier_wait(smem + S::kPartsAt, 0);
#pragma unroll 1
  for (int part = 0; part < C::kClusterK - 1; ++part) {
#pragma unroll
    for (int i = 0; i < C::kPanels * C::kTokens / 2; i += 4) {
      auto* sums = &d[i / (C::kTokens / 2)][i % (C::kTokens / 2)];
      const uint4 other = load_shared_x4(mine + part * S::kPart + i / 4 * 2048);
      sums[0] += number<typename C::Total>(other.x), sums[1] += number<typename C::Total>(other.y);
      sums[2] += number<typename C::Total>(other.z), sums[3] += number<typename C::Total>(other.w);
    }
  }
}

// The sums of warpgroups that took stages in turn become one, in the first of a team: those of the
// second, the third and on are added in this order. The others go on to the next tile meanwhile.
template <class C>
__device__ __forceinline__ void add_ways(Sums<C>& d, u32 smem, u32 team, u32 way, bool first,
                                         bool last) {
  using S = Smem<C>;
  constexpr u32 kOfTeam = S::kPart / S::kTeams, kThreads = 128 * C::kWays;
  const u32 full = 8 + 2 * team, free = full + 1;  // named barriers behind those of the epilogue
  const u32 mine = smem + S::kWaysAt + team * kOfTeam + threadIdx.x % 128 * 16;
  if (way > 0) {
    if (!first) named_barrier<kThreads>(free);
#pragma unroll
    for (int i = 0; i < C::kPanels * C::kTokens / 2; i += 4) {
      const auto* sums = &d[i / (C::kTokens / 2)][i % (C::kTokens / 2)];
      store_shared_x4(mine + (way - 1) * S::kPart + i / 4 * 2048,
                      {bits(sums[0]), bits(sums[1]), bits(sums[2]), bits(sums[3])});
    }
    arrive_at_barrier<kThreads>(full);
    return;
  }
  named_barrier<kThreads>(full);
#pragma unroll 1
  for (int other = 0; other < C::kWays - 1; ++other) {
#pragma unroll
    for (int i = 0; i < C::kPanels * C::kTokens / 2; i += 4) {
      auto* sums = &d[i / (C::kTokens / 2)][i % (C::kTokens / 2)];
      const uint4 part = load_shared_x4(mine + other * S::kPart + i / 4 * 2048);
      sums[0] += number<typename C::Total>(part.x), sums[1] += number<typename C::Total>(part.y);
      sums[2] += number<typename C::Total>(part.z), sums[3] += number<typename C::Total>(part.w);
    }
  }
  if (!last) arrive_at_barrier<kThreads>(free);
}

template <class C>
__device__ __forceinline__ void consume(const Args& args, u32 smem, Place<C> at, u32 wg) {
  const u32 team = wg / C::kWays, way = wg % C::kWays;
  const int tiles = tiles_in_all<C>(args, smem), step = gridDim.x / kBlocks<C>;
  const u32 freed = release_address<C>(smem, at);
  C::declare();
  Ring<C::kStages> ring;
  ring.stage = way;
  u32 turn = 0;
  wait_for_previous();
  for (int index = blockIdx.x / kBlocks<C>; index < tiles; index += step) {
    const Origin from = origin_of<C>(args, smem, index, at);
    Sums<C> d;
    const int panel0 = from.panel + team * C::kPanels;
    const int first_stage = at.part * args.stages_of_k + way;
    const Terms<C> terms(args, from, panel0);
    if constexpr (C::kPromoted) {
      sum_promoted<C>(args, d, smem, team, ring, freed, panel0, first_stage);
    } else {
      sum_fast<C>(args, d, smem, team, ring, freed, panel0, first_stage);
    }
    if constexpr (C::kWays > 1) {
      add_ways<C>(d, smem, team, way, index < step, index + step >= tiles);
      if (way > 0) {
        if constexpr (C::kClusterK > 1) cluster_sync_relaxed();  // that of add_parts
        continue;
      }
    }
    if constexpr (C::kClusterK > 1) {
      add_parts<C>(d, smem, team, at);
      if (at.part > 0) return;
    }
    store_tile<C>(args, d, smem, team, turn, from, terms);
  }
}

template <class C>
__device__ __forceinline__ void run(const Args& args, u8* dynamic) {
  constexpr bool kCluster = kBlocks<C> > 1;
  const u32 smem = shared_address(dynamic);
  const Place<C> at(kCluster ? cluster_rank() : 0);
  if (smem % 1024 != 0) __trap();  // swizzled tiles start on 1024 bytes
  let_next_start();
  if (threadIdx.x == C::kWarpgroups * 128) {  // else the first load waits for them
    if constexpr (!C::kFourX) prefetch(args.x);
    prefetch(args.values);
    prefetch(args.meta);
  }
  init_barriers<C>(smem);
  if constexpr (C::kExperts) {
    wait_for_previous();
    count_tiles<C>(args, smem);
    clear_what_nobody_has<C>(args);
  }
  if constexpr (kCluster) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const u32 wg = uniform(threadIdx.x / 128);
  if (wg == C::kWarpgroups) {
    keep_registers<C::kProducerRegisters>();
    if constexpr (C::kFourX) {
      produce_from_four_bits<C>(args, smem, at);
    } else if (threadIdx.x / 32 % 4 == 0 && elect_one()) {
      produce<C>(args, smem, at);
    }
    __syncwarp();
    if constexpr (C::kClusterK > 1) cluster_sync_relaxed();  // that of add_parts
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(args, smem, at, wg);
  }
  // Blocks of the cluster still write here and arrive on barriers of this one.
  if constexpr (kCluster) cluster_sync();
}

}  // namespace spmm_nm

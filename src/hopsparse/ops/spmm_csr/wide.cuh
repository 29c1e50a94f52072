// spmm_csr of 33 to 512 tokens: y = x @ w.T + bias, for w [out, k] as bits and 16-bit values
// (packed.py) that are unpacked into the registers that wgmma takes its operand from.
//
//   item       kPanels x 64 rows by kTokens tokens, out-features are wgmma's M
//   consumers  kPanels x kWays warpgroups of 64 rows each; ways take units of k in turn. A warp
//              unpacks its 16 rows of the next unit while wgmma multiplies this one
//   producer   a warp: a lane for each unit of a step copies its words and values, and one lane of
//              each way the tokens, in the order in which arrange.cuh lays them
//   grid       items, those of the same rows side by side. Of the blocks of a cluster kShare have
//              other rows each, and load a slice of the tokens for all of them; kParts times as
//              many have parts of k
//   sums       through shared memory at the end, added in order over ways and parts
// Bounds: products, 2 clocks a token and unit; unpacking, about 200 issue slots of each scheduler a
// unit, kept or not; bytes of w. Not run on a GPU yet: docs/ops/spmm_csr.md.

#include "./unpack.cuh"
#include "epilogue/value.cuh"
#include "pipe/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace spmm_csr_wide {

using spmm_csr_tiles::kPrefixBytes;
using spmm_csr_tiles::kWordBytes;

struct Args {
  TensorMap x;         // [tokens, k] from arrange.cuh, boxes of x_rows tokens x 64 columns
  const u8* words;     // [units][16 columns][four lanes][strip of 16 rows], 32 bits each
  const u8* prefixes;  // values of the unit before those of a word, likewise, 16 bits each
  const u8* values;    // of unit after unit, each from 16 bytes on
  const u32* starts;   // where those of a unit start, in 16 bytes; one more than units
  const u8* bias;      // [rows], or none
  u8* y;               // [tokens, rows]
  u32 rows, tokens;
  u32 units, steps;         // units of a panel; steps of a part of k, an even number
  u32 token_tiles, x_rows;  // tokens that a block loads for a step, its slice of a tile
};

constexpr u32 kPanels = 2, kBlockRows = 64 * kPanels;
constexpr u32 kRowPad = kBlockRows + 4;  // words from token to token of sums: see `write_sums`

template <class C>
constexpr u32 kBlocks = C::kParts * C::kShare;  // of a cluster: those of a part side by side

template <class C>
struct Smem {
  static constexpr u32 kUnits = kPanels * C::kWays;  // of a step
  static constexpr u32 kX = C::kTokens * 128,
                       kUnit = kWordBytes + kPrefixBytes + C::kUnitValues * 2;
  static constexpr u32 kStageX = C::kWays * kX, kStageUnits = kUnits * kUnit;
  static constexpr u32 kUnitsAt = C::kStages * kStageX;
  static constexpr u32 kStagesEnd = kUnitsAt + C::kStages * kStageUnits;
  static constexpr u32 kSums = C::kTokens * kRowPad * 4;  // of a way; they go where stages were
  static constexpr u32 kSumsEnd = C::kWays * kSums;
  static constexpr u32 kFullAt = kStagesEnd > kSumsEnd ? kStagesEnd : kSumsEnd;
  static constexpr u32 kEmptyAt = kFullAt + C::kStages * 8, kBytes = kEmptyAt + C::kStages * 8;
};

template <class C>
__device__ __forceinline__ void init_barriers(u32 smem) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      mbarrier_init(smem + Smem<C>::kFullAt + s * 8, Smem<C>::kUnits);  // lanes of the producer
      // Warps that multiply by what this block loads.
      mbarrier_init(smem + Smem<C>::kEmptyAt + s * 8, 4 * Smem<C>::kUnits * C::kShare);
    }
    mbarrier_init_fence();
  }
}

// What a block works on: its part of k, its place among those who share tokens, its first panel and
// token. The last tokens start where all of a tile is inside: TMA takes longer for what it fills
// with zeros. What two blocks then both store, they both computed in the same way.
struct Place {
  u32 part, share, panel, token;

  template <class C>
  static __device__ __forceinline__ Place of(const Args& args) {
    const u32 rank = blockIdx.x % kBlocks<C>, item = blockIdx.x / kBlocks<C>;
    const u32 part = rank / C::kShare, share = rank % C::kShare;
    const u32 token = item % args.token_tiles * C::kTokens;
    const u32 last = args.tokens > C::kTokens ? args.tokens - C::kTokens : 0;
    return {part, share, (item / args.token_tiles * C::kShare + share) * kPanels,
            token < last ? token : last};
  }
};

// The units that one warpgroup, or one lane of the producer, has: one of each step.
template <class C>
struct Column {
  u32 panel, first;  // of w, and the first unit of that panel
  u32 count;         // steps whose unit exists

  __device__ __forceinline__ Column(const Args& args, const Place& at, u32 way, u32 panel_of_block)
      : panel(at.panel + panel_of_block), first(at.part * args.steps * C::kWays + way) {
    const bool exists = panel * 64 < args.rows && first < args.units;
    count = exists ? (args.units - first + C::kWays - 1) / C::kWays : 0;
    if (count > args.steps) count = args.steps;
  }
};

// ---- Producer ----------------------------------------------------------------------------------

// One lane: the units of one panel and way, and for the first panel the tokens of the way. What is
// behind the last unit is multiplied as zeros, by tokens that TMA fills with zeros.
template <class C>
struct Producer {
  const Args& args;
  const Place at;
  const Column<C> column;
  const u32 smem, lane;
  u32 from, to;  // pieces of 16 bytes that the next unit's values are

  __device__ __forceinline__ Producer(const Args& args, const Place& at, u32 smem, u32 lane)
      : args(args),
        at(at),
        column(args, at, lane / kPanels, lane % kPanels),
        smem(smem),
        lane(lane),
        from(0),
        to(0) {
    if (column.count > 0) from = args.starts[unit(0)], to = args.starts[unit(0) + 1];
  }
  __device__ __forceinline__ u32 unit(u32 step) const {
    return column.panel * args.units + column.first + step * C::kWays;
  }

  __device__ __forceinline__ void fill_units(u32 stage, u32 step) {
    const u32 bar = smem + Smem<C>::kFullAt + stage * 8;
    const bool exists = step < column.count;
    const u32 bytes = (to - from) * 16;
    const u32 x = lane % kPanels == 0 ? C::kShare * args.x_rows * 128 : 0;
    mbarrier_expect(bar, x + (exists ? kWordBytes + kPrefixBytes + bytes : 0));
    if (!exists) return;
    const u32 here =
        smem + Smem<C>::kUnitsAt + stage * Smem<C>::kStageUnits + lane * Smem<C>::kUnit;
    const u64 index = unit(step);
    const u8* values = args.values + u64(from) * 16;
    // A step ahead: else each would wait for L2 once more.
    if (step + 1 < column.count) {
      from = args.starts[index + C::kWays];
      to = args.starts[index + C::kWays + 1];
    }
    bulk_load(here, args.words + index * kWordBytes, kWordBytes, bar);
    bulk_load(here + kWordBytes, args.prefixes + index * kPrefixBytes, kPrefixBytes, bar);
    if (bytes > 0) bulk_load(here + kWordBytes + kPrefixBytes, values, bytes, bar);
  }
  // This block's slice, to all who share the tokens.
  __device__ __forceinline__ void fill_tokens(u32 stage, u32 step) const {
    if (lane % kPanels != 0) return;
    const u32 bar = smem + Smem<C>::kFullAt + stage * 8, first = at.share * args.x_rows;
    const u32 x = smem + stage * Smem<C>::kStageX + lane / kPanels * Smem<C>::kX + first * 128;
    const u32 k = (column.first + step * C::kWays) * 64;
    if constexpr (C::kShare == 1) {
      tma_load(x, args.x, bar, k, at.token);
    } else {
      const u16 mask = ((1 << C::kShare) - 1) << at.part * C::kShare;
      tma_load_multicast(x, args.x, bar, mask, k, at.token + first);
    }
  }
};

// Weights depend on no kernel ahead of this one: a ring of them comes before the wait for it.
template <class C>
__device__ __forceinline__ void produce(const Args& args, const Place& at, u32 smem, u32 lane) {
  Producer<C> lane_of(args, at, smem, lane);
  const u32 ahead = args.steps < C::kStages ? args.steps : C::kStages;
#pragma unroll 1
  for (u32 step = 0; step < ahead; ++step) lane_of.fill_units(step, step);
  wait_for_previous();
  Ring<C::kStages> ring;
  ring.parity = 1;  // of the phase before the first: every stage starts empty
#pragma unroll 1
  for (u32 step = 0; step < args.steps; ++step) {
    if (step >= ahead) {
      mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);
      lane_of.fill_units(ring.stage, step);
    }
    lane_of.fill_tokens(ring.stage, step);
    ring.advance();
  }
}

// ---- Consumers ---------------------------------------------------------------------------------

// What wgmma takes of a unit: a tile for each 16 columns.
struct Fragments {
  u32 tile[4][4];
};

// This warp's 16 rows of a unit; zeros where it does not exist.
template <int Tile = 0>
__device__ __forceinline__ void unpack_unit(Fragments& to, u32 words, u32 prefixes, u32 values,
                                            bool exists) {
  if constexpr (Tile < 4) {
    const u32 word = load_shared<Tile * 128>(words);
    const u32 prefix = load_shared_u16(prefixes + Tile * 64);
    spmm_csr_tiles::unpack_tile(to.tile[Tile], values, exists ? word : 0, prefix, threadIdx.x % 32);
    unpack_unit<Tile + 1>(to, words, prefixes, values, exists);
  }
}

template <class C>
struct Consumer {
  const u32 smem, x, words, prefixes, values;  // of stage 0: where this thread reads
  const u32 freed;                             // where a lane tells a block that its stage was read

  __device__ __forceinline__ Consumer(const Place& at, u32 smem, u32 way, u32 panel)
      : smem(smem),
        x(smem + way * Smem<C>::kX),
        words(smem + Smem<C>::kUnitsAt + (way * kPanels + panel) * Smem<C>::kUnit +
              threadIdx.x % 32 / 4 * 16 + threadIdx.x % 128 / 32 * 4),
        prefixes(smem + Smem<C>::kUnitsAt + (way * kPanels + panel) * Smem<C>::kUnit + kWordBytes +
                 threadIdx.x % 32 / 4 * 8 + threadIdx.x % 128 / 32 * 2),
        values(smem + Smem<C>::kUnitsAt + (way * kPanels + panel) * Smem<C>::kUnit + kWordBytes +
               kPrefixBytes),
        freed(C::kShare == 1 ? smem + Smem<C>::kEmptyAt
                             : cluster_address(smem + Smem<C>::kEmptyAt,
                                               at.part * C::kShare + threadIdx.x % C::kShare)) {}

  __device__ __forceinline__ void wait(Ring<C::kStages> ring) const {
    mbarrier_wait(smem + Smem<C>::kFullAt + ring.stage * 8, ring.parity);
  }
  __device__ __forceinline__ void unpack(Fragments& to, u32 stage, bool exists) const {
    const u32 at = stage * Smem<C>::kStageUnits;
    unpack_unit(to, words + at, prefixes + at, values + at, exists);
  }
  __device__ __forceinline__ void multiply(const Fragments& w, u32 stage) const {
    const u64 b = swizzled_descriptor(x + stage * Smem<C>::kStageX);
    const u64 tokens[4] = {b, b + (32 >> 4), b + (64 >> 4), b + (96 >> 4)};
    wgmma_fence();
    C::template multiply<0>(w.tile, tokens);
    wgmma_commit();
  }
  // Each warp says that it has read a stage, to all who fill it.
  __device__ __forceinline__ void release(u32 stage) const {
    if (threadIdx.x % 32 >= C::kShare) return;
    if constexpr (C::kShare == 1) {
      mbarrier_arrive(freed + stage * 8);
    } else {
      mbarrier_arrive_remote(freed + stage * 8);
    }
  }
};

// All steps of this warpgroup. `count` have a unit; products of the others add zeros.
template <class C>
__device__ __forceinline__ void sum(float (&d)[C::kTokens / 2], const Args& args,
                                    const Consumer<C>& warp, u32 count) {
  C::template zero<0>();
  Fragments w[2];
  Ring<C::kStages> ring;
  warp.wait(ring);
  warp.unpack(w[0], ring.stage, count > 0);
  u32 step = 0;
  // do, not while: a path around the loop makes ptxas copy the sums while they are in flight.
#pragma unroll 1
  do {
#pragma unroll
    for (u32 odd = 0; odd < 2; ++odd) {
      warp.multiply(w[odd], ring.stage);
      wgmma_wait<1>();  // the unit before this one is read, its registers are free
      if (step + odd > 0) warp.release(ring.previous());
      ring.advance();
      const u32 next = step + odd + 1;
      if (next < args.steps) warp.wait(ring);
      warp.unpack(w[1 - odd], ring.stage, next < count);
    }
    step += 2;
  } while (step < args.steps);
  wgmma_wait<0>();
  C::template read<0>(d);
}

// ---- Sums --------------------------------------------------------------------------------------

// Each thread's sums, [token][row]: rows of one token are 4 words more than 128 apart, so that the
// 8 rows and 4 tokens of a store lie in banks of their own.
template <class C>
__device__ __forceinline__ void write_sums(const float (&d)[C::kTokens / 2], u32 smem, u32 way,
                                           u32 panel) {
  const u32 row = panel * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const u32 at = smem + way * Smem<C>::kSums + (threadIdx.x % 4 * 2 * kRowPad + row) * 4;
#pragma unroll
  for (u32 i = 0; i < C::kTokens / 2; ++i) {
    store_shared_u32(at + (i / 4 * 8 + i % 2) * (kRowPad * 4) + i / 2 % 2 * 32, bits(d[i]));
  }
}

// Four rows of a token, of all ways and parts in order.
template <class C>
__device__ __forceinline__ void add_sums(float (&sum)[4], u32 share, u32 at) {
#pragma unroll
  for (u32 part = 0; part < C::kParts; ++part) {
#pragma unroll
    for (u32 way = 0; way < C::kWays; ++way) {
      const u32 from = at + way * Smem<C>::kSums;
      uint4 found;
      if constexpr (C::kParts > 1) {
        found = load_cluster_x4(cluster_address(from, part * C::kShare + share));
      } else {
        found = load_shared_x4(from);
      }
      sum[0] += number<float>(found.x), sum[1] += number<float>(found.y);
      sum[2] += number<float>(found.z), sum[3] += number<float>(found.w);
    }
  }
}

// Tokens of the item, shared out among the blocks of a cluster and their warps; a lane has 4 rows.
template <class C>
__device__ __forceinline__ void store_item(const Args& args, const Place& at, u32 smem) {
  constexpr u32 kShare = C::kTokens / C::kParts, kWarps = 4 * Smem<C>::kUnits;
  const u32 row = threadIdx.x % 32 * 4, out = at.panel * 64 + row;
  if (out >= args.rows) return;
  float bias[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const bool exists = args.bias != nullptr && out + i < args.rows;
    bias[i] = exists ? load_value<C::kType>(args.bias, out + i) : 0.0f;
  }
  const bool whole = args.rows % 4 == 0;
#pragma unroll 2
  for (u32 i = threadIdx.x / 32; i < kShare; i += kWarps) {
    const u32 mine = at.part * kShare + i, token = at.token + mine;
    if (token >= args.tokens) return;
    float sum[4] = {bias[0], bias[1], bias[2], bias[3]};
    add_sums<C>(sum, at.share, smem + (mine * kRowPad + row) * 4);
    const u64 place = u64(token) * args.rows + out;
    if (whole) {
      *reinterpret_cast<uint2*>(args.y + place * 2) = {pack<C::kType>(sum[0], sum[1]),
                                                       pack<C::kType>(sum[2], sum[3])};
    } else {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        if (out + j < args.rows) store_value<C::kType>(args.y, place + j, sum[j]);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void consume(const Args& args, const Place& at, u32 smem, u32 wg) {
  const u32 way = wg / kPanels, panel = wg % kPanels;
  const Consumer<C> warp(at, smem, way, panel);
  const Column<C> column(args, at, way, panel);
  C::declare();
  float d[C::kTokens / 2];
  sum<C>(d, args, warp, column.count);
  named_barrier<128 * Smem<C>::kUnits>(1);  // nobody reads a stage any more
  write_sums<C>(d, smem, way, panel);
  if constexpr (C::kParts > 1) {
    cluster_sync();
  } else {
    named_barrier<128 * Smem<C>::kUnits>(1);
  }
  store_item<C>(args, at, smem);
}

template <class C>
__device__ __forceinline__ void run(const Args& args, u8* dynamic) {
  const u32 smem = shared_address(dynamic);
  if (smem % 1024 != 0) __trap();  // swizzled tiles start on 1024 bytes
  const Place at = Place::of<C>(args);
  if (threadIdx.x == 128 * Smem<C>::kUnits) prefetch(args.x);  // else the first load waits for it
  init_barriers<C>(smem);
  if constexpr (kBlocks<C> > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const u32 wg = uniform(threadIdx.x / 128);
  if (wg == Smem<C>::kUnits) {
    keep_registers<C::kProducerRegisters>();
    if (threadIdx.x % 128 < Smem<C>::kUnits) produce<C>(args, at, smem, threadIdx.x % 32);
    __syncwarp();
    if constexpr (C::kParts > 1) cluster_sync();  // that of `consume`
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(args, at, smem, wg);
  }
  // Others still read sums of this block, and arrive on its barriers.
  __syncwarp();
  if constexpr (kBlocks<C> > 1) cluster_sync();
}

}  // namespace spmm_csr_wide

// spmm_csr of few tokens: y = x @ w.T + bias by tensor cores, for w [out, k] as bits and 16-bit
// values.
//
// w lies in units of 64 rows x 64 columns (packed.py): 16 tiles of 16 x 16, each 256 bits in the
// order in which the lanes of mma.m16n8k16 hold them, and the values of set bits in that order. A
// lane finds its eight numbers by counting bits: one population count for two of them. A block has
// a panel of units, and its warps equal parts of k; sums of warps are added in order. A warp copies
// its units to shared memory kStages - 1 ahead (cp.async), and needs no other warp before the end.
//
// Bound: bytes of w, 2 a value and 3/16 an entry, kept or not. Counting takes about 65 instructions
// a tile, which at 80 % sparsity is as long. Not measured yet.

#include "epilogue/value.cuh"
#include "ptx/base.cuh"

namespace spmm_csr_tiles {

constexpr u32 kPanelRows = 64, kUnitTiles = 16, kStrips = 4, kTileWords = 8;
constexpr u32 kWordBytes = kUnitTiles * kTileWords * 4, kPrefixBytes = kUnitTiles * kTileWords * 2;
constexpr u32 kRowPad = 68;  // words from token to token of sums: lanes of a warp in distinct banks

struct Args {
  const u32* words;                 // [units][tile][half of the lanes][8 x 8 block]
  const u16* prefixes;              // values of the unit before those of a word, likewise
  const u8* values;                 // of unit after unit, each from 16 bytes on
  const u32* starts;                // where those of a unit start, in 16 bytes; one more than units
  const u64* fragments;             // x [token block][16 columns][8 tokens][lane]
  const u8* bias;                   // [rows], or none
  u8* y;                            // [tokens, rows]
  u32 rows, tokens, units, unused;  // units of a panel
};

template <class C>
struct Facts {
  static constexpr u32 kStageBytes = kWordBytes + kPrefixBytes + C::kUnitValues * 2;
  static constexpr u32 kTokens = C::kTokenTiles * 8;
};

// ---- copies --------------------------------------------------------------------------------

__device__ __forceinline__ void copy_piece(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Left>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// Starts the copy of a unit, whose values are pieces first to last.
__device__ __forceinline__ void copy_unit(u32 to, const Args& a, u32 unit, u32 first, u32 last,
                                          u32 lane) {
  copy_piece(to + lane * 16, a.words + u64(unit) * (kWordBytes / 4) + lane * 4);
  if (lane < kPrefixBytes / 16) {
    copy_piece(to + kWordBytes + lane * 16, a.prefixes + u64(unit) * (kPrefixBytes / 2) + lane * 8);
  }
  to += kWordBytes + kPrefixBytes;
  for (u32 piece = first + lane; piece < last; piece += 32) {
    copy_piece(to + (piece - first) * 16, a.values + u64(piece) * 16);
  }
}

// ---- one tile ------------------------------------------------------------------------------

struct alignas(16) Words {
  u32 block[4];
};
struct alignas(8) Prefixes {
  u16 block[4];
};

// The two neighbouring numbers of a lane in an 8 x 8 block.
__device__ __forceinline__ u32 pair_of(const u16* values, u32 word, u32 prefix, u32 lane) {
  const u32 shift = lane % 16 * 2, two = word >> shift & 3;
  const u16* from = values + prefix + __popc(word & ((1u << shift) - 1));
  const u32 low = two & 1 ? from[0] : 0, high = two & 2 ? from[two & 1] : 0;
  return low | high << 16;
}

template <class C>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&w)[4], u64 x) {
  const u32 low = u32(x), high = u32(x >> 32);
  if constexpr (C::kType == Type::bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
  }
}

template <class C>
using Sums = float[kStrips][C::kTokenTiles][4];

// A unit that has arrived in shared memory.
template <class C>
__device__ __forceinline__ void multiply_unit(Sums<C>& sums, const u8* stage,
                                              const u64 (&x)[4][C::kTokenTiles], u32 lane) {
  const u16* values = reinterpret_cast<const u16*>(stage + kWordBytes + kPrefixBytes);
#pragma unroll
  for (int column = 0; column < 4; ++column) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const u32 at = (column * kStrips + strip) * 2 + lane / 16;
      const Words words = reinterpret_cast<const Words*>(stage)[at];
      const Prefixes before = reinterpret_cast<const Prefixes*>(stage + kWordBytes)[at];
      u32 w[4];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        w[block] = pair_of(values, words.block[block], before.block[block], lane);
      }
#pragma unroll
      for (int tile = 0; tile < C::kTokenTiles; ++tile) {
        multiply_add<C>(sums[strip][tile], w, x[column][tile]);
      }
    }
  }
}

// ---- the block -----------------------------------------------------------------------------

// Sums of all warps, in order, with the bias.
template <class C>
__device__ __forceinline__ void finish(const Args& a, const Sums<C>& sums, float* shared, u32 warp,
                                       u32 lane) {
  constexpr u32 kTokens = Facts<C>::kTokens;
  float* mine = shared + warp * kTokens * kRowPad;
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int tile = 0; tile < C::kTokenTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 row = strip * 16 + lane / 4 + i / 2 * 8, token = tile * 8 + lane % 4 * 2 + i % 2;
        mine[token * kRowPad + row] = sums[strip][tile][i];
      }
    }
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < kTokens * kPanelRows; i += C::kWarps * 32) {
    const u32 row = blockIdx.x * kPanelRows + i % kPanelRows;
    const u32 token = blockIdx.y * kTokens + i / kPanelRows;
    if (row >= a.rows || token >= a.tokens) continue;
    float sum = a.bias == nullptr ? 0.0f : load_value<C::kType>(a.bias, row);
#pragma unroll
    for (int other = 0; other < C::kWarps; ++other) {
      sum += shared[(other * kTokens + i / kPanelRows) * kRowPad + i % kPanelRows];
    }
    store_value<C::kType>(a.y, u64(token) * a.rows + row, sum);
  }
}

// Grid: x panels, y blocks of tokens.
template <class C>
__device__ __forceinline__ void multiply(const Args& a) {
  extern __shared__ __align__(16) u8 smem[];
  constexpr u32 kStage = Facts<C>::kStageBytes, kAhead = C::kStages - 1;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u8* stages = smem + warp * C::kStages * kStage;
  const u32 panel = blockIdx.x * a.units;
  const u32 first = panel + warp * a.units / C::kWarps;
  const u32 last = panel + (warp + 1) * a.units / C::kWarps;
  const u64* x = a.fragments + u64(blockIdx.y) * a.units * 4 * C::kTokenTiles * 32 + lane;
  Sums<C> sums{};
  // Where values of the next unit to copy start and end; the end is read a copy ahead.
  u32 from = 0, to = 0;
  if (first < last) from = a.starts[first], to = a.starts[first + 1];
  u32 copied = first;
  const auto copy_next = [&] {
    if (copied < last) {
      copy_unit(shared_address(stages + (copied - first) % C::kStages * kStage), a, copied, from,
                to, lane);
      from = to;
      if (++copied < last) to = a.starts[copied + 1];
    }
    commit_copies();  // also where there is none, so that groups count units
  };
  for (u32 i = 0; i < kAhead; ++i) copy_next();
#pragma unroll 1
  for (u32 unit = first; unit < last; ++unit) {
    u64 fragments[4][C::kTokenTiles];
#pragma unroll
    for (int i = 0; i < 4 * C::kTokenTiles; ++i) {
      const u64 at = u64(unit - panel) * 4 * C::kTokenTiles + i;
      fragments[i / C::kTokenTiles][i % C::kTokenTiles] = x[at * 32];
    }
    wait_for_copies<kAhead - 1>();
    __syncwarp();  // all lanes see the unit, and are done with the one before, which goes now
    copy_next();
    multiply_unit<C>(sums, stages + (unit - first) % C::kStages * kStage, fragments, lane);
  }
  __syncthreads();  // sums go where units were
  finish<C>(a, sums, reinterpret_cast<float*>(smem), warp, lane);
}

}  // namespace spmm_csr_tiles

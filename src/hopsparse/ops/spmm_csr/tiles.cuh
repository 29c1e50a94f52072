// spmm_csr of few tokens: y = x @ w.T + bias by tensor cores, for w [out, k] as bits and 16-bit
// values.
//
// w lies in units of 64 rows x 64 columns (packed.py): 16 tiles of 16 x 16, each 256 bits in the
// order in which the lanes of mma.m16n8k16 hold them, and the values of set bits in that order. A
// lane has eight neighbouring bits, and its values lie one behind the other: one population count
// finds the first, each set bit takes the next. Columns of a tile are dealt out so that a lane has
// four neighbours of x too, and reads them as they lie. A block has a panel of units, and its warps
// equal parts of k; sums of warps are added in order. A warp copies its units to shared memory
// kStages - 1 ahead (cp.async), and needs no other warp before the end.
//
// Bound: bytes of w, 2 a value and 3/16 an entry, kept or not; above 50 % sparsity the instructions
// of a tile, which are the same for every sparsity.

#include "./unpack.cuh"
#include "epilogue/value.cuh"
#include "ptx/base.cuh"

namespace spmm_csr_tiles {

constexpr u32 kPanelRows = 64, kStrips = 4;
constexpr u32 kRowPad = 68;  // words from token to token of sums: lanes of a warp in distinct banks

struct Args {
  const u32* words;            // [units][16 columns][four lanes][strip of 16 rows]
  const u16* prefixes;         // values of the unit before those of a word, likewise
  const u8* values;            // of unit after unit, each from 16 bytes on
  const u32* starts;           // where those of a unit start, in 16 bytes; one more than units
  const u8* x;                 // [tokens, k], rows and their starts on 8 bytes
  const u8* bias;              // [rows], or none
  u8* y;                       // [tokens, rows]
  u64 pitch;                   // bytes from token to token
  u32 rows, tokens, units, k;  // units of a panel; k is a multiple of 4
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
  u32 strip[4];
};
struct alignas(8) Prefixes {
  u16 strip[4];
};

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

// What a lane has of x: four columns of a token for every 16 columns and 8 tokens.
template <class C>
using Tokens = u64[4][C::kTokenTiles];

// Of a unit; zeros behind the last token and column.
template <class C>
__device__ __forceinline__ void load_tokens(Tokens<C>& x, const Args& a, u32 unit, u32 lane) {
  const u32 first = blockIdx.y * Facts<C>::kTokens + lane / 4;
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    const u32 at = unit * 64 + column * 16 + lane % 4 * 4;
#pragma unroll
    for (int tile = 0; tile < C::kTokenTiles; ++tile) {
      const u32 token = first + tile * 8;
      const u64* from = reinterpret_cast<const u64*>(a.x + token * a.pitch + at * 2);
      x[column][tile] = token < a.tokens && at < a.k ? __ldg(from) : 0;
    }
  }
}

// A unit that has arrived in shared memory.
template <class C>
__device__ __forceinline__ void multiply_unit(Sums<C>& sums, const u8* stage, const Tokens<C>& x,
                                              u32 lane) {
  const u32 values = shared_address(stage + kWordBytes + kPrefixBytes);
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    const u32 at = column * kTileWords + lane / 4;
    const Words words = reinterpret_cast<const Words*>(stage)[at];
    const Prefixes before = reinterpret_cast<const Prefixes*>(stage + kWordBytes)[at];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      u32 w[4];
      unpack_tile(w, values, words.strip[strip], before.strip[strip], lane);
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
    Tokens<C> x;
    load_tokens<C>(x, a, unit - panel, lane);
    wait_for_copies<kAhead - 1>();
    __syncwarp();  // all lanes see the unit, and are done with the one before, which goes now
    copy_next();
    multiply_unit<C>(sums, stages + (unit - first) % C::kStages * kStage, x, lane);
  }
  __syncthreads();  // sums go where units were
  finish<C>(a, sums, reinterpret_cast<float*>(smem), warp, lane);
}

}  // namespace spmm_csr_tiles

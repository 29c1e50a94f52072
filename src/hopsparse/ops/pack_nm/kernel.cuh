// pack_nm: a dense matrix [rows, cols] to the packed 2:4 layout of docs/formats.md, in one pass.
//
// A block of 128 threads packs one panel (64 rows) by kUnits units (64 columns each). Thread t
// makes word t of each unit's 128 index words, so lane 4r + q of warp w reads rows 16w + r and 16w
// + r + 8. A piece is 16 bytes of a row, and pieces go round the four q: a warp reads 64
// neighbouring bytes of 8 rows at once, and writes the 8 bytes of values that each piece becomes to
// 256 neighbouring bytes. Only index nibbles change lanes. Both element sizes share all of this: a
// step is 64 dense bytes of a row, 2 pieces a thread (one a row), 2048 bytes of values a panel.
//
// Bound: device memory. For each byte read 9/16 (16-bit) or 5/8 (8-bit) is written. About 25
// instructions a group of four fill a third of the issue slots of that time.

#include "ptx/base.cuh"
#include "ptx/global.cuh"

namespace pack_nm {

using i64 = long long;

constexpr u32 kPanelRows = 64, kUnitWords = 128;
constexpr u32 kStepBytes = 2048, kRowBlockBytes = 256, kCoreBytes = 128;  // of values
constexpr u32 kFlags = 0x80808080;  // bit 7 of each byte: one flag a group of a quad

struct Args {
  const u8* dense;
  u8* values;
  u32* meta;
  u64* refused;                // the smallest row << 32 | group that cannot be packed
  i64 row_stride, col_stride;  // bytes
  u32 rows, cols, units;       // units of a panel
};

struct alignas(8) Kept {
  u32 word[2];
};

// What depends on the thread alone.
struct Place {
  u32 q;            // which piece of a step
  u32 row;          // the upper of its two rows; the other is 8 below
  u32 word;         // which index word it stores
  u32 word_order;   // bytes of that word among its own nibbles and those of lane ^ 1
  u32 value_bytes;  // where its 8 bytes of values go in a step
};

template <class Config>
struct Facts {
  static constexpr int kEntries = 16 / Config::kEntryBytes;  // of a piece
  static constexpr int kPieces = 2 * Config::kEntryBytes;    // of a thread in a unit
  static constexpr int kSteps = Config::kEntryBytes;         // of a unit
  static constexpr u32 kSigns = Config::kEntryBytes == 2 ? 0x80008000 : 0x80808080;
};

// ---- where ---------------------------------------------------------------------------------

// Bytes 0 to 3 of `low` and 4 to 7 of `high`, the lowest nibble of `order` first.
__device__ __forceinline__ u32 bytes(u32 low, u32 high, u32 order) {
  u32 picked;  // __byte_perm would mask an order that is not constant
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(order));
  return picked;
}

template <class Config>
__device__ __forceinline__ Place place_of(u32 thread, u32 panel) {
  const u32 warp = thread / 32, r = thread % 32 / 4, q = thread % 4, odd = q & 1;
  Place p;
  p.q = q;
  p.row = panel * kPanelRows + 16 * warp + r;
  p.value_bytes = warp * 2 * kRowBlockBytes + (q >> 1) * kCoreBytes + r * 16 + odd * 8;
  if constexpr (Config::kEntryBytes == 2) {
    // An even lane takes the first step of both rows, an odd lane the second.
    p.word = warp * 32 + r * 4 + odd * 2 + (q >> 1);
    p.word_order = odd ? 0x3726 : 0x5140;
  } else {
    // An even lane takes the upper row, an odd lane the lower.
    p.word = thread;
    p.word_order = odd ? 0x3276 : 0x5410;
  }
  return p;
}

// First column of a thread's piece in a step, counted from column 0.
template <class Config>
__device__ __forceinline__ u32 column_of(u32 step, u32 q) {
  return (step * 4 + q) * Facts<Config>::kEntries;
}

// ---- read ----------------------------------------------------------------------------------

template <class Config>
using Tile = Piece[Config::kUnits * Facts<Config>::kPieces];  // step by step, upper row first

// The first `count` entries of a piece, one by one; zeros behind them.
template <class Config>
__device__ __forceinline__ Piece gather(const u8* from, i64 stride, int count) {
  constexpr int kBytes = Config::kEntryBytes;
  Piece p{};
#pragma unroll
  for (int i = 0; i < Facts<Config>::kEntries; ++i) {
    if (i >= count) continue;
    const u8* at = from + i * stride;
    const u32 entry = kBytes == 2 ? *reinterpret_cast<const u16*>(at) : *at;
    p.word[i * kBytes / 4] |= entry << (i * kBytes % 4 * 8);
  }
  return p;
}

// Any strides: entry by entry.
template <class Config>
__device__ __forceinline__ void read_entries(Tile<Config>& tile, const Args& a, const Place& p,
                                             u32 first_step) {
#pragma unroll
  for (int i = 0; i < sizeof(tile) / sizeof(Piece); ++i) {
    const u32 row = p.row + i % 2 * 8, column = column_of<Config>(first_step + i / 2, p.q);
    const u8* from = a.dense + row * a.row_stride + column * a.col_stride;
    tile[i] = gather<Config>(from, a.col_stride, row < a.rows ? int(a.cols) - int(column) : 0);
  }
}

// Rows that start on 16 bytes, with neighbouring columns: every whole piece in one load, and all
// of them before the first is used.
template <class Config>
__device__ __forceinline__ void read_vectors(Tile<Config>& tile, const Args& a, const Place& p,
                                             u32 first_step) {
  using F = Facts<Config>;
  const u32 column = column_of<Config>(first_step, p.q);
  const int count = int(a.cols) - int(column);
  const u8* upper = a.dense + p.row * a.row_stride + u64(column) * Config::kEntryBytes;
#pragma unroll
  for (int i = 0; i < sizeof(tile) / sizeof(Piece); ++i) {
    const bool inside = p.row + i % 2 * 8 < a.rows && count >= (i / 2 * 4 + 1) * F::kEntries;
    tile[i] = load_if(inside, upper + i % 2 * 8 * a.row_stride + i / 2 * 64);
  }
}

// The pieces that the last column cuts: they belong to one q, so to one step of a thread.
template <class Config>
__device__ __forceinline__ void read_cut(Tile<Config>& tile, const Args& a, const Place& p,
                                         u32 first_step) {
  using F = Facts<Config>;
  const u32 cut = a.cols / F::kEntries, rest = a.cols % F::kEntries, step = cut / 4 - first_step;
  if (rest == 0 || cut % 4 != p.q || step >= Config::kUnits * F::kSteps) return;
#pragma unroll 1
  for (u32 half = 0; half < 2 && p.row + half * 8 < a.rows; ++half) {
    const u8* from = a.dense + (p.row + half * 8) * a.row_stride + u64(cut) * 16;
    const Piece piece = gather<Config>(from, Config::kEntryBytes, rest);
#pragma unroll
    for (int i = 0; i < sizeof(tile) / sizeof(Piece); ++i) {
      if (i / 2 == step && i % 2 == half) tile[i] = piece;
    }
  }
}

// ---- choose --------------------------------------------------------------------------------
// A quad is four groups. Facts about its entries are kept as planes: bit 7 of byte g of plane j
// is that of column j of group g. Other bits of a plane are noise.

struct Live {
  u32 plane[4];  // entries to store; at most two a group unless `refused` has its flag
  u32 refused;   // flags of groups
};

struct Halves {
  u32 low, high;
};

// The top bytes of the low and of the high halves of four words.
__device__ __forceinline__ Halves top_bytes(const u32 (&x)[4]) {
  const u32 front = bytes(x[0], x[1], 0x7351), back = bytes(x[2], x[3], 0x7351);
  return {bytes(front, back, 0x5410), bytes(front, back, 0x7632)};
}

// Sets the sign bit of each entry that is not zero, of either sign; other bits are noise.
template <class Config>
__device__ __forceinline__ u32 nonzero(u32 x) {
  constexpr u32 kRest = ~Facts<Config>::kSigns;
  const u32 carried = (x & kRest) + kRest;
  return Config::kSignCounts ? carried | x : carried;
}

// Turns -0.0 into +0.0 throughout and returns the planes of what is left.
template <class Config>
__device__ __forceinline__ Live nonzero_planes(u32* quad) {
  Live live;
  u32 found[2][4];
#pragma unroll
  for (int i = 0; i < 4 * Config::kEntryBytes; ++i) {
    const u32 flags = nonzero<Config>(quad[i]);
    quad[i] &= flags | ~Facts<Config>::kSigns;
    found[i % Config::kEntryBytes][i / Config::kEntryBytes] = flags;
  }
  if constexpr (Config::kEntryBytes == 2) {
    const Halves left = top_bytes(found[0]), right = top_bytes(found[1]);
    live.plane[0] = left.low, live.plane[1] = left.high;
    live.plane[2] = right.low, live.plane[3] = right.high;
  } else {
    const u32(&x)[4] = found[0];  // a group a word: transpose 4 x 4 bytes
    const u32 left = bytes(x[0], x[1], 0x5140), left2 = bytes(x[2], x[3], 0x5140);
    const u32 right = bytes(x[0], x[1], 0x7362), right2 = bytes(x[2], x[3], 0x7362);
    live.plane[0] = bytes(left, left2, 0x5410), live.plane[1] = bytes(left, left2, 0x7632);
    live.plane[2] = bytes(right, right2, 0x5410), live.plane[3] = bytes(right, right2, 0x7632);
  }
  return live;
}

// Refuses groups with three entries or four.
__device__ __forceinline__ void check(Live& live) {
  const u32(&p)[4] = live.plane;
  live.refused = (p[0] & p[1] & (p[2] | p[3])) | (p[2] & p[3] & (p[0] | p[1]));
}

__device__ __forceinline__ u32 majority(u32 a, u32 b, u32 c) { return (a & b) | (a & c) | (b & c); }

// Keeps the two of largest magnitude in each group; of equal ones the first stay. An entry is
// kept if it wins two of its three comparisons. Refuses groups with infinities or NaN.
template <class Config>
__device__ __forceinline__ void select(Live& live, const u32* quad) {
  static_assert(Config::kEntryBytes == 2, "8-bit values are selected before they are rounded");
  constexpr u32 kSigns = Facts<Config>::kSigns, kBeyond = (0x8000 - Config::kInfinity) * 0x10001;
  u32 straight[4], crossed[4], inside[4], wild[4];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    // Magnitudes of finite floats are ordered as their bits are, and leave the top bit free.
    const u32 left = quad[2 * g] & ~kSigns, right = quad[2 * g + 1] & ~kSigns;
    const u32 even = bytes(left, right, 0x5410), odd = bytes(left, right, 0x7632);
    straight[g] = (left | kSigns) - right;                       // 0 beats 2, 1 beats 3
    crossed[g] = (left | kSigns) - bytes(right, right, 0x1032);  // 0 beats 3, 1 beats 2
    inside[g] = (even | kSigns) - odd;                           // 0 beats 1, 2 beats 3
    wild[g] = (left + kBeyond) | (right + kBeyond);
  }
  const Halves s = top_bytes(straight), c = top_bytes(crossed), i = top_bytes(inside);
  const Halves w = top_bytes(wild);
  live.plane[0] &= majority(s.low, c.low, i.low);
  live.plane[1] &= majority(s.high, c.high, ~i.low);
  live.plane[2] &= majority(~s.low, ~c.high, i.high);
  live.plane[3] &= majority(~s.high, ~c.low, ~i.high);
  live.refused = w.low | w.high;
}

// The two columns c0 < c1 that each group stores, c0 | c1 << 4 in its byte. Free slots take the
// lowest free columns, so that c1 is the last live column or 1, and c0 is 0 unless two later
// ones are live.
__device__ __forceinline__ u32 columns(const u32 (&p)[4]) {
  const u32 later = p[2] | p[3];
  const u32 low0 = p[1] & later, low1 = p[2] & p[3], high0 = p[3] | ~p[2], high1 = later;
  return (low0 >> 7 & 0x01010101) | (low1 >> 6 & 0x02020202) | (high0 >> 3 & 0x10101010) |
         (high1 >> 2 & 0x20202020);
}

// c0 | c1 << 2 a group: groups 0 and 1 in byte 0, groups 2 and 3 in byte 2; other bytes are noise.
__device__ __forceinline__ u32 nibbles_of(u32 columns) {
  const u32 nibbles = (columns | columns >> 2) & 0x0F0F0F0F;
  return nibbles | nibbles >> 4;
}

// The entries of those columns, in order.
template <class Config>
__device__ __forceinline__ void keep(u32* kept, const u32* quad, u32 columns) {
  if constexpr (Config::kEntryBytes == 2) {
#pragma unroll
    for (int g = 0; g < 4; g += 2) {
      const u32 order = bytes(0x76543210, 0, columns >> 8 * g);  // byte c says 2c, 2c + 1
      kept[g] = bytes(quad[2 * g], quad[2 * g + 1], order);
      kept[g + 1] = bytes(quad[2 * g + 2], quad[2 * g + 3], order >> 16);
    }
  } else {
    const u32 order = columns | 0x44004400;  // odd groups are bytes 4 to 7
    kept[0] = bytes(quad[0], quad[1], order);
    kept[1] = bytes(quad[2], quad[3], order >> 16);
  }
}

// ---- write ---------------------------------------------------------------------------------

// Later blocks see what was found and stay away: every group of a dense matrix comes here.
template <class Config>
__device__ __forceinline__ void refuse(const Args& a, const Place& p, u32 unit, int quad,
                                       u32 flags) {
  using F = Facts<Config>;
  const u32 g = __ffs(flags) / 8 - 1;
  const u32 half = Config::kEntryBytes == 2 ? g / 2 : quad;
  const u32 step = unit * F::kSteps + (Config::kEntryBytes == 2 ? quad : 0);
  const u32 group = column_of<Config>(step, p.q) / 4 + g % (F::kEntries / 4);
  const u64 key = u64(p.row + 8 * half) << 32 | group;
  if (key < *const_cast<const volatile u64*>(a.refused)) atomicMin(a.refused, key);
}

template <class Config>
__device__ __forceinline__ void pack_unit(const Piece* dense, const Args& a, const Place& p,
                                          u32 panel, u32 unit) {
  using F = Facts<Config>;
  constexpr int kQuadWords = 4 * Config::kEntryBytes;
  u32 quads[2 * kQuadWords], kept[kQuadWords], nibbles[2];
#pragma unroll
  for (int i = 0; i < 2 * kQuadWords; ++i) quads[i] = dense[i / 4].word[i % 4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32* quad = quads + i * kQuadWords;
    Live live = nonzero_planes<Config>(quad);
    if constexpr (Config::kSelect) {
      select<Config>(live, quad);
    } else {
      check(live);
    }
    if (live.refused & kFlags) refuse<Config>(a, p, unit, i, live.refused & kFlags);
    const u32 chosen = columns(live.plane);
    keep<Config>(kept + i * kQuadWords / 2, quad, chosen);
    nibbles[i] = nibbles_of(chosen);
  }
  const u64 tile = u64(panel) * a.units + unit;
  u8* values = a.values + tile * (F::kSteps * kStepBytes) + p.value_bytes;
#pragma unroll
  for (int i = 0; i < F::kPieces; ++i) {
    u8* to = values + i / 2 * kStepBytes + i % 2 * kRowBlockBytes;
    *reinterpret_cast<Kept*>(to) = {kept[2 * i], kept[2 * i + 1]};
  }
  const u32 mine = bytes(nibbles[0], nibbles[1], 0x6420);
  const u32 other = __shfl_xor_sync(0xFFFFFFFF, mine, 1);
  a.meta[tile * kUnitWords + p.word] = bytes(mine, other, p.word_order);
}

// Grid: x along k, kUnits units a block; y and z panels, y the faster.
template <class Config>
__device__ __forceinline__ void pack(const Args& a) {
  const u32 panel = blockIdx.z * gridDim.y + blockIdx.y, first_unit = blockIdx.x * Config::kUnits;
  if (panel * kPanelRows >= a.rows) return;
  const Place p = place_of<Config>(threadIdx.x, panel);
  const u32 first_step = first_unit * Facts<Config>::kSteps;
  Tile<Config> tile;
  if constexpr (Config::kVector) {
    read_vectors<Config>(tile, a, p, first_step);
    read_cut<Config>(tile, a, p, first_step);
  } else {
    read_entries<Config>(tile, a, p, first_step);
  }
#pragma unroll
  for (int i = 0; i < Config::kUnits; ++i) {
    if (first_unit + i >= a.units) return;
    pack_unit<Config>(tile + i * Facts<Config>::kPieces, a, p, panel, first_unit + i);
  }
}

}  // namespace pack_nm

// quantize_rows: rows of x [rows, k] to codes and a float32 scale a row, in one launch.
//
// A team of threads has a row: a warp where rows are short, a block elsewhere. A thread takes
// chunks of 8 entries in turns with its team: 16 bytes of a 16-bit row, twice that of a float32 or
// gated one. Up to kChunks of them stay in its registers between the largest magnitude and the
// rounding, so that x is read once. Longer rows, and those that do not start on 16 bytes, are read
// again.
//
// Bound: device memory. A quotient takes four instructions, not a division: the row's reciprocal is
// computed once, to twice the precision, and the quotient corrected by its exact remainder. That is
// the correctly rounded quotient (Markstein, IBM J. Res. Dev. 34, 1990) while nothing over- or
// underflows. Rows for which it might, and those that are clipped or not finite, are `careful`.

#include "./read.cuh"

namespace quantize_rows {

// ---- the team ------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ u32 team_max(u32 mine) {
  mine = __reduce_max_sync(kAll, mine);
  if constexpr (C::kTeam == 32) return mine;
  __shared__ u32 of_warp[C::kTeam / 32];
  const u32 lane = threadIdx.x % 32;
  if (lane == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  return __reduce_max_sync(kAll, lane < C::kTeam / 32 ? of_warp[lane] : 0);
}

__device__ __forceinline__ float warp_sum(float mine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(kAll, mine, step);
  return mine;
}

// In an order that is always the same.
template <class C>
__device__ __forceinline__ float team_sum(float mine) {
  mine = warp_sum(mine);
  if constexpr (C::kTeam == 32) return mine;
  __shared__ float of_warp[C::kTeam / 32];
  const u32 lane = threadIdx.x % 32;
  if (lane == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  return warp_sum(lane < C::kTeam / 32 ? of_warp[lane] : 0.0f);
}

// ---- normalise -----------------------------------------------------------------------------

__device__ __forceinline__ float squares(const float (&v)[kEntries]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kEntries; ++i) sum = fmaf(v[i], v[i], sum);
  return sum;
}

template <class C>
__device__ __forceinline__ float inverse_norm(const Args& a, float sum) {
  return rsqrtf(__fdiv_rn(sum, float(a.k)) + a.eps);
}

// Weights of the norm, which all rows share: the L1 cache may keep them.
template <class C>
__device__ __forceinline__ void load_weights(float (&to)[kEntries], const Args& a, u32 first,
                                             bool vector) {
  if (!vector) {
    gather<C>(to, a.norm, first, 1, int(a.k) - int(first));
    return;
  }
  const Piece* from = reinterpret_cast<const Piece*>(a.norm + u64(first) * Facts<C>::kBytes);
#pragma unroll
  for (int j = 0; j < Facts<C>::kPieces; ++j) {
    Piece piece{};
    if (first < a.k) piece = from[j];
    unpack_piece<C::kType>(to + j * kEntries / Facts<C>::kPieces, piece);
  }
}

__device__ __forceinline__ void scale_by(float (&v)[kEntries], float inverse,
                                         const float (&weight)[kEntries]) {
#pragma unroll
  for (int i = 0; i < kEntries; ++i) v[i] = v[i] * inverse * weight[i];
}

template <class C>
__device__ __forceinline__ void normalise(float (&v)[kEntries], const Args& a, float inverse,
                                          u32 first, bool vector) {
  float weight[kEntries];
  load_weights<C>(weight, a, first, vector);
  scale_by(v, inverse, weight);
}

// ---- the largest magnitude -----------------------------------------------------------------
// Bits of magnitudes are ordered as the magnitudes are; infinity, and then NaN, are above all.

__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
  u32 both;
  asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}

__device__ __forceinline__ u32 larger_magnitude(u32 peak, float value) {
  asm("{.reg .f32 size;\n"
      "abs.f32 size, %1;\n"
      "max.NaN.f32 %0, %0, size;}"
      : "+r"(peak)
      : "f"(value));
  return peak;
}

// Of values, and of two 16-bit numbers at a time.
__device__ __forceinline__ void raise(u32& peak, const Chunk<false>& chunk) {
#pragma unroll
  for (float value : chunk.value) peak = larger_magnitude(peak, value);
}
__device__ __forceinline__ void raise(u32& peak, const Chunk<true>& chunk) {
#pragma unroll
  for (u32 word : chunk.raw.word) peak = larger_halves(peak, word & 0x7FFF7FFF);
}

// As bits of a float32.
template <class C>
__device__ __forceinline__ u32 widened(u32 peak) {
  if constexpr (!Facts<C>::kRaw) return peak;
  return __float_as_uint(unpack<C::kType>(larger_halves(peak, peak >> 16) & 0xFFFF));
}

// ---- round ---------------------------------------------------------------------------------

// How the entries of a row become codes.
struct Scaling {
  float scale;           // as it is returned
  float lift;            // a power of two that keeps all below in the normal range
  float divisor;         // scale * lift
  float inverse, rest;   // 1 / divisor, and what it misses
  float least, largest;  // what becomes the least and the largest code
  bool careful;
};

template <class C>
__device__ __forceinline__ Scaling scaling_of(const Args& a, u32 peak_bits) {
  using F = Facts<C>;
  const float peak = __uint_as_float(peak_bits), infinity = __int_as_float(0x7F800000);
  const bool finite = peak < infinity, is_static = a.scale != nullptr;
  float scale = is_static ? *a.scale : __fdiv_rn(peak, F::kLargest);
  if (!is_static && scale == 0) scale = 1;  // zeros, or numbers too small to divide
  // E4M3 has a NaN. Integers have none, so that the scale of their row must be it.
  const bool has_scale = scale > 0 && scale < infinity;
  if (!has_scale || !(finite || (is_static && C::kCodes == Codes::e4m3))) {
    scale = __int_as_float(0x7FC00000);
  }
  Scaling s;
  s.scale = scale;
  s.lift = scale < 0x1p-60f ? 0x1p64f : scale > 0x1p60f ? 0x1p-64f : 1.0f;
  s.divisor = scale * s.lift;
  s.inverse = __frcp_rn(s.divisor);
  s.rest = fmaf(-s.inverse, s.divisor, 1.0f) * s.inverse;
  s.least = F::kLeast * s.divisor, s.largest = F::kLargest * s.divisor;
  // A quarter of a step beyond the largest integer is rounded to it; E4M3 saturates by itself.
  constexpr float kRoundable = C::kCodes == Codes::e4m3 ? 0x1p20f : F::kLargest + 0.25f;
  s.careful = !(finite && s.lift == 1.0f && peak <= kRoundable * scale);
  return s;
}

// value / divisor, rounded to nearest.
__device__ __forceinline__ float quotient(float value, const Scaling& s) {
  const float near = fmaf(value, s.inverse, value * s.rest);
  return fmaf(fmaf(-near, s.divisor, value), s.inverse, near);
}

template <class C, bool Careful>
__device__ __forceinline__ float on_grid(float value, const Scaling& s) {
  if constexpr (!Careful) return quotient(value, s);
  const bool finite = fabsf(value) < __int_as_float(0x7F800000);
  float scaled = quotient(fminf(fmaxf(value * s.lift, s.least), s.largest), s);
  scaled = finite ? scaled : __int_as_float(0x7FC00000);
  if constexpr (C::kCodes == Codes::e4m3) return scaled;
  return scaled == scaled ? scaled : 0.0f;
}

// The integer nearest to a small number, halves to even, in the low bits.
__device__ __forceinline__ u32 rounded(float value) {
  return __float_as_uint(value + 12582912.0f);  // 1.5 * 2^23
}

__device__ __forceinline__ u32 two_e4m3(float low, float high) {
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// Four codes of a byte.
template <class C>
__device__ __forceinline__ u32 four(const float* v) {
  if constexpr (C::kCodes == Codes::e4m3) {
    const u32 codes = __byte_perm(two_e4m3(v[0], v[1]), two_e4m3(v[2], v[3]), 0x5410);
    return codes & (((codes & 0x7F7F7F7F) + 0x7F7F7F7F) | 0x7F7F7F7F);  // -0 becomes 0
  }
  if constexpr (C::kCodes == Codes::int4_in_e4m3) {
    return __byte_perm(two_e4m3(nearest(v[0]), nearest(v[1])),
                       two_e4m3(nearest(v[2]), nearest(v[3])), 0x5410);
  }
  const u32 low = __byte_perm(rounded(v[0]), rounded(v[1]), 0x0040);
  const u32 high = __byte_perm(rounded(v[2]), rounded(v[3]), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// Eight codes of four bits, the first lowest.
__device__ __forceinline__ u32 eight_nibbles(const float* v) {
  u32 byte[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    byte[i] = (rounded(v[2 * i]) & 15) | rounded(v[2 * i + 1]) << 4;
  }
  return __byte_perm(__byte_perm(byte[0], byte[1], 0x0040), __byte_perm(byte[2], byte[3], 0x0040),
                     0x5410);
}

// Stores the codes of a chunk; one by one those that may be fewer than eight.
template <class C, bool Careful>
__device__ __forceinline__ void store(const Args& a, const Place& p, u32 first, bool vector,
                                      const float (&v)[kEntries], const Scaling& s) {
  constexpr int kWords = Facts<C>::kCodeBits / 4, kPerByte = 8 / Facts<C>::kCodeBits;
  float scaled[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) scaled[i] = on_grid<C, Careful>(v[i], s);
  Half codes;
  if constexpr (kWords == 1) {
    codes.word[0] = eight_nibbles(scaled);
  } else {
    codes.word[0] = four<C>(scaled), codes.word[1] = four<C>(scaled + 4);
  }
  u8* to = a.codes + (u64(p.row) * a.k + first) / kPerByte;
  if (vector && kWords == 1) {
    *reinterpret_cast<u32*>(to) = codes.word[0];
  } else if (vector) {
    *reinterpret_cast<Half*>(to) = codes;
  } else {
    const u32 bytes = (a.k - first) / kPerByte;
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if (i < bytes) to[i] = codes.word[i / 4] >> i % 4 * 8;
    }
  }
}

// Stores x + residual in the dtype of x.
template <class C>
__device__ __forceinline__ void store_sums(const Args& a, const Place& p, u32 first, bool vector,
                                           const float (&v)[kEntries]) {
  const u64 at = u64(p.row) * a.k + first;
  if (!vector) {
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      if (first + i < a.k) store_value<C::kType>(a.sums, at + i, v[i]);
    }
    return;
  }
  Piece* to = reinterpret_cast<Piece*>(a.sums + at * Facts<C>::kBytes);
  if constexpr (C::kType == Type::f32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i] = {__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]),
               __float_as_uint(v[4 * i + 2]), __float_as_uint(v[4 * i + 3])};
    }
  } else {
    *to = {pack<C::kType>(v[0], v[1]), pack<C::kType>(v[2], v[3]), pack<C::kType>(v[4], v[5]),
           pack<C::kType>(v[6], v[7])};
  }
}

// ---- a row ---------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ u32 first_of(const Place& p, int number) {
  return (p.thread + number * C::kTeam) * kEntries;
}

template <class C>
using Kept = Chunk<Facts<C>::kRaw>[C::kChunks];

template <class C>
using Pieces = Piece[C::kChunks][Facts<C>::kPieces];

// Asks for all that the thread has of a row, before any of it is used; or gives zeros.
template <class C>
__device__ __forceinline__ void load_row(Pieces<C>& to, const u8* tensor, bool wanted,
                                         const Args& a, const Place& p) {
  const u8* row = tensor + u64(p.row) * a.k * Facts<C>::kBytes;
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) {
    const u32 first = first_of<C>(p, i);
#pragma unroll
    for (int j = 0; j < Facts<C>::kPieces; ++j) {
      to[i][j] = load_if(wanted && first < a.k, row + u64(first) * Facts<C>::kBytes + j * 16);
    }
  }
}

template <class C>
__device__ __forceinline__ void unpack_chunk(float (&to)[kEntries],
                                             const Piece (&pieces)[Facts<C>::kPieces]) {
#pragma unroll
  for (int j = 0; j < Facts<C>::kPieces; ++j) {
    unpack_piece<C::kType>(to + j * kEntries / Facts<C>::kPieces, pieces[j]);
  }
}

// Whether a thread has registers for code that waits less: with few chunks. With many, another row
// on the SM is worth more.
template <class C>
constexpr bool kHasRoom = C::kChunks <= 4;

// x + residual, which is stored too; without a residual x.
template <class C>
__device__ __forceinline__ void read_sums(Kept<C>& kept, const Args& a, const Place& p) {
  const bool is_added = a.residual != nullptr;
  Pieces<C> pieces, more;
  load_row<C>(pieces, a.x, true, a, p);
  if (kHasRoom<C> && !is_added) {  // else zeros are added, which costs a sixth of the instructions
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) unpack_chunk<C>(kept[i].value, pieces[i]);
    return;
  }
  load_row<C>(more, a.residual, is_added, a, p);
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) {
    float added[kEntries];
    unpack_chunk<C>(kept[i].value, pieces[i]);
    unpack_chunk<C>(added, more[i]);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) kept[i].value[j] += added[j];
    const u32 first = first_of<C>(p, i);
    if (is_added && first < a.k) store_sums<C>(a, p, first, true, kept[i].value);
  }
}

// All chunks of a row that the thread has, in registers.
template <class C>
__device__ __forceinline__ void read_all(Kept<C>& kept, const Args& a, const Place& p) {
  if constexpr (C::kSource == Source::norm) {
    read_sums<C>(kept, a, p);
  } else if constexpr (C::kSource == Source::plain) {
    Pieces<C> pieces;
    load_row<C>(pieces, a.x, true, a, p);
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) {
      if constexpr (Facts<C>::kRaw) {
        kept[i].raw = pieces[i][0];
      } else {
        unpack_chunk<C>(kept[i].value, pieces[i]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kChunks; ++i) {
      read<C>(kept[i].value, a, p, first_of<C>(p, i), true);
    }
  }
}

// Weights of the norm for the chunks of a thread, which all rows share: the L1 cache may keep them.
template <class C>
__device__ __forceinline__ void load_all_weights(Pieces<C>& to, const Args& a, const Place& p) {
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) {
    const u32 first = first_of<C>(p, i);
    const Piece* from = reinterpret_cast<const Piece*>(a.norm + u64(first) * Facts<C>::kBytes);
#pragma unroll
    for (int j = 0; j < Facts<C>::kPieces; ++j) to[i][j] = first < a.k ? from[j] : Piece{};
  }
}

// Returns what entries are multiplied by, their weights aside.
template <class C>
__device__ __forceinline__ float normalise_all(Kept<C>& kept, const Args& a, const Place& p) {
  Pieces<C> weights;
  // Not behind the barrier of the sum.
  if constexpr (kHasRoom<C>) load_all_weights<C>(weights, a, p);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) sum += squares(kept[i].value);
  const float inverse = inverse_norm<C>(a, team_sum<C>(sum));
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) {
    float weight[kEntries];
    if constexpr (kHasRoom<C>) {
      unpack_chunk<C>(weight, weights[i]);
    } else {
      load_weights<C>(weight, a, first_of<C>(p, i), true);
    }
    scale_by(kept[i].value, inverse, weight);
  }
  return inverse;
}

// Reads a chunk once more, as it was when the largest magnitude was taken.
template <class C>
__device__ __forceinline__ void read_again(float (&to)[kEntries], const Args& a, const Place& p,
                                           float inverse, u32 first, bool vector) {
  read<C>(to, a, p, first, vector);
  if constexpr (C::kSource == Source::norm) normalise<C>(to, a, inverse, first, vector);
}

// Stores all codes of a row that is read again.
template <class C, bool Careful, int Unroll>
__device__ __forceinline__ void store_again(const Args& a, const Place& p, float inverse,
                                            bool vector, const Scaling& s) {
#pragma unroll Unroll
  for (u32 first = p.thread * kEntries; first < a.k; first += C::kTeam * kEntries) {
    float value[kEntries];
    read_again<C>(value, a, p, inverse, first, vector);
    store<C, Careful>(a, p, first, vector, value, s);
  }
}

template <class C>
__device__ __forceinline__ void store_all(const Kept<C>& kept, const Args& a, const Place& p,
                                          const Scaling& s) {
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) {
    const u32 first = first_of<C>(p, i);
    if (first >= a.k) return;
    if constexpr (Facts<C>::kRaw) {
      float value[kEntries];
      unpack_piece<C::kType>(value, kept[i].raw);
      store<C, false>(a, p, first, true, value, s);
    } else {
      store<C, false>(a, p, first, true, kept[i].value, s);
    }
  }
}

template <class C>
__device__ __forceinline__ void quantize_kept(const Args& a, const Place& p) {
  Kept<C> kept;
  read_all<C>(kept, a, p);
  float inverse = 1;
  if constexpr (C::kSource == Source::norm) inverse = normalise_all<C>(kept, a, p);
  u32 peak = 0;
#pragma unroll
  for (int i = 0; i < C::kChunks; ++i) raise(peak, kept[i]);
  const Scaling s = scaling_of<C>(a, team_max<C>(widened<C>(peak)));
  if (p.thread == 0) a.scales[p.row] = s.scale;
  if (s.careful) {
    store_again<C, true, 1>(a, p, inverse, true, s);  // rare: short code instead of a fast one
  } else {
    store_all<C>(kept, a, p, s);
  }
}

// The same for rows of any length and any start, which are read in every pass.
template <class C>
__device__ __forceinline__ void quantize_reread(const Args& a, const Place& p) {
  constexpr u32 kStep = C::kTeam * kEntries;
  const u32 start = p.thread * kEntries;
  const bool vector = a.vector;
  Chunk<false> chunk;
  float inverse = 1;
  if constexpr (C::kSource == Source::norm) {
    float sum = 0;
    for (u32 first = start; first < a.k; first += kStep) {
      read<C>(chunk.value, a, p, first, vector);
      if (a.residual != nullptr) store_sums<C>(a, p, first, vector, chunk.value);
      sum += squares(chunk.value);
    }
    inverse = inverse_norm<C>(a, team_sum<C>(sum));
  }
  u32 peak = 0;
#pragma unroll 2
  for (u32 first = start; first < a.k; first += kStep) {
    read_again<C>(chunk.value, a, p, inverse, first, vector);
    raise(peak, chunk);
  }
  const Scaling s = scaling_of<C>(a, team_max<C>(peak));
  if (p.thread == 0) a.scales[p.row] = s.scale;
  if (s.careful) {
    store_again<C, true, 1>(a, p, inverse, vector, s);
  } else {
    store_again<C, false, 2>(a, p, inverse, vector, s);
  }
}

// Grid: x along rows, kThreads / kTeam a block.
template <class C>
__device__ __forceinline__ void quantize(const Args& a) {
  const Place p = {blockIdx.x * (C::kThreads / C::kTeam) + threadIdx.x / C::kTeam,
                   threadIdx.x % C::kTeam};
  let_next_start();
  wait_for_previous();
  if (p.row >= a.rows) return;  // a whole warp, and none where the team is the block
  if constexpr (C::kChunks > 0) {
    quantize_kept<C>(a, p);
  } else {
    quantize_reread<C>(a, p);
  }
}

}  // namespace quantize_rows

// What a launch of quantize_rows is given, and how its threads read chunks of a row.
#pragma once

#include "epilogue/activation.cuh"
#include "epilogue/value.cuh"
#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"

namespace quantize_rows {

// The last: codes of int4, each the number of E4M3 that it is.
enum class Codes { int8, e4m3, int4, int4_in_e4m3 };
enum class Source { plain, norm, halves, interleaved };

constexpr int kEntries = 8;  // of a chunk
constexpr u32 kAll = 0xFFFFFFFF;

struct Args {
  const u8* x;         // [rows, k], or [rows, 2 k] of gate and up
  const u8* residual;  // as x, or null
  const u8* norm;      // [k], or null
  const float* scale;  // one for all rows, or null: one for each
  u8* codes;           // [rows, k], int4: [rows, k / 2]
  float* scales;       // [rows]
  u8* sums;            // as x: x + residual
  u32 rows, k;
  u32 vector;  // k is a multiple of 8, and every row starts on 16 bytes
  float eps;
};

struct alignas(8) Half {
  u32 word[2];
};

template <class C>
struct Facts {
  static constexpr int kBytes = C::kType == Type::f32 ? 4 : 2;
  static constexpr int kPieces = kBytes / 2;  // of 8 entries
  static constexpr bool kRaw = C::kSource == Source::plain && kBytes == 2;
  static constexpr bool kGated = C::kSource == Source::halves || C::kSource == Source::interleaved;
  static constexpr float kLargest = C::kCodes == Codes::int8   ? 127
                                    : C::kCodes == Codes::e4m3 ? 448
                                                               : 7;
  static constexpr float kLeast = kLargest == 7 ? -8 : -kLargest;
  static constexpr int kCodeBits = C::kCodes == Codes::int4 ? 4 : 8;
};

// The integer nearest to a small number, as a number; never -0.
__device__ __forceinline__ float nearest(float value) { return value + 12582912.0f - 12582912.0f; }

// A chunk between its passes: a plain 16-bit one as it is, any other in float32.
template <bool Raw>
struct Chunk {
  float value[kEntries];
};
template <>
struct Chunk<true> {
  Piece raw;
};

// What a thread has of a row.
struct Place {
  u32 row, thread;  // thread of the team
};

// ---- read ----------------------------------------------------------------------------------

template <Type T>
__device__ __forceinline__ void unpack_piece(float* to, const Piece& p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (T == Type::f32) {
      to[i] = __uint_as_float(p.word[i]);
    } else {
      to[2 * i] = unpack<T>(p.word[i]);
      to[2 * i + 1] =
          T == Type::bf16 ? __uint_as_float(p.word[i] & 0xFFFF0000) : unpack<T>(p.word[i] >> 16);
    }
  }
}

// Neighbouring entries, kept whole 16 bytes at a time.
template <class C, int Count>
__device__ __forceinline__ void load_pieces(float (&to)[Count], const u8* from, bool inside) {
  constexpr int kOfPiece = 16 / Facts<C>::kBytes;
#pragma unroll
  for (int i = 0; i < Count / kOfPiece; ++i) {
    unpack_piece<C::kType>(to + i * kOfPiece, load_if(inside, from + i * 16));
  }
}

// Entries one by one, zeros from `count` on.
template <class C>
__device__ __forceinline__ void gather(float (&to)[kEntries], const u8* tensor, u64 at, int stride,
                                       int count) {
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    to[i] = i < count ? load_value<C::kType>(tensor, at + i * stride) : 0.0f;
  }
}

// Eight neighbouring entries, or the `count` there are.
template <class C>
__device__ __forceinline__ void load_chunk(float (&to)[kEntries], const u8* tensor, u64 at,
                                           int count, bool vector) {
  if (vector) {
    load_pieces<C>(to, tensor + at * Facts<C>::kBytes, count > 0);
  } else {
    gather<C>(to, tensor, at, 1, count);
  }
}

// Gate and up of a chunk.
template <class C>
__device__ __forceinline__ void load_pair(float (&gate)[kEntries], float (&up)[kEntries],
                                          const Args& a, const Place& p, u32 first, bool vector) {
  const u64 row = u64(p.row) * 2 * a.k;
  const int count = int(a.k) - int(first);
  if constexpr (C::kSource == Source::halves) {
    load_chunk<C>(gate, a.x, row + first, count, vector);
    load_chunk<C>(up, a.x, row + a.k + first, count, vector);
  } else if (vector) {
    float both[2 * kEntries];
    load_pieces<C>(both, a.x + (row + 2 * u64(first)) * Facts<C>::kBytes, count > 0);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) gate[i] = both[2 * i], up[i] = both[2 * i + 1];
  } else {
    gather<C>(gate, a.x, row + 2 * u64(first), 2, count);
    gather<C>(up, a.x, row + 2 * u64(first) + 1, 2, count);
  }
}

// What is normalised, or rounded where nothing is: x, x + residual, or silu(gate) * up.
template <class C>
__device__ __forceinline__ void read(float (&to)[kEntries], const Args& a, const Place& p,
                                     u32 first, bool vector) {
  const u64 at = u64(p.row) * a.k + first;
  const int count = int(a.k) - int(first);
  if constexpr (Facts<C>::kGated) {
    float up[kEntries];
    load_pair<C>(to, up, a, p, first, vector);
#pragma unroll
    for (int i = 0; i < kEntries; ++i) to[i] = activate<Activation::silu>(to[i]) * up[i];
  } else {
    load_chunk<C>(to, a.x, at, count, vector);
    if (C::kSource == Source::norm && a.residual != nullptr) {
      float added[kEntries];
      load_chunk<C>(added, a.residual, at, count, vector);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) to[i] += added[i];
    }
  }
}

}  // namespace quantize_rows

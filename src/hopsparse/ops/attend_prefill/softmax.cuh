// Scores of a warpgroup become weights, in registers, and sums become results.
//
// A thread has two rows, lane / 4 and 8 below, and of each group of 8 columns the two at
// 2 (lane % 4): s[4 j + 2 i + c] is row i, column 8 j + 2 (lane % 4) + c.
#pragma once
#include "epilogue/value.cuh"
#include "ptx/base.cuh"
#include "ptx/power.cuh"
#include "ptx/shared.cuh"

namespace attend_prefill {

using Scores = float[kKeys / 2];
using Weights = u32[kKeys / 4];

// What sums so far are multiplied by, a row.
struct Fade {
  float row[2];
};

// Scores of keys that lie behind a query become -infinity. `first` is the shared address of the
// positions of the pieces; `place` is that of the upper row.
__device__ __forceinline__ void hide(Scores& s, u32 first, int place) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int start = static_cast<int>(load_shared<0>(first + piece * 4)) + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = start + 8 * half + c, j = 2 * piece + half;
        if (at > place) s[4 * j + c] = -infinity();
        if (at > place + 8) s[4 * j + 2 + c] = -infinity();
      }
    }
  }
}

// Of the four lanes of a row.
__device__ __forceinline__ float row_max(float value) {
  value = fmaxf(value, __uint_as_float(__shfl_xor_sync(0xFFFFFFFF, bits(value), 1)));
  return fmaxf(value, __uint_as_float(__shfl_xor_sync(0xFFFFFFFF, bits(value), 2)));
}
__device__ __forceinline__ float row_sum(float value) {
  value += __uint_as_float(__shfl_xor_sync(0xFFFFFFFF, bits(value), 1));
  return value + __uint_as_float(__shfl_xor_sync(0xFFFFFFFF, bits(value), 2));
}

// The largest score of each row so far, and this thread's part of the sum of its powers. fmaxf
// leaves NaN out; it stays in the powers.
struct Softmax {
  float top[2], sum[2];

  __device__ __forceinline__ Softmax() : top{-infinity(), -infinity()}, sum{0, 0} {}

  // What scores of a row are lowered by, in base 2; 0 where nothing is seen yet.
  __device__ __forceinline__ float shift(int i, float power) const {
    return top[i] == -infinity() ? 0.0f : __fmul_rn(top[i], power);
  }

  // Scores become powers of two; `power` is what a score is multiplied by.
  __device__ __forceinline__ Fade take(Scores& s, float power) {
    Fade fade;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most[2] = {s[2 * i], s[2 * i + 1]};  // two chains, which are half as long
#pragma unroll
      for (int j = 1; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) most[c] = fmaxf(most[c], s[4 * j + 2 * i + c]);
      }
      const float before = top[i];
      top[i] = fmaxf(before, row_max(fmaxf(most[0], most[1])));
      const float lowered = shift(i, power);
      // The difference of what was rounded before: 1 where no larger score came.
      fade.row[i] = power_of_two(__fsub_rn(__fmul_rn(before, power), lowered));
      float part[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = s[4 * j + 2 * i + c];
          score = power_of_two(fmaf(score, power, -lowered));
          part[c] += score;
        }
      }
      sum[i] = fmaf(sum[i], fade.row[i], part[0] + part[1]);
    }
    return fade;
  }
};

// Nothing to do for a warp whose rows have no larger score, as most have after some tiles.
template <class C>
__device__ __forceinline__ void fade_sums(float (&o)[C::kDim / 2], const Fade& fade) {
  if (!__ballot_sync(0xFFFFFFFF, fade.row[0] != 1 || fade.row[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < C::kDim / 2; ++i) o[i] *= fade.row[i / 2 % 2];
}

template <class C>
__device__ __forceinline__ void pack_weights(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) p[i] = pack<C::kType>(s[2 * i], s[2 * i + 1]);
}

// Lane t of four gets word t of each of them, in their order.
__device__ __forceinline__ void transpose_quad(u32 (&words)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const u32 other = __shfl_xor_sync(0xFFFFFFFF, upper ? words[i] : words[i + step], step);
      (upper ? words[i] : words[i + step]) = other;
    }
  }
}

// Sums over the sum of powers, rounded; and the logarithm. `at` is the upper row, counted in heads
// of tokens; `left` rows of this item follow from there on.
template <class C>
__device__ __forceinline__ void store(const Args& a, float (&o)[C::kDim / 2],
                                      const Softmax& softmax, u64 at, int left) {
  constexpr float kLn2 = 0.693147181f;
  const u32 lane = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = row_sum(softmax.sum[i]);
    const bool there = left > 8 * i, empty = sum == 0 && softmax.top[i] == -infinity();
    const u64 row = at + u64(8 * i) * a.heads;
    const float factor = empty ? 0.0f : 1 / sum;
    u32* to = static_cast<u32*>(a.out) + row * (C::kDim / 2) + lane * 4;
#pragma unroll
    for (int j = 0; j < C::kDim / 8; j += 4) {
      u32 words[4];
#pragma unroll
      for (int g = 0; g < 4; ++g) {
        const float* pair = &o[4 * (j + g) + 2 * i];
        words[g] = pack<C::kType>(pair[0] * factor, pair[1] * factor);
      }
      transpose_quad(words);
      if (there) {
        *reinterpret_cast<uint4*>(to + 4 * j) = {words[0], words[1], words[2], words[3]};
      }
    }
    if (there && lane == 0) {
      a.lse[row] = empty ? -infinity() : fmaf(softmax.shift(i, a.power), kLn2, logf(sum));
    }
  }
}

}  // namespace attend_prefill

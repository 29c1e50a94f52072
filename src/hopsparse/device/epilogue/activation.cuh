// Pointwise functions of an epilogue, in float32: no branches and no calls, since each is unrolled
// over all sums of a thread. Within a few units in the last place of |v|.
#pragma once

enum class Activation { none, relu, gelu, gelu_tanh, silu };

// v / (1 + exp(-u)). Where exp overflows the quotient is 0, as it should be.
__device__ __forceinline__ float gated(float v, float u) {
  return __fdividef(v, 1.0f + __expf(-u));
}

// 0.5 |v| erfc(|v| / sqrt 2): Abramowitz and Stegun, 7.1.26, off by 1.5e-7 |v| / 2 at most.
__device__ __forceinline__ float gelu_tail(float v) {
  const float x = fabsf(v) * 0.70710678f, t = __fdividef(1.0f, 1.0f + 0.3275911f * x);
  const float series =
      t * (0.254829592f +
           t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return 0.5f * fabsf(v) * series * __expf(-x * x);
}

template <Activation A>
__device__ __forceinline__ float activate(float v) {
  if constexpr (A == Activation::relu) {
    return v < 0.0f ? 0.0f : v;  // NaN stays NaN, as in torch; fmaxf would lose it
  } else if constexpr (A == Activation::gelu) {
    return (v < 0.0f ? 0.0f : v) - gelu_tail(v);
  } else if constexpr (A == Activation::gelu_tanh) {
    // 0.5 v (1 + tanh u) = v / (1 + exp(-2 u))
    return gated(v, 1.59576912f * (v + 0.044715f * v * v * v));
  } else if constexpr (A == Activation::silu) {
    return gated(v, v);
  } else {
    return v;
  }
}

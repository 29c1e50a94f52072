// Pointwise functions of an epilogue, in float32.
#pragma once

enum class Activation { none, relu, gelu, gelu_tanh, silu };

template <Activation A>
__device__ __forceinline__ float activate(float v) {
  if constexpr (A == Activation::relu) {
    return v < 0.0f ? 0.0f : v;  // NaN stays NaN, as in torch; fmaxf would lose it.
  } else if constexpr (A == Activation::gelu) {
    return 0.5f * v * (1.0f + erff(v * 0.70710678f));
  } else if constexpr (A == Activation::gelu_tanh) {
    return 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
  } else if constexpr (A == Activation::silu) {
    return v / (1.0f + __expf(-v));
  } else {
    return v;
  }
}

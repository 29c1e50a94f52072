// One key into what is kept of its block: the arithmetic of append_keys, and of kernels that take
// in a key while they score.
#pragma once

namespace append_keys {

// One dimension. NaN is taken, and stays.
__device__ __forceinline__ void fold(float& low, float& high, float& total, float key) {
  low = key < low || key != key ? key : low;
  high = key > high || key != key ? key : high;
  total += key;
}

}  // namespace append_keys

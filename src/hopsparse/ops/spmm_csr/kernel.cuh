// spmm_csr: y = A @ x + bias for a CSR matrix A [rows, k] and x [k, features], sums in float32.
// The bias is one number a row.
//
// A team of lanes has a span of entries (stream.cuh) and a tile of up to 512 bytes of features, 16
// bytes a lane. Tiles are the slow axis of the grid: all spans go through one slice of x, which is
// what the L2 cache then holds of it. A row is summed in the order in which it is stored. Parts of
// a long row leave their sums in float32, and `combine` adds them in an order that is always the
// same: no atomics, so that equal calls give equal bits.
//
// Bound: bytes. An entry gathers features * bytes of x, from L2 if all of x fits there, else mostly
// from memory; its column and value are read once a tile. Measured: docs/ops/spmm_csr.md.

#include "./stream.cuh"

namespace spmm_csr {

template <class C>
using Sums = float[Facts<C>::kWide];

__device__ __forceinline__ void store_piece(void* to, u32 a, u32 b, u32 c, u32 d) {
  // Nothing reads y soon: x may keep the cache.
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

template <class C>
__device__ __forceinline__ void store_result(const Args& a, u32 row, u32 feature,
                                             const Sums<C>& sums) {
  u8* to = a.y + (u64(row) * a.features + feature) * Facts<C>::kBytes;
  if constexpr (!C::kVector) {
    store_value<C::kType>(to, 0, sums[0]);
  } else if constexpr (C::kType == Type::f32) {
    store_piece(to, bits(sums[0]), bits(sums[1]), bits(sums[2]), bits(sums[3]));
  } else {
    store_piece(to, pack<C::kType>(sums[0], sums[1]), pack<C::kType>(sums[2], sums[3]),
                pack<C::kType>(sums[4], sums[5]), pack<C::kType>(sums[6], sums[7]));
  }
}

template <class C>
__device__ __forceinline__ void store_partial(const Args& a, int slot, u32 feature,
                                              const Sums<C>& sums) {
  float* to = a.partial + u64(slot) * a.features + feature;
  if constexpr (!C::kVector) {
    *to = sums[0];
  } else {
#pragma unroll
    for (int i = 0; i < Facts<C>::kWide; i += 4) {
      store_piece(to + i, bits(sums[i]), bits(sums[i + 1]), bits(sums[i + 2]), bits(sums[i + 3]));
    }
  }
}

template <class C>
__device__ __forceinline__ float bias_of(const Args& a, u32 row) {
  return a.bias == nullptr ? 0.0f : load_value<C::kType>(a.bias, row);
}

// Stores the sums of the current row, and goes on to the next one. Whoever calls it looks at `last`
// as well, so that indices which are changed under a captured graph end no loop late.
template <class C>
__device__ __forceinline__ void finish_row(const Args& a, const Work<C>& w, Row<C>& r, u32 feature,
                                           Sums<C>& sums) {
  const float bias = bias_of<C>(a, r.row);
#pragma unroll
  for (float& sum : sums) sum += bias;
  if (feature < a.features) store_result<C>(a, r.row, feature, sums);
#pragma unroll
  for (float& sum : sums) sum = 0;
  r.advance(a, w);
}

// Grid: x teams, y tiles of features.
template <class C>
__device__ __forceinline__ void multiply(const Args& a) {
  using F = Facts<C>;
  const u32 lane = threadIdx.x % C::kLanes;
  const Work<C> w(a, blockIdx.x * F::kTeams + threadIdx.x / C::kLanes);
  const u32 feature_at = blockIdx.y * F::kTile + lane * F::kWide;
  const bool inside = feature_at < a.features;
  const u8* x = a.x + u64(feature_at) * F::kBytes;
  Row<C> r(a, w);
  Sums<C> sums{};
  const u32 longest = __reduce_max_sync(kAll, w.count);
  Held<C> next = w.template hold<true>(0, lane);
#pragma unroll 1
  for (u32 first = 0; first < longest; first += C::kBatch) {
    const Held<C> now = next;
    next = w.template hold<true>(first + C::kBatch, lane);
    Features<C> gathered[C::kBatch];
    float value[C::kBatch];
#pragma unroll
    for (int u = 0; u < C::kBatch; ++u) {
      const u8* from = x + u64(column_of<C>(now, u)) * a.x_stride;
      gathered[u] = load_features<C>(inside && first + u < w.count, from);
      value[u] = value_of<C>(now, u);
    }
#pragma unroll
    for (int u = 0; u < C::kBatch; ++u) {
      if (first + u < w.count) {
        while (r.row < w.last && first + u >= r.end) finish_row<C>(a, w, r, feature_at, sums);
#pragma unroll
        for (int i = 0; i < F::kWide; ++i) {
          sums[i] = fmaf(value[u], feature<C>(gathered[u], i), sums[i]);
        }
      }
    }
  }
  if (w.slot < 0) {
    while (r.row < w.last) finish_row<C>(a, w, r, feature_at, sums);
  } else if (inside) {
    store_partial<C>(a, w.slot, feature_at, sums);
  }
}

// Adds the parts of cut rows: kSlices threads have every kSlices-th part each, and are added in
// order. Grid: x cut rows, y tiles of 32 features.
template <class C>
__device__ __forceinline__ void combine(const Args& a) {
  constexpr int kSlices = C::kThreads / 32;
  const Cut cut = a.cuts[blockIdx.x];
  const u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32;
  const u32 feature_at = blockIdx.y * 32 + lane;
  const float* from = a.partial + u64(cut.first) * a.features + feature_at;
  float sum = 0;
  if (feature_at < a.features) {
#pragma unroll 8
    for (u32 part = slice; part < cut.count; part += kSlices) sum += from[u64(part) * a.features];
  }
  __shared__ float of_slice[kSlices][32];
  of_slice[slice][lane] = sum;
  __syncthreads();
  if (slice != 0 || feature_at >= a.features) return;
#pragma unroll
  for (int i = 1; i < kSlices; ++i) sum += of_slice[i][lane];
  sum += bias_of<C>(a, cut.row);
  store_value<C::kType>(a.y, u64(cut.row) * a.features + feature_at, sum);
}

}  // namespace spmm_csr

// sddmm_csr: y[e] = dot(u[row of e], x[column of e]) for every entry e of a CSR matrix.
//
// Teams and spans are those of spmm_csr (stream.cuh); u is [rows, features], x is [k, features], y
// has one number an entry. A team goes through all tiles of features for a batch of entries, and
// adds what its lanes have at the end. Entries of a row follow each other, so that u comes from L1
// but for the first of them.
//
// Bound: bytes, those of spmm_csr, and 1 + log2(kLanes) shuffles an entry. Measured:
// docs/ops/spmm_csr.md.

#include "./stream.cuh"

namespace spmm_csr {

// The row of every entry of a batch; entries behind the last have its row.
template <class C>
__device__ __forceinline__ void rows_of(u32 (&rows)[C::kBatch], const Args& a, const Work<C>& w,
                                        Row<C>& r, u32 first) {
#pragma unroll
  for (int u = 0; u < C::kBatch; ++u) {
    if (first + u < w.count) {
      while (r.row < w.last && first + u >= r.end) r.advance(a, w);
    }
    rows[u] = r.row;
  }
}

template <class C>
__device__ __forceinline__ void add_products(float& sum, const Features<C>& left,
                                             const Features<C>& right) {
#pragma unroll
  for (int i = 0; i < Facts<C>::kWide; ++i) {
    sum = fmaf(feature<C>(left, i), feature<C>(right, i), sum);
  }
}

// Grid: x teams.
template <class C>
__device__ __forceinline__ void sample(const Args& a) {
  using F = Facts<C>;
  const u32 lane = threadIdx.x % C::kLanes;
  const Work<C> w(a, blockIdx.x * F::kTeams + threadIdx.x / C::kLanes);
  Row<C> r(a, w);
  const u32 longest = __reduce_max_sync(kAll, w.count);
  Held<C> next = w.template hold<false>(0, lane);
#pragma unroll 1
  for (u32 first = 0; first < longest; first += C::kBatch) {
    const Held<C> now = next;
    next = w.template hold<false>(first + C::kBatch, lane);
    const u8 *left[C::kBatch], *right[C::kBatch];
    u32 rows[C::kBatch];
    float sums[C::kBatch]{};
    rows_of<C>(rows, a, w, r, first);
#pragma unroll
    for (int u = 0; u < C::kBatch; ++u) {
      left[u] = a.u + u64(rows[u]) * a.u_stride;
      right[u] = a.x + u64(column_of<C>(now, u)) * a.x_stride;
    }
#pragma unroll 1
    for (u32 tile = 0; tile < a.features; tile += F::kTile) {
      const u32 at = tile + lane * F::kWide;
      Features<C> of_u[C::kBatch], of_x[C::kBatch];
#pragma unroll
      for (int u = 0; u < C::kBatch; ++u) {
        const bool inside = at < a.features && first + u < w.count;
        of_x[u] = load_features<C>(inside, right[u] + u64(at) * F::kBytes);
        of_u[u] = load_features<C>(inside, left[u] + u64(at) * F::kBytes);
      }
#pragma unroll
      for (int u = 0; u < C::kBatch; ++u) add_products<C>(sums[u], of_u[u], of_x[u]);
    }
#pragma unroll
    for (int u = 0; u < C::kBatch; ++u) {
#pragma unroll
      for (int step = C::kLanes / 2; step > 0; step /= 2) {
        sums[u] += __shfl_xor_sync(kAll, sums[u], step);
      }
      const bool mine = lane == u % C::kLanes && first + u < w.count;
      if (mine) store_value<C::kType>(a.y, w.entry + first + u, sums[u]);
    }
  }
}

}  // namespace spmm_csr

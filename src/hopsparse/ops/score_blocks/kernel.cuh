// score_blocks: scores of blocks of keys by their range and sum, for all query heads, in one
// launch.
//
// A cluster has a sequence and a head of keys with all of its query heads, and reads the blocks
// that the sequence has (lengths are on the device) once. Lanes of a team share a row, 8 entries
// each; a row is turned into what no query head changes, and then meets every one of them:
//   q.k <= sum q c + |q| e,  c = (low + high) / 2,  e = (high - low) / 2 + slack (|c| + half range)
// which is the sum over dimensions of the larger of q low and q high, and its slack, since
// |c| + half range is the larger of |low| and |high|. Twice c and e are taken, and half of q.
// Scores stay in shared memory; where they shall be parts of a head's mass, the log of its sum is
// made by warps, then blocks, which send their parts to one another's shared memory, always in the
// same order. Rows that no memory has room for are scored a second time. The newest key of a
// sequence may be taken in on the way (newest.cuh).
//
// Bound: bytes of low and high (bound), of sums in float32 (mean), of both (mass). bfloat16, 8
// heads of 128, blocks of 64, 4.35 TB/s, by bound or mean: 1 x 32K 2.1 MB, 0.5 us; 1 x 128K 8.4 MB,
// 1.9 us; 8 x 32K 17 MB, 3.9 us; 8 x 128K 67 MB, 15.4 us; twice as much by mass. Measured on
// an H200 by bound, in float32: 5.3, 9.1, 10.3 and 27.8 us (docs/ops/score_blocks.md). Where
// queries have the 16 bits of keys the tensor cores multiply (corners.cuh), not measured yet.

#include "./scores.cuh"

namespace score_blocks {

template <class C>
__device__ __forceinline__ void write(const Smem<C>& s, const Args& a, const Rows& r, u32 begin,
                                      u32 end) {
#pragma unroll 1
  for (u32 own = begin + threadIdx.x; own < end; own += Facts<C>::kThreads) {
    const u32 row = row_at<C>(r, own);
    if (!a.per_head) {
      float most[1] = {};
      most_of<C>(most, s, a, r, own - begin);
      a.scores[r.head * a.blocks + row] = most[0];
      continue;
    }
#pragma unroll 1
    for (u32 g = 0; g < a.group; ++g) {
      a.scores[(r.head * a.group + g) * a.blocks + row] = s.scores[g * r.room + own - begin];
    }
  }
}

// Blocks behind the end of the sequence.
template <class C>
__device__ __forceinline__ void write_none(const Args& a, const Rows& r) {
  const u32 heads = a.per_head ? a.group : 1;
#pragma unroll 1
  for (u32 g = 0; g < heads; ++g) {
    float* to = a.scores + (r.head * heads + g) * a.blocks;
#pragma unroll 1
    for (u32 row = r.count + r.rank * Facts<C>::kThreads + threadIdx.x; row < a.blocks;
         row += r.size * Facts<C>::kThreads) {
      to[row] = -infinity();
    }
  }
}

// Grid: a cluster along x, heads of keys along y, sequences along z.
template <class C>
__device__ __forceinline__ void run(const Args& a) {
  extern __shared__ __align__(16) u8 memory[];
  Smem<C>& s = *reinterpret_cast<Smem<C>*>(memory);
  Rows r = rows_of<C>(a, cluster_rank(), gridDim.x);
  begin<C>(s, a, r);
  wait_for_previous();
  u32 tokens[1];
  load_written(tokens, true, a.lengths + blockIdx.z);
  Queries<C> queries;
  load_queries<C>(queries, a);
  Raw<C> now[C::kRows];
  load_rows<C>(now, a, r, 0);
  end_rows<C>(r, a, static_cast<int>(tokens[0]));
  begin_newest<C>(s, a, r, static_cast<int>(tokens[0]));
  keep_queries<C>(s, a, queries);
  __syncthreads();
  score_rows<C>(s, a, r, now, [&](u32 begin, u32 end) { write<C>(s, a, r, begin, end); });
  write_none<C>(a, r);
}

}  // namespace score_blocks

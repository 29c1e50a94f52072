// select_blocks: scores of blocks of keys, and the best of them, in one launch; ascending indices.
//
// Scores come about as in kernel.cuh, bit for bit. Then every block of the cluster sends the ranks
// of its rows, 32 bits in the order of the scores, to the first one, which has them all (a sequence
// of 131,072 tokens is 2,048 blocks of 64) and finds the last rank that is chosen by counts of
// digits, at most four times 8 bits, as `select` does: exactly, and the same whatever the order.
// It stops as soon as all ranks of a digit are chosen. Every warp looks through the counts itself,
// so that a digit costs one barrier of one block. Distributed passes over parts in place, as select
// makes them over longer rows, would each wait for a barrier of the cluster.
//
// Bound: the bytes of kernel.cuh, and the latency of two messages and some six barriers of a block.
// Measured on an H200 by bound: 7.6, 13.8, 12.1 and 30.8 us, when every launch asked for rows ahead
// (docs/ops/select_blocks.md).

#include "./scores.cuh"
#include "order/rank.cuh"

namespace score_blocks {

struct ChooseArgs {
  Args of;       // no scores
  const int* k;  // [batch, kv_heads], or null: k_of_all
  int* indices;  // [batch, kv_heads, width]
  int* counts;   // [batch, kv_heads]
  u32 width;
  int k_of_all, sink, recent;
};

template <class C>
struct ChooseSmem {
  Smem<C> of;
  alignas(16) u32 count[order::kPasses][order::kDigits];
  order::Tally tally;
  alignas(16) u64 ranks_are_there;  // a barrier
  alignas(16) u32 ranks[C::kRanks];
};

// ---- ranks ---------------------------------------------------------------------------------

// Ranks of this block's rows from `begin` to `end` to the first block, four at a time: pieces are
// whole fours but for the last one of the sequence, and what is behind its end is absent. So are
// forced rows, which are chosen whatever their rank.
template <class C>
__device__ __forceinline__ void send_ranks(ChooseSmem<C>& s, const Args& a, const Rows& r,
                                           const order::Bounds& bounds, u32 begin, u32 end) {
  static_assert(Facts<C>::kStep % 4 == 0, "fours of rows are neighbours");
#pragma unroll 1
  for (u32 own = begin + threadIdx.x * 4; own < end; own += Facts<C>::kThreads * 4) {
    const u32 row = row_at<C>(r, own);
    float most[4] = {};
    most_of<C>(most, s.of, a, r, own - begin);
    order::Four ranks;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const bool free = row + i < r.count && !order::forced(bounds, row + i);
      ranks.of[i] = free ? order::rank_of(most[i]) : order::kAbsent;
    }
    store_async_x4(cluster_address(shared_address(s.ranks + row), 0),
                   cluster_address(shared_address(&s.ranks_are_there), 0), ranks.of[0], ranks.of[1],
                   ranks.of[2], ranks.of[3]);
  }
}

// ---- the search, by the first block --------------------------------------------------------

// Counts ranks that begin with the digits found so far, by their next digit. Fours, as they were
// sent: behind the last row of the sequence they are absent. One load for each four, since a branch
// before every count keeps single loads from being under way together.
template <class C>
__device__ __forceinline__ void count_digits(ChooseSmem<C>& s, u32 n, u32 pass, u32 prefix) {
  const u32 shift = 24 - 8 * pass;
#pragma unroll 1
  for (u32 i = threadIdx.x * 4; i < n; i += Facts<C>::kThreads * 4) {
    const order::Four ranks = *reinterpret_cast<const order::Four*>(s.ranks + i);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      const u32 rank = ranks.of[j];
      const bool here = pass == 0 || rank >> (shift + 8) == prefix;
      if (rank == order::kAbsent || !here) continue;
      atomicAdd(&s.count[pass][rank >> shift & (order::kDigits - 1)], 1u);
    }
  }
}

// Ranks that are chosen, of those that are not forced.
template <class C>
__device__ __forceinline__ order::Cut find_cut(ChooseSmem<C>& s, const order::Bounds& bounds) {
  u32 room = bounds.budget - bounds.first - bounds.last, prefix = 0;
#pragma unroll 1
  for (u32 pass = 0; pass < order::kPasses; ++pass) {
    count_digits<C>(s, bounds.n, pass, prefix);
    __syncthreads();
    const order::Found found = order::find_digit(s.count[pass], room);
    if (room == 0) return {order::kNan, bounds.first, 0};
    prefix = prefix << 8 | found.digit;
    if (found.all) return {order::below_digits(prefix, pass), bounds.first, 0};
    room -= found.before;
  }
  return {prefix, bounds.first, room};
}

template <class C>
__device__ __forceinline__ void choose(ChooseSmem<C>& s, const ChooseArgs& a, u64 head,
                                       const order::Bounds& bounds) {
  constexpr u32 kThreads = Facts<C>::kThreads;
  const order::Cut cut = find_cut<C>(s, bounds);
  int* to = a.indices + head * a.width;
  order::write_chosen<kThreads>(s.tally, {s.ranks, 0, bounds.n}, cut, to, a.width);
  u32 above = 0, ties = 0;
  for (u32 i = 0; i < C::kWarps; ++i) above += s.tally.above[i], ties += s.tally.ties[i];
  const u32 count = bounds.first + above + min(ties, cut.taken) + bounds.last;
  order::write_ends(bounds, count, threadIdx.x, kThreads, to, a.width);
  if (threadIdx.x == 0) a.counts[head] = static_cast<int>(count);
}

// ---- the kernel ----------------------------------------------------------------------------

// Grid: a cluster along x, heads of keys along y, sequences along z.
template <class C>
__device__ __forceinline__ void run_chosen(const ChooseArgs& all) {
  extern __shared__ __align__(16) u8 memory[];
  ChooseSmem<C>& s = *reinterpret_cast<ChooseSmem<C>*>(memory);
  const Args& a = all.of;
  Rows r = rows_of<C>(a, cluster_rank(), gridDim.x);
  const u32 bar = shared_address(&s.ranks_are_there);
  if (threadIdx.x == 0) mbarrier_init(bar, 1);
  begin<C>(s.of, a, r);
  for (u32 i = threadIdx.x; i < order::kPasses * order::kDigits; i += Facts<C>::kThreads) {
    s.count[i / order::kDigits][i % order::kDigits] = 0;
  }
  wait_for_previous();
  u32 tokens[1], k[1];
  load_written(tokens, true, a.lengths + blockIdx.z);
  load_written(k, all.k != nullptr, all.k + r.head);
  Queries<C> queries;
  load_queries<C>(queries, a);
  Raw<C> now[C::kRows];
  load_rows<C>(now, a, r, 0);
  end_rows<C>(r, a, static_cast<int>(tokens[0]));
  keep_queries<C>(s.of, a, queries);
  order::Bounds bounds;
  order::set_bounds(bounds, static_cast<int>(r.count),
                    all.k ? static_cast<int>(k[0]) : all.k_of_all, static_cast<int>(all.width),
                    all.sink, all.recent);
  if (r.rank == 0 && threadIdx.x == 0) mbarrier_expect(bar, (r.count + 3) / 4 * 16);
  __syncthreads();
  score_rows<C>(s.of, a, r, now,
                [&](u32 begin, u32 end) { send_ranks<C>(s, a, r, bounds, begin, end); });
  if (r.rank > 0) return;
  // All that comes here has come by then, so that nobody has to wait for a block that leaves.
  mbarrier_wait(bar, 0);
  choose<C>(s, all, r.head, bounds);
}

}  // namespace score_blocks

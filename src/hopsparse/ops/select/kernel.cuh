// select: the k largest scores of each row, or fewer by mass or threshold; ascending indices.
//
// A cluster of kCluster blocks has a row, and each of them a part of it, which it reads once and
// keeps in shared memory as ranks: 32 bits in the order of the scores, 0 for what is not there.
// At most four passes of 8 bits find the last rank that is chosen: a block counts its own ranks by
// digit, and every block adds the counts of all through distributed shared memory. Only counts pass
// between blocks, so that nothing can overflow whatever the scores are. By rank and by threshold
// the search ends as soon as all ranks of a digit are chosen. Equal ranks are taken from the lowest
// column on; two walks over the part put indices where they belong, so that the result does not
// depend on any order.
//
// By mass the digits also carry sums of integer weights, 2^32 exp(score - largest), made by
// operations that IEEE 754 defines; a row ends at the first rank where either k or the mass is
// reached. Bound: latency of about ten barriers of the cluster; of many rows, reading the scores.

#include "epilogue/value.cuh"
#include "order/rank.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid.cuh"

namespace select {

enum class By { rank, mass, threshold };

using namespace order;

constexpr u32 kAll = 0xFFFFFFFF;

struct Args {
  const u8* scores;    // [rows, columns]
  const int* k;        // [rows], or null: k_of_all
  const int* lengths;  // [rows], or null: columns
  const float* limit;  // [rows], or null: number
  int* indices;        // [rows, width]
  int* counts;         // [rows]
  u32 columns, width;
  int k_of_all, sink, recent;
  float number;
};

template <class C>
struct Smem {
  alignas(16) u32 count[kPasses][kDigits];
  u32 total[kDigits];  // of the whole row, in the pass that is on
  // Sums of the low 16 bits of weights, and of what is above them: 48 Ki of either fit 32 bits.
  u32 low[C::kBy == By::mass ? kPasses : 1][C::kBy == By::mass ? kDigits : 1];
  u32 high[C::kBy == By::mass ? kPasses : 1][C::kBy == By::mass ? kDigits : 1];
  u64 mass[kDigits];  // of the whole row, in the pass that is on
  u64 warp_sums[2][32];
  Tally tally;
  u64 sums[2];  // of this block: all weights, those of forced columns
  u64 found_mass;
  u32 found_digit, found_count, found_any;  // by mass
  u32 top, above, ties;
  u32 ranks[C::kCapacity];
};

// What a block knows of its row.
struct Row : Bounds {
  u32 part, begin, count;  // columns of a part; this one's first, and how many
};

__device__ __forceinline__ u32 part_count(const Row& r, u32 rank) {
  const u32 begin = rank * r.part;
  return begin < r.n ? min(r.part, r.n - begin) : 0;
}

// ---- ranks and weights ---------------------------------------------------------------------

__device__ __forceinline__ float score_of(u32 rank) {
  return __uint_as_float(rank >> 31 ? rank & 0x7FFFFFFF : ~rank);
}

template <class C>
__device__ __forceinline__ u64 weight_of(u32 rank, u32 top) {
  constexpr u32 kInfinity = 0xFF800000;
  constexpr u64 kOne = 1ull << 32;
  if (rank == kAbsent) return 0;
  if (top >= kInfinity) return rank >= kInfinity ? kOne : 0;
  const float below = fmaxf(fminf(__fsub_rn(score_of(rank), score_of(top)), 0.0f), -64.0f);
  const float power = __fmul_rn(below, C::kLog2E), whole = floorf(power);
  const float part = __fsub_rn(power, whole);
  float sum = C::kPoly0;
  sum = __fadd_rn(__fmul_rn(sum, part), C::kPoly1);
  sum = __fadd_rn(__fmul_rn(sum, part), C::kPoly2);
  sum = __fadd_rn(__fmul_rn(sum, part), C::kPoly3);
  sum = __fadd_rn(__fmul_rn(sum, part), C::kPoly4);
  sum = __fadd_rn(__fmul_rn(sum, part), C::kPoly5);
  sum = __fadd_rn(__fmul_rn(sum, part), C::kPoly6);
  sum = __fadd_rn(__fmul_rn(sum, part), C::kPoly7);
  const u32 mantissa = static_cast<u32>(__fmul_rn(sum, 8388608.0f));
  const int shift = 9 + static_cast<int>(whole);
  return shift >= 0 ? u64(mantissa) << shift : mantissa >> min(-shift, 31);
}

// ---- the cluster ---------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void sync_row() {
  if constexpr (C::kCluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}

// A word of the same place in another block of the row.
template <class C>
__device__ __forceinline__ u32 of_block(const u32* place, u32 rank) {
  if constexpr (C::kCluster == 1) return *place;
  return load_cluster(cluster_address(shared_address(place), rank));
}
template <class C>
__device__ __forceinline__ u64 of_block(const u64* place, u32 rank) {
  const u32* words = reinterpret_cast<const u32*>(place);
  return u64(of_block<C>(words + 1, rank)) << 32 | of_block<C>(words, rank);
}

__device__ __forceinline__ u64 shuffled_up(u64 value, u32 step) {
  const u32 low = __shfl_up_sync(kAll, static_cast<u32>(value), step);
  return u64(__shfl_up_sync(kAll, static_cast<u32>(value >> 32), step)) << 32 | low;
}
__device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
  for (u32 step = 16; step > 0; step /= 2) {
    const u32 low = __shfl_xor_sync(kAll, static_cast<u32>(value), step);
    value += u64(__shfl_xor_sync(kAll, static_cast<u32>(value >> 32), step)) << 32 | low;
  }
  return value;
}

// ---- reading -------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ Row row_of(const Args& a, u32 row, u32 rank) {
  Row r;
  const int columns = static_cast<int>(a.columns);
  const int n = a.lengths ? max(0, min(a.lengths[row], columns)) : columns;
  const int k = a.k ? a.k[row] : a.k_of_all;
  set_bounds(r, n, k, static_cast<int>(a.width), a.sink, a.recent);
  r.part = (n + C::kCluster - 1) / C::kCluster;
  r.begin = min(rank * r.part, r.n);
  r.count = part_count(r, rank);
  return r;
}

// Ranks of the part, counted by their first digit; forced columns have none but by mass, where they
// still weigh something, and digits are counted once the largest rank is known.
template <class C>
__device__ __forceinline__ void read(Smem<C>& s, const Args& a, const Row& r, u32 row,
                                     float limit) {
  const long long start = static_cast<long long>(row) * a.columns + r.begin;
  u32 top = 0;
#pragma unroll 8
  for (u32 i = threadIdx.x; i < r.count; i += C::kThreads) {
    const float score = load_value<C::kType>(a.scores, start + i);
    u32 rank = rank_of(score);
    if (C::kBy == By::threshold && score < limit) rank = kAbsent;
    if (C::kBy != By::mass && forced(r, r.begin + i)) rank = kAbsent;
    if (C::kBy == By::mass) top = max(top, rank);
    if (C::kBy != By::mass && rank != kAbsent) atomicAdd(&s.count[0][rank >> 24], 1u);
    s.ranks[i] = rank;
  }
  if constexpr (C::kBy == By::mass) {
    top = __reduce_max_sync(kAll, top);
    if (threadIdx.x % 32 == 0) atomicMax(&s.top, top);
  }
}

// By mass: the largest rank of the row, and what is left of the mass behind forced columns.
template <class C>
__device__ __forceinline__ long long mass_left(Smem<C>& s, const Row& r, float part, u32& top) {
  sync_row<C>();
  top = 0;
  for (u32 rank = 0; rank < C::kCluster; ++rank) top = max(top, of_block<C>(&s.top, rank));
  u64 all = 0, of_forced = 0;
  for (u32 i = threadIdx.x; i < r.count; i += C::kThreads) {
    const u64 weight = weight_of<C>(s.ranks[i], top);
    all += weight;
    if (forced(r, r.begin + i)) {
      of_forced += weight;
      s.ranks[i] = kAbsent;
    }
  }
  all = warp_sum(all);
  of_forced = warp_sum(of_forced);
  const u32 warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) s.warp_sums[0][warp] = all, s.warp_sums[1][warp] = of_forced;
  __syncthreads();
  if (threadIdx.x < 2) {
    u64 sum = 0;
    for (u32 i = 0; i < C::kThreads / 32; ++i) sum += s.warp_sums[threadIdx.x][i];
    s.sums[threadIdx.x] = sum;
  }
  sync_row<C>();
  u64 total = 0, have = 0;
  for (u32 rank = 0; rank < C::kCluster; ++rank) {
    total += of_block<C>(&s.sums[0], rank);
    have += of_block<C>(&s.sums[1], rank);
  }
  // A sum is below 2^53: exact, like its rounding up.
  const double wanted = ceil(__dmul_rn(static_cast<double>(part), static_cast<double>(total)));
  const u64 target = min(static_cast<u64>(fmax(wanted, 0.0)), total);
  return static_cast<long long>(target) - static_cast<long long>(have);
}

// ---- the search ----------------------------------------------------------------------------

// Counts ranks of the part that begin with the digits found so far, by their next digit.
template <class C>
__device__ __forceinline__ void count_digits(Smem<C>& s, const Row& r, u32 pass, u32 prefix,
                                             u32 top) {
  const u32 shift = 24 - 8 * pass;
#pragma unroll 4
  for (u32 i = threadIdx.x; i < r.count; i += C::kThreads) {
    const u32 rank = s.ranks[i];
    const bool here = pass == 0 || rank >> (shift + 8) == prefix;
    if (rank == kAbsent || !here) continue;
    const u32 digit = rank >> shift & (kDigits - 1);
    atomicAdd(&s.count[pass][digit], 1u);
    if constexpr (C::kBy == By::mass) {
      const u64 weight = weight_of<C>(rank, top);
      atomicAdd(&s.low[pass][digit], static_cast<u32>(weight & 0xFFFF));
      atomicAdd(&s.high[pass][digit], static_cast<u32>(weight >> 16));
    }
  }
}

// Adds up the counts of all blocks.
template <class C>
__device__ __forceinline__ void add_blocks(Smem<C>& s, u32 pass) {
  for (u32 digit = threadIdx.x; digit < kDigits; digit += C::kThreads) {
    u32 total = 0;
    u64 mass = 0;
#pragma unroll
    for (u32 rank = 0; rank < C::kCluster; ++rank) {
      total += of_block<C>(&s.count[pass][digit], rank);
      if constexpr (C::kBy == By::mass) {
        mass += of_block<C>(&s.low[pass][digit], rank);
        mass += u64(of_block<C>(&s.high[pass][digit], rank)) << 16;
      }
    }
    s.total[digit] = total;
    s.mass[digit] = mass;
  }
}

// Whether the counts of the block are those of the row as they are.
template <class C>
constexpr bool kAlone = C::kCluster == 1 && C::kBy != By::mass;

// By mass, by one warp: the first digit, from the largest down, at which k or the mass is reached.
// A lane has eight digits. `room` is what is left of k; in the first pass it may be more than there
// is.
template <class C>
__device__ __forceinline__ void find_heavy_digit(Smem<C>& s, u32 room, long long left) {
  constexpr u32 kEach = kDigits / 32;
  const u32 lane = threadIdx.x % 32, from = kDigits - 1 - lane * kEach;
  u32 own[kEach], count = 0;
  u64 weight[kEach], mass = 0;
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) {
    own[i] = s.total[from - i];
    weight[i] = s.mass[from - i];
    count += own[i];
    mass += weight[i];
  }
  u32 after = count;
  u64 mass_after = mass;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 more = __shfl_up_sync(kAll, after, step);
    const u64 more_mass = shuffled_up(mass_after, step);
    if (lane >= step) after += more, mass_after += more_mass;
  }
  room = min(room, __shfl_sync(kAll, after, 31));
  u32 before = after - count, digit = from;
  u64 mass_before = mass_after - mass;
  bool hit = false;
#pragma unroll
  for (u32 i = 0; i < kEach; ++i) {
    if (hit) continue;
    digit = from - i;
    hit = before + own[i] >= room || static_cast<long long>(mass_before + weight[i]) >= left;
    if (!hit) before += own[i], mass_before += weight[i];
  }
  const u32 hits = __ballot_sync(kAll, hit);
  if (lane == 0) s.found_any = room > 0;
  if (hit && lane == __ffs(hits) - 1) {
    s.found_digit = digit;
    s.found_count = before;
    s.found_mass = mass_before;
  }
}

// The next digit; less room is left where less is there, and none where nothing is.
template <class C>
__device__ __forceinline__ Found next_digit(Smem<C>& s, u32 pass, u32& room, long long& left) {
  if constexpr (C::kBy == By::mass) {
    if (threadIdx.x < 32) find_heavy_digit<C>(s, room, left);
    __syncthreads();
    if (!s.found_any) room = 0;
    left -= static_cast<long long>(s.found_mass);
    // The next pass overwrites what was found behind its first barrier.
    return {s.found_digit, s.found_count, false};
  } else {
    return find_digit(kAlone<C> ? s.count[pass] : s.total, room);
  }
}

// This block's ranks that are chosen for their digit.
template <class C>
__device__ __forceinline__ void add_above(Smem<C>& s, u32 pass, const Found& found, u32 room) {
  if constexpr (C::kCluster == 1) {
    if (threadIdx.x == 0) s.above += found.all ? room : found.before;
  } else {
    for (u32 digit = found.digit + !found.all + threadIdx.x; digit < kDigits;
         digit += C::kThreads) {
      const u32 own = s.count[pass][digit];
      if (own > 0) atomicAdd(&s.above, own);
    }
  }
}

// The last rank that is chosen, and how many of those that equal it; false: no rank is. It ends as
// soon as all ranks of a digit are chosen.
template <class C>
__device__ __forceinline__ bool find_rank(Smem<C>& s, const Row& r, float limit, u32& rank,
                                          u32& equal) {
  u32 room = r.budget - r.first - r.last, top = 0;
  long long left = 1;
  if constexpr (C::kBy == By::mass) {
    left = mass_left<C>(s, r, limit, top);
    if (left <= 0) room = 0;
  }
  rank = 0;
  for (u32 pass = 0; pass < kPasses; ++pass) {
    if (pass > 0 || C::kBy == By::mass) count_digits<C>(s, r, pass, rank, top);
    sync_row<C>();
    if constexpr (!kAlone<C>) {
      add_blocks<C>(s, pass);
      __syncthreads();
    }
    const Found found = next_digit<C>(s, pass, room, left);
    if (room == 0) return false;  // in the first pass, in every block of the row
    // What was asked for may be more than there is: then all of the last digit is taken.
    add_above<C>(s, pass, found, room);
    rank = rank << 8 | found.digit;
    if (found.all) {
      rank = below_digits(rank, pass);
      equal = 0;
      return true;
    }
    room -= found.before;
  }
  equal = room;
  if constexpr (C::kBy == By::mass) {
    const u64 weight = weight_of<C>(rank, top);
    if (weight > 0 && left > 0) {
      equal = static_cast<u32>(min(u64(equal), (u64(left) + weight - 1) / weight));
    }
  }
  if (threadIdx.x == 0) s.ties = s.count[kPasses - 1][rank & (kDigits - 1)];
  return true;
}

// ---- writing -------------------------------------------------------------------------------

// Where the part begins in the result, how many equal ranks it takes, and the row's count.
template <class C>
__device__ __forceinline__ void place_part(Smem<C>& s, const Row& r, u32 own, u32 equal, u32& base,
                                           u32& taken, u32& count) {
  u32 ties_before = 0;
  base = taken = 0;
  count = r.first;
  for (u32 rank = 0; rank < C::kCluster; ++rank) {
    const u32 ties = of_block<C>(&s.ties, rank);
    const u32 takes = min(ties, equal > ties_before ? equal - ties_before : 0);
    if (rank == own) base = count, taken = takes;
    count += of_block<C>(&s.above, rank) + takes;
    ties_before += ties;
  }
  count += r.last;
}

// Grid: a cluster along x for each row.
template <class C>
__device__ __forceinline__ void run(const Args& a) {
  extern __shared__ __align__(16) u8 memory[];
  Smem<C>& s = *reinterpret_cast<Smem<C>*>(memory);
  const u32 own = C::kCluster == 1 ? 0 : cluster_rank(), row = blockIdx.x / C::kCluster;
  let_next_start();
  u32* words = reinterpret_cast<u32*>(memory);
  constexpr u32 kWords = (sizeof(Smem<C>) - sizeof(s.ranks)) / 4;
  for (u32 i = threadIdx.x; i < kWords; i += C::kThreads) words[i] = 0;
  wait_for_previous();
  const Row r = row_of<C>(a, row, own);
  __syncthreads();
  const float limit = a.limit ? a.limit[row] : a.number;
  read<C>(s, a, r, row, limit);
  u32 last = kNan, equal = 0;
  if (!find_rank<C>(s, r, limit, last, equal)) last = kNan, equal = 0;
  sync_row<C>();
  u32 base, taken, count;
  place_part<C>(s, r, own, equal, base, taken, count);
  int* to = a.indices + static_cast<u64>(row) * a.width;
  write_chosen<C::kThreads>(s.tally, {s.ranks, r.begin, r.count}, {last, base, taken}, to, a.width);
  write_ends(r, count, own * C::kThreads + threadIdx.x, C::kCluster * C::kThreads, to, a.width);
  if (own == 0 && threadIdx.x == 0) a.counts[row] = static_cast<int>(count);
  // Nobody leaves while its memory is read: what was read is used above.
  if constexpr (C::kCluster > 1) cluster_sync_relaxed();
}

}  // namespace select

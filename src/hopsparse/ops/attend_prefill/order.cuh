// The order in which attend_prefill works: tiles of queries and lists, most keys first.
//
//   grid       one block of kThreads threads
//   sort       by counting, kClasses of work for each section of lists, an eighth apart or less
// Sections are lists whose keys fit the L2 cache together; they come one after the other. Nothing
// else depends on the order: within a class it is whoever came first.

#include "ptx/base.cuh"

namespace attend_prefill_order {

struct Args {
  const int* starts;   // [batch + 1]
  const int* lengths;  // [batch]
  const int* counts;   // [batch, lists, q_blocks], or null
  int4* work;          // {next item, bundles, 0, 0}, then {sequence, tile, list, 0} a bundle
  u32 batch, lists, per_section;
  u32 tokens;    // of all queries
  u32 rows;      // queries of a tile
  u32 block;     // tokens of a listed block; 0 where all tokens are attended
  u32 q_blocks;  // rows of lists, and entries of one
  u32 most;
  u32 capacity;  // tokens that a sequence has room for
};

constexpr u32 kThreads = 1024, kClasses = 128, kMostSections = 64, kKeys = 128;
constexpr u32 kPerThread = kClasses * kMostSections / kThreads;

// Tiles of sequence b are places of their own: those before it have at most starts[b] / rows + b.
__device__ __forceinline__ u32 first_place(const Args& a, u32 b) {
  return max(a.starts[b], 0) / a.rows + b;
}

// The class of a place and list, or none: less work is a higher class.
__device__ __forceinline__ u32 class_of(const Args& a, u32 place, u32 list, u32& b, u32& tile) {
  u32 low = 0, high = a.batch;
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (first_place(a, middle) <= place) {
      low = middle;
    } else {
      high = middle;
    }
  }
  b = low;
  tile = place - first_place(a, low);
  const int queries = a.starts[b + 1] - a.starts[b];
  const int left = queries - static_cast<int>(tile * a.rows);
  const u32 token = a.starts[b] + tile * a.rows;  // negative ones are large
  if (queries <= 0 || left <= 0 || token >= a.tokens) return kClasses;
  const u32 length = min(static_cast<u32>(max(a.lengths[b], 0)), a.capacity);
  const u32 before = length > static_cast<u32>(queries) ? length - queries : 0;
  const u32 end = before + tile * a.rows + min(static_cast<u32>(left), a.rows);
  u32 keys = end;
  if (a.block) {
    const u32 q_block = tile * a.rows / a.block;
    const u64 row = (u64(b) * a.lists + list) * a.q_blocks + q_block;
    int listed = q_block < a.q_blocks ? static_cast<int>(a.most) : 0;
    if (listed && a.counts) listed = a.counts[row];
    keys = min(end, min(static_cast<u32>(max(listed, 0)), a.most) * a.block);
  }
  // Eighths of powers of two: whatever sequences have room for, most of which may be empty.
  const u32 tiles = keys / kKeys + 1, power = 31 - __clz(tiles);
  const u32 eighths = power < 3 ? tiles << (3 - power) : tiles >> (power - 3);
  return kClasses - 1 - min(8 * power + eighths % 8, kClasses - 1);
}

// Where each class of each section starts; its threads are those of the block.
__device__ __forceinline__ void scan(u32* starts, u32* sums) {
  u32 own = 0;
  for (u32 i = 0; i < kPerThread; ++i) own += starts[threadIdx.x * kPerThread + i];
  sums[threadIdx.x] = own;
  __syncthreads();
  for (u32 step = 1; step < kThreads; step *= 2) {
    const u32 before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  u32 at = sums[threadIdx.x] - own;
  for (u32 i = 0; i < kPerThread; ++i) {
    const u32 count = starts[threadIdx.x * kPerThread + i];
    starts[threadIdx.x * kPerThread + i] = at;
    at += count;
  }
}

__device__ __forceinline__ void run(const Args& a) {
  __shared__ u32 starts[kClasses * kMostSections];
  __shared__ u32 sums[kThreads];
  for (u32 i = threadIdx.x; i < kClasses * kMostSections; i += kThreads) starts[i] = 0;
  __syncthreads();
  const u32 bundles = (a.tokens / a.rows + a.batch) * a.lists;
  for (u32 i = threadIdx.x; i < bundles; i += kThreads) {
    u32 b, tile;
    const u32 list = i % a.lists, found = class_of(a, i / a.lists, list, b, tile);
    if (found < kClasses) atomicAdd(&starts[list / a.per_section * kClasses + found], 1u);
  }
  __syncthreads();
  scan(starts, sums);
  if (threadIdx.x == kThreads - 1) a.work[0] = {0, static_cast<int>(sums[threadIdx.x]), 0, 0};
  __syncthreads();
  for (u32 i = threadIdx.x; i < bundles; i += kThreads) {
    u32 b, tile;
    const u32 list = i % a.lists, found = class_of(a, i / a.lists, list, b, tile);
    if (found == kClasses) continue;
    const u32 at = atomicAdd(&starts[list / a.per_section * kClasses + found], 1u);
    a.work[1 + at] = {static_cast<int>(b), static_cast<int>(tile), static_cast<int>(list), 0};
  }
}

}  // namespace attend_prefill_order

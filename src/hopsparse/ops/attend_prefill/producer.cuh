// The producer of attend_prefill: items, the tiles of keys that their lists name, and their copies.
#pragma once
#include "pipe/ring.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace attend_prefill {

// An item, and where its list and its pages are.
struct Job {
  Item item;
  u32 batch, kv_head;
  const int* list;  // null: all tokens
  u32 slots;        // tokens of all its entries
};

// Item `number`, of those that order.cuh has sorted.
__device__ __forceinline__ Job job_of(const Args& a, u32 number) {
  const int4 bundle = a.work[1 + number / a.units];
  const u32 b = bundle.x, list = bundle.z, unit = number % a.units;
  const u32 first = bundle.y * a.rows;  // of the queries of its sequence
  const u32 queries = a.starts[b + 1] - a.starts[b], sharers = a.heads / a.lists;
  const u32 per_item = a.rows == kRows ? 2 : 1;
  Job job;
  job.batch = b;
  job.item.token = a.starts[b] + first;
  job.item.rows = min(min(queries - first, a.rows), a.tokens - job.item.token);
  const u32 length = min(static_cast<u32>(max(a.lengths[b], 0)), a.table_width * a.page);
  job.item.place = (length > queries ? length - queries : 0) + first;
  job.item.head = list * sharers + unit * per_item;
  job.item.heads = min(per_item, sharers - unit * per_item);
  job.kv_head = job.item.head / (a.heads / a.kv_heads);
  job.list = nullptr;
  job.slots = job.item.place + job.item.rows;
  if (a.indices) {
    const u32 q_block = first / a.block;
    const u64 row = (u64(b) * a.lists + list) * a.q_blocks + q_block;
    int listed = q_block < a.q_blocks ? static_cast<int>(a.most) : 0;
    if (listed && a.counts) listed = a.counts[row];
    job.list = a.indices + row * a.most;
    job.slots = min(static_cast<u32>(max(listed, 0)), a.most) * a.block;
  }
  return job;
}

// Tiles of a job that some query sees, in the order of its list. Lane i knows about piece i.
struct Walk {
  u32 slot;    // where the next tile starts
  bool found;  // whether there is a tile
  int first;   // position of this lane's piece, or kNone
  u32 page;    // physical page of it; one past the pool gives zeros
  u32 flags;

  __device__ __forceinline__ void next(const Args& a, const Job& job) {
    const u32 lane = threadIdx.x % 32, end = job.item.place + job.item.rows;
    for (found = false; !found && slot < job.slots; slot += kKeys) {
      const u32 mine = slot + lane * 16;
      u32 position = mine;
      bool there = lane < kPieces && mine < job.slots;
      if (there && job.list) {
        const u32 entry = mine / a.block;
        const u32 listed = static_cast<u32>(job.list[entry]);  // negative ones are large
        there = listed <= (end - 1) / a.block;
        position = listed * a.block + mine % a.block;
      }
      there = there && position < end;
      page = a.pages;
      if (there) {
        const u32 number = position / a.page;
        const u32 known = a.table[u64(job.batch) * a.table_width + min(number, a.table_width - 1)];
        there = number < a.table_width && known < a.pages;
        if (there) page = known;
      }
      first = there ? static_cast<int>(position) : kNone;
      tell(a, job, end, position);
    }
  }

  // Flags of a tile whose pieces are known; `position` is that of this lane's, seen or not.
  __device__ __forceinline__ void tell(const Args& a, const Job& job, u32 end, u32 position) {
    const u32 lane = threadIdx.x % 32, last = first + 15;
    const u32 seen = __ballot_sync(0xFFFFFFFF, first != kNone);
    const u32 lead = lane - lane % (a.page / 16);  // whose copy brings this lane's piece
    const u32 step = a.rows == kRows ? 0 : kRows;
    const bool brought = lane < kPieces && seen >> lead & 1;
    found = seen != 0;
    flags = 0;
    for (u32 wg = 0; wg < 2; ++wg) {
      const bool hidden = lane < kPieces && last > job.item.place + wg * step;
      if (__ballot_sync(0xFFFFFFFF, hidden)) flags |= kMasked << wg;
    }
    if (__ballot_sync(0xFFFFFFFF, brought && position + 15 >= end)) flags |= kErase;
  }
};

// All lanes pass before one of them fills what was waited for: it could be emptied again at once.
__device__ __forceinline__ void wait_together(u32 bar, u32 parity) {
  mbarrier_wait(bar, parity);
  __syncwarp();
}

// One tile of keys, or of values: a copy a page and 64 columns, all on one barrier.
template <class C>
__device__ __forceinline__ void load_tile(const TensorMap& map, u32 tile, u32 bar, u32 pages,
                                          const Args& a, u32 kv_head, bool elected) {
  if (elected) mbarrier_expect(bar, Smem<C>::kTile);
#pragma unroll 1
  for (u32 piece = 0; piece < kPieces; piece += a.page / 16) {
    const u32 page = __shfl_sync(0xFFFFFFFF, pages, piece);
    if (elected) {
#pragma unroll
      for (u32 panel = 0; panel < Smem<C>::kPanels; ++panel) {
        const u32 to = tile + panel * Smem<C>::kPanel + piece * 16 * kRowBytes;
        tma_load(to, map, bar, panel * 64, 0, kv_head, page);
      }
    }
  }
}

// A tile that is found: what consumers are told of it, its keys, its values.
template <class C>
__device__ __forceinline__ void send(const Args& a, u32 smem, const Walk& walk, u32 kv_head,
                                     bool last, Ring<C::kStages>& ring, bool elected) {
  using S = Smem<C>;
  const Bars<C> bars(smem);
  const u32 lane = threadIdx.x % 32, stage = ring.stage;
  wait_together(bars.keys_empty(stage), ring.parity);
  if (lane < kPieces) {
    store_shared_u32(smem + S::kFirstAt + (stage * kPieces + lane) * 4, walk.first);
  }
  if (lane == 0) {
    store_shared_u32(smem + S::kFlagsAt + stage * 4, walk.flags | (last ? kLast : 0));
  }
  __syncwarp();  // what is told is there before the barrier of the keys can be full
  load_tile<C>(a.keys, smem + S::kKeysAt + stage * S::kTile, bars.keys_full(stage), walk.page, a,
               kv_head, elected);
  wait_together(bars.values_empty(stage), ring.parity);
  load_tile<C>(a.values, smem + S::kValuesAt + stage * S::kTile, bars.values_full(stage), walk.page,
               a, kv_head, elected);
  ring.advance();
}

// The queries of both warpgroups; those behind the last token are zeros.
template <class C>
__device__ __forceinline__ void load_queries(const Args& a, u32 smem, const Item& item, u32 parity,
                                             bool elected) {
  using S = Smem<C>;
  const Bars<C> bars(smem);
  for (u32 wg = 0; wg < 2; ++wg) {
    const u32 token = item.token + (a.rows == kRows ? 0 : wg * kRows);
    const u32 head = item.head + (a.rows == kRows ? min(wg, item.heads - 1) : 0);
    wait_together(bars.q_empty(wg), parity);
    if (elected) {
      mbarrier_expect(bars.q_full(wg), S::kQ);
      for (u32 panel = 0; panel < S::kPanels; ++panel) {
        tma_load(smem + wg * S::kQ + panel * S::kQPanel, a.q, bars.q_full(wg), panel * 64, head,
                 token);
      }
    }
  }
}

__device__ __forceinline__ void publish(u32 address, u32 bar, const Item& item, bool elected) {
  if (elected) {
    store_shared_x4(address, {item.token, item.rows, item.place, item.head});
    store_shared_x4(address + 16, {item.heads, item.tiles, 0, 0});
    mbarrier_arrive(bar);
  }
}

template <class C>
__device__ __forceinline__ void produce(const Args& a, u32 smem) {
  const Bars<C> bars(smem);
  const u32 lane = threadIdx.x % 32;
  const bool elected = lane == 0;
  Ring<C::kStages> ring;
  Ring<2> slot;
  ring.parity = slot.parity = 1;  // of the phase before the first: all starts empty
  u32 q_parity = 1;
  u32* counter = reinterpret_cast<u32*>(a.work);
  const u32 items = a.work[0].y * a.units;
  for (;;) {
    u32 number = 0;
    if (elected) number = atomicAdd(counter, 1u);
    number = uniform(number);
    Job job = {};
    Walk walk = {};
    if (number < items) {
      job = job_of(a, number);
      walk.next(a, job);
      job.item.tiles = walk.found;
    }
    wait_together(bars.item_empty(slot.stage), slot.parity);
    publish(smem + Smem<C>::kItemAt + slot.stage * 32, bars.item_full(slot.stage), job.item,
            elected);
    slot.advance();
    if (number >= items) break;
    bool first = true;
    while (walk.found) {
      const Walk now = walk;
      walk.next(a, job);  // a tile ahead: its list and its table are on their way meanwhile
      send<C>(a, smem, now, job.kv_head, !walk.found, ring, elected);
      if (first) {
        load_queries<C>(a, smem, job.item, q_parity, elected);
        q_parity ^= 1;
        first = false;
      }
    }
  }
}

}  // namespace attend_prefill

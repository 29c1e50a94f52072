// out[tokens, heads, dim] = softmax(scale q k^T) v over listed blocks of keys in pages, causally,
// and lse[tokens, heads], its natural logarithm of the sum of exponentials.
//
//   item       64 queries of two heads that share a list, or 128 of one head, over its list
//   tile       128 keys: pieces of 16 tokens, each from a place of its own
//   producer   one warp: claims items, walks their lists, and keeps kStages tiles of keys and of
//              values filled by TMA, a page at a time
//   consumers  two warpgroups of 64 rows each: scores by wgmma, softmax in base 2 in registers,
//              weights of 16 bits as the operand of the second wgmma; the scores of the next tile
//              are multiplied beside the values of this one, and the warpgroups take turns
//   grid       persistent; order.cuh says which items come first, a counter who has the next
// 128 x 128 x 128 takes the tensor cores 2048 clocks for 64 KiB of keys and values.
// On an H200 544 to 615 TFLOP/s on kept blocks (docs/ops/attend_prefill.md).

#include "epilogue/value.cuh"
#include "pipe/ring.cuh"
#include "pipe/turns.cuh"
#include "ptx/barrier.cuh"
#include "ptx/base.cuh"
#include "ptx/power.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace attend_prefill {

struct Args {
  TensorMap q;       // [tokens, heads, dim], boxes of 64 tokens, one head, 64 columns
  TensorMap keys;    // [pages, kv_heads, page, dim], boxes of one page, one head, 64 columns
  TensorMap values;  // as keys
  const int* starts;
  const int* lengths;
  const int* table;    // [batch, table_width]
  const int* indices;  // [batch, lists, q_blocks, most], or null: all tokens
  const int* counts;   // [batch, lists, q_blocks], or null: all of `most`
  int4* work;          // what order.cuh wrote
  void* out;           // [tokens, heads, dim], contiguous
  float* lse;          // [tokens, heads], contiguous
  u32 heads, kv_heads, lists;
  u32 tokens;
  u32 rows;   // queries of an item: 64 or 128
  u32 units;  // items of a list and a tile of queries
  u32 block, q_blocks, most;
  u32 pages, page, table_width;
  float power;  // scale * log2(e), above 0
};

constexpr int kKeys = 128, kRows = 64, kPieces = 8;
constexpr u32 kRowBytes = 128;
__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

// ---- Shared memory -----------------------------------------------------------------------------

template <class C>
struct Smem {
  static constexpr u32 kPanels = C::kDim / 64;
  static constexpr u32 kQPanel = kRows * kRowBytes, kPanel = kKeys * kRowBytes;
  static constexpr u32 kQ = kPanels * kQPanel, kTile = kPanels * kPanel;  // of a warpgroup; of keys
  static constexpr u32 kKeysAt = 2 * kQ;
  static constexpr u32 kValuesAt = kKeysAt + C::kStages * kTile;
  static constexpr u32 kFirstAt = kValuesAt + C::kStages * kTile;  // [stage][piece]: positions
  static constexpr u32 kFlagsAt = kFirstAt + C::kStages * kPieces * 4;
  static constexpr u32 kItemAt = (kFlagsAt + C::kStages * 4 + 15) / 16 * 16;  // two of them
  static constexpr u32 kBarriersAt = kItemAt + 2 * 32;
  static constexpr u32 kBarriers = 4 * C::kStages + 8;
  static constexpr u32 kBytes = kBarriersAt + kBarriers * 8;
};

// Barriers, by their numbers.
template <class C>
struct Bars {
  u32 base;
  __device__ __forceinline__ explicit Bars(u32 smem) : base(smem + Smem<C>::kBarriersAt) {}
  __device__ __forceinline__ u32 at(u32 number) const { return base + number * 8; }
  __device__ __forceinline__ u32 keys_full(u32 s) const { return at(s); }
  __device__ __forceinline__ u32 keys_empty(u32 s) const { return at(C::kStages + s); }
  __device__ __forceinline__ u32 values_full(u32 s) const { return at(2 * C::kStages + s); }
  __device__ __forceinline__ u32 values_empty(u32 s) const { return at(3 * C::kStages + s); }
  __device__ __forceinline__ u32 item_full(u32 s) const { return at(4 * C::kStages + s); }
  __device__ __forceinline__ u32 item_empty(u32 s) const { return at(4 * C::kStages + 2 + s); }
  __device__ __forceinline__ u32 q_full(u32 wg) const { return at(4 * C::kStages + 4 + wg); }
  __device__ __forceinline__ u32 q_empty(u32 wg) const { return at(4 * C::kStages + 6 + wg); }
};

constexpr u32 kConsumerWarps = 8;

template <class C>
__device__ __forceinline__ void init_barriers(Bars<C> bars) {
  if (threadIdx.x == 0) {
    for (u32 s = 0; s < C::kStages; ++s) {
      mbarrier_init(bars.keys_full(s), 1);
      mbarrier_init(bars.keys_empty(s), kConsumerWarps);
      mbarrier_init(bars.values_full(s), 1);
      mbarrier_init(bars.values_empty(s), kConsumerWarps);
    }
    for (u32 s = 0; s < 2; ++s) {
      mbarrier_init(bars.item_full(s), 1);
      mbarrier_init(bars.item_empty(s), kConsumerWarps);
      mbarrier_init(bars.q_full(s), 1);
      mbarrier_init(bars.q_empty(s), kConsumerWarps / 2);
    }
    mbarrier_init_fence();
  }
}

// What consumers are told of a tile.
constexpr u32 kMasked = 1;  // << warpgroup: not all of its queries see all keys
constexpr u32 kErase = 4;   // rows of values hold what is not of this sequence, or lies ahead
constexpr u32 kLast = 8;    // of its item
constexpr int kNone = 0x7FFF0000;  // a position that no query sees

// The queries of an item. `rows` is 0 when there are no more items.
struct Item {
  u32 token, rows, place;  // first query, how many, and its position in its sequence
  u32 head, heads;         // the first head, and how many: 1 or 2
  u32 tiles;               // whether there are any keys
};

}  // namespace attend_prefill

#include "./producer.cuh"
#include "./softmax.cuh"

namespace attend_prefill {

// ---- Consumers ---------------------------------------------------------------------------------

__device__ __forceinline__ Item read_item(u32 address) {
  const uint4 words = load_shared_x4(address);
  const uint2 rest = load_shared_x2(address + 16);
  return {words.x, words.y, words.z, words.w, rest.x, rest.y};
}

// Each warp says that it has read something.
__device__ __forceinline__ void release(u32 bar) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(bar);
}

// What a thread knows of the tile that its ring is at.
template <class C>
struct Tile {
  u32 flags;
  bool erase;  // this thread's row of values

  __device__ __forceinline__ void wait(u32 smem, const Ring<C::kStages>& ring, int end) {
    using S = Smem<C>;
    mbarrier_wait(Bars<C>(smem).keys_full(ring.stage), ring.parity);
    flags = load_shared<0>(smem + S::kFlagsAt + ring.stage * 4);
    const u32 row = threadIdx.x % kKeys;
    const u32 first = smem + S::kFirstAt + (ring.stage * kPieces + row / 16) * 4;
    erase = static_cast<int>(load_shared<0>(first) + row % 16) >= end;
  }
};

// Zeros in place of values whose weight is zero: they may be NaN. Both warpgroups write them.
template <class C>
__device__ __forceinline__ void erase_values(u32 tile, bool mine, u32 wg) {
  if (mine) {
    const u32 row = tile + threadIdx.x % kKeys * kRowBytes;
#pragma unroll 1
    for (u32 at = 0; at < Smem<C>::kTile; at += Smem<C>::kPanel) {
#pragma unroll
      for (u32 chunk = 0; chunk < kRowBytes; chunk += 16) {
        store_shared_x4(row + at + chunk, {0, 0, 0, 0});
      }
    }
  }
  async_proxy_fence();
  named_barrier<128>(1 + wg);
}

// Waits for the values of a tile, and makes them safe to multiply.
template <class C>
__device__ __forceinline__ void wait_for_values(u32 smem, const Ring<C::kStages>& ring,
                                                const Tile<C>& tile, u32 wg) {
  mbarrier_wait(Bars<C>(smem).values_full(ring.stage), ring.parity);
  if (tile.flags & kErase) {
    erase_values<C>(smem + Smem<C>::kValuesAt + ring.stage * Smem<C>::kTile, tile.erase, wg);
  }
}

template <class C>
__device__ __forceinline__ u64 keys_at(u32 smem, u32 stage) {
  return swizzled_descriptor(smem + Smem<C>::kKeysAt + stage * Smem<C>::kTile);
}

// Read along the columns: the next 64 of them are a panel further, the next 8 keys 1024 bytes.
template <class C>
__device__ __forceinline__ u64 values_at(u32 smem, u32 stage) {
  return swizzled_descriptor(smem + Smem<C>::kValuesAt + stage * Smem<C>::kTile) |
         u64(Smem<C>::kPanel >> 4) << 16;
}

// The compiler may not touch sums that are in flight, nor read them before the wait above; nor
// write operands behind the fence below.
template <int Count>
__device__ __forceinline__ void hold(float (&sums)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int Count>
__device__ __forceinline__ void hold(u32 (&words)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// Scores that are there become powers: their mask, the release of their keys, their maxima.
template <class C>
__device__ __forceinline__ Fade weights_of(Scores& s, Softmax& softmax, const Args& a, u32 smem,
                                           const Ring<C::kStages>& ring, const Tile<C>& tile,
                                           int place, u32 wg) {
  const Bars<C> bars(smem);
  if (tile.flags & kMasked << wg) {
    hide(s, smem + Smem<C>::kFirstAt + ring.stage * kPieces * 4, place);
    __syncwarp();  // all lanes have read the positions
  }
  release(bars.keys_empty(ring.stage));
  if (tile.flags & kLast) release(bars.q_empty(wg));
  return softmax.take(s, a.power);
}

// All tiles of an item.
template <class C>
__device__ __forceinline__ void attend(float (&o)[C::kDim / 2], Softmax& softmax, const Args& a,
                                       u32 smem, u32 wg, Ring<C::kStages>& keys,
                                       Ring<C::kStages>& values, int place, int end) {
  const Bars<C> bars(smem);
  const u64 q = swizzled_descriptor(smem + wg * Smem<C>::kQ);
  Tile<C> tile;
  Scores s;
  Weights p;
  tile.wait(smem, keys, end);
  wgmma_fence();
  C::score(s, q, keys_at<C>(smem, keys.stage));
  wgmma_commit();
  wgmma_wait<0>();
  hold(s);
  weights_of<C>(s, softmax, a, smem, keys, tile, place, wg);
  keys.advance();
  pack_weights<C>(p, s);
  wait_for_values<C>(smem, values, tile, wg);
#pragma unroll 1
  while (!(tile.flags & kLast)) {
    Tile<C> next;
    next.wait(smem, keys, end);
    if constexpr (C::kTurns) wait_for_turn(wg);
    hold(o);
    hold(p);
    wgmma_fence();
    C::score(s, q, keys_at<C>(smem, keys.stage));
    wgmma_commit();
    C::weigh(o, p, values_at<C>(smem, values.stage));
    wgmma_commit();
    if constexpr (C::kTurns) give_turn_to(1 - wg);
    wgmma_wait<1>();  // the scores
    hold(s);
    const Fade fade = weights_of<C>(s, softmax, a, smem, keys, next, place, wg);
    keys.advance();
    hold(s);
    const u32 read = values.stage;
    values.advance();
    // Here, not where they are needed: without a branch between them ptxas moves the powers behind
    // the next wait, and nothing would run beside the product.
    wait_for_values<C>(smem, values, next, wg);
    wgmma_wait<0>();
    hold(o);
    release(bars.values_empty(read));
    fade_sums<C>(o, fade);
    pack_weights<C>(p, s);
    tile = next;
  }
  hold(o);
  hold(p);
  wgmma_fence();
  C::weigh(o, p, values_at<C>(smem, values.stage));
  wgmma_commit();
  wgmma_wait<0>();
  hold(o);
  release(bars.values_empty(values.stage));
  values.advance();
}

template <class C>
__device__ __forceinline__ void consume(const Args& a, u32 smem, u32 wg) {
  const Bars<C> bars(smem);
  Ring<C::kStages> keys, values;
  Ring<2> slot;
  u32 q_parity = 0;
  const u32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // and the one 8 below it
  const u32 step = a.rows == kRows ? 0 : kRows;  // from this warpgroup's queries to the other's
  if constexpr (C::kTurns) {
    if (wg == 1) give_turn_to(0);
  }
  for (;;) {
    mbarrier_wait(bars.item_full(slot.stage), slot.parity);
    const Item item = read_item(smem + Smem<C>::kItemAt + slot.stage * 32);
    __syncwarp();
    release(bars.item_empty(slot.stage));
    slot.advance();
    if (item.rows == 0) break;
    float o[C::kDim / 2];
#pragma unroll
    for (int i = 0; i < C::kDim / 2; ++i) o[i] = 0;
    Softmax softmax;
    if (item.tiles) {
      mbarrier_wait(bars.q_full(wg), q_parity);
      q_parity ^= 1;
      attend<C>(o, softmax, a, smem, wg, keys, values, item.place + wg * step + row,
                item.place + item.rows);
    }
    const u32 head = item.head + (step ? 0 : min(wg, item.heads - 1));
    const bool mine = step || wg < item.heads;
    const int left = mine ? static_cast<int>(item.rows) - static_cast<int>(wg * step + row) : 0;
    store<C>(a, o, softmax, u64(item.token + wg * step + row) * a.heads + head, left);
  }
  if constexpr (C::kTurns) {
    if (wg == 0) wait_for_turn(0);  // which the other one gave last
  }
}

// ---- The block ---------------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void run(const Args& a, u8* dynamic) {
  const u32 smem = shared_address(dynamic);
  if (smem % 1024 != 0) __trap();  // swizzled tiles start on 1024 bytes
  init_barriers<C>(Bars<C>(smem));
  __syncthreads();
  const u32 wg = uniform(threadIdx.x / 128);
  if (wg == 2) {
    keep_registers<C::kProducerRegisters>();
    if (threadIdx.x / 32 % 4 == 0) produce<C>(a, smem);
  } else {
    take_registers<C::kConsumerRegisters>();
    consume<C>(a, smem, wg);
  }
}

}  // namespace attend_prefill

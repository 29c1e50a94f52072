// What Hopper adds, for one cluster at a time: mbarriers that count bytes, tensor maps and their
// copies, named barriers, and wgmma that reads its operands where descriptors say.
//
// Copies are done at once, after a pause: as early as they can harm who still reads, and late for who
// does not wait. Products are done when they are waited for: what is overwritten before is wrong. A
// barrier that nobody completes ends the process after some seconds.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

#include "cuda_on_cpu.hpp"

struct uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};

inline int __clz(u32 word) { return std::countl_zero(word); }

[[noreturn]] inline void fail(const char* what, u32 number) {
  std::fprintf(stderr, "%s %u\n", what, number);
  std::_Exit(3);
}
inline void __trap() { fail("trap", 0); }
inline u32 uniform(u32 value) { return __shfl_sync(0xFFFFFFFF, value, 0); }
template <int>
void keep_registers() {}
template <int>
void take_registers() {}
inline void prefetch(const struct TensorMap&) {}

inline std::mutex everything;
inline std::condition_variable changed;

template <class Ready>
void wait_until(const char* what, u32 number, Ready ready) {
  std::unique_lock lock(everything);
  if (!changed.wait_for(lock, std::chrono::seconds(20), ready)) fail(what, number);
}

// ---- mbarriers ---------------------------------------------------------------------------------

struct Mbarrier {
  u32 count, pending, phase;
  long bytes;
  void settle() {
    if (pending == 0 && bytes == 0) {
      pending = count;
      phase ^= 1;
      changed.notify_all();
    }
  }
};
// By its block and its place there, as an address of the cluster.
inline std::map<u32, Mbarrier> mbarriers;
inline u32 of_this_block(u32 bar) { return cluster_address(bar, rank_here); }

inline void mbarrier_init(u32 bar, u32 count) {
  std::lock_guard lock(everything);
  mbarriers[of_this_block(bar)] = {count, count, 0, 0};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_expect(u32 bar, u32 bytes) {
  std::lock_guard lock(everything);
  Mbarrier& b = mbarriers.at(of_this_block(bar));
  b.bytes += bytes;
  --b.pending;
  b.settle();
}
inline void mbarrier_arrive(u32 bar) { mbarrier_expect(bar, 0); }
// Another block's, by its address of the cluster.
inline void mbarrier_arrive_remote(u32 bar) {
  std::lock_guard lock(everything);
  --mbarriers.at(bar).pending;
  mbarriers.at(bar).settle();
}
inline void mbarrier_complete(u32 bar, u32 bytes, u32 rank = rank_here) {
  std::lock_guard lock(everything);
  Mbarrier& b = mbarriers.at(cluster_address(bar, rank));
  b.bytes -= bytes;
  b.settle();
}
inline void mbarrier_wait(u32 bar, u32 parity) {
  const u32 key = of_this_block(bar);
  wait_until("mbarrier at", bar, [=] { return mbarriers.at(key).phase != parity; });
}
inline void async_proxy_fence() {}

// ---- Named barriers ----------------------------------------------------------------------------

struct Named {
  u32 arrived = 0, generation = 0;
};
inline Named named[8 * 16];  // of each block of a cluster
inline Named& named_here(u32 id) { return named[rank_here * 16 + id]; }

// The generation that ends when all have arrived.
inline u32 arrive_at(u32 id, u32 threads) {
  std::lock_guard lock(everything);
  Named& here = named_here(id);
  const u32 mine = here.generation;
  if (++here.arrived == threads) {
    here = {0, mine + 1};
    changed.notify_all();
  }
  return mine;
}
template <int Threads>
void named_barrier(u32 id) {
  const u32 mine = arrive_at(id, Threads);
  const Named& here = named_here(id);
  wait_until("named barrier", id, [&, mine] { return here.generation != mine; });
}
constexpr u32 kFirstTurnBarrier = 3;
inline void wait_for_turn(u32 wg) { named_barrier<256>(kFirstTurnBarrier + wg); }
inline void give_turn_to(u32 wg) { arrive_at(kFirstTurnBarrier + wg, 256); }

// ---- Shared memory -----------------------------------------------------------------------------

template <class Word>
Word load_shared_as(u32 address) {
  Word word;
  std::memcpy(&word, shared_memory() + address, sizeof(Word));
  return word;
}
template <int Offset>
u32 load_shared(u32 address) {
  return load_shared_as<u32>(address + Offset);
}
inline uint2 load_shared_x2(u32 address) { return load_shared_as<uint2>(address); }
inline uint4 load_shared_x4(u32 address) { return load_shared_as<uint4>(address); }
inline void store_shared_u32(u32 address, u32 word) {
  std::memcpy(shared_memory() + address, &word, 4);
}
inline void store_shared_x4(u32 address, uint4 words) {
  if (address % 16) fail("a store of 16 bytes at", address);
  std::memcpy(shared_memory() + address, &words, 16);
}

inline uint4 load_cluster_x4(u32 address) {
  if (address % 16) fail("a load of 16 bytes at", address);
  uint4 words;
  const u8* block = cluster_here->blocks[address >> 28]->bytes();
  std::memcpy(&words, block + (address & 0xFFFFFFF), 16);
  return words;
}

// Where 128-byte swizzle puts a byte: bits 4 to 6 are those of the row of 128 bytes, exclusive or.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// ---- Tensor maps -------------------------------------------------------------------------------

// Address, rank, sizes, strides in bytes from the second dimension on, box; bytes of an element, 0
// for 2, and whether it is not swizzled.
struct alignas(64) TensorMap {
  u64 address, rank, size[4], stride[3], box[4], bytes, plain, rest;
};
static_assert(sizeof(TensorMap) == 128);

inline void copy_box(u32 dst, const TensorMap& map, u32 bar, const int (&at)[4],
                     u32 rank = rank_here) {
  std::this_thread::sleep_for(std::chrono::microseconds(dst * 2654435761u >> 22));
  u64 count = 1;
  const u64 bytes = map.bytes ? map.bytes : 2;
  for (u64 i = 0; i < map.rank; ++i) count *= map.box[i];
  for (u64 n = 0; n < count; ++n) {
    u64 rest = n, from = map.address;
    bool inside = true;
    for (u64 i = 0; i < map.rank; ++i) {
      const long index = at[i] + static_cast<long>(rest % map.box[i]);
      rest /= map.box[i];
      inside = inside && index >= 0 && index < static_cast<long>(map.size[i]);
      from += index * (i == 0 ? bytes : map.stride[i - 1]);
    }
    u64 value = 0;
    if (inside) std::memcpy(&value, reinterpret_cast<const void*>(from), bytes);
    const u32 to = dst + bytes * n;
    u8* memory = cluster_here->blocks[rank]->bytes();
    std::memcpy(memory + (map.plain ? to : swizzled(to)), &value, bytes);
  }
  mbarrier_complete(bar, bytes * count, rank);
}
inline void tma_load(u32 dst, const TensorMap& map, u32 bar, int c0, int c1) {
  copy_box(dst, map, bar, {c0, c1, 0, 0});
}
inline void tma_load(u32 dst, const TensorMap& map, u32 bar, int c0, int c1, int c2) {
  copy_box(dst, map, bar, {c0, c1, c2, 0});
}
inline void tma_load(u32 dst, const TensorMap& map, u32 bar, int c0, int c1, int c2, int c3) {
  copy_box(dst, map, bar, {c0, c1, c2, c3});
}

inline void tma_load_multicast(u32 dst, const TensorMap& map, u32 bar, u16 mask, int c0, int c1,
                               int c2 = 0) {
  for (u32 rank = 0; rank < 8; ++rank) {
    if (mask >> rank & 1) copy_box(dst, map, bar, {c0, c1, c2, 0}, rank);
  }
}

// Bytes that lie side by side, from 16 on to 16 on.
inline void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
  if (dst % 16 || bytes % 16 || bytes == 0) fail("a bulk copy to", dst);
  if (reinterpret_cast<u64>(src) % 16) fail("a bulk copy from off 16 bytes to", dst);
  std::this_thread::sleep_for(std::chrono::microseconds(dst * 2654435761u >> 22));
  std::memcpy(shared_memory() + dst, src, bytes);
  mbarrier_complete(bar, bytes);
}

// ---- wgmma -------------------------------------------------------------------------------------

using Products = std::vector<std::function<void()>>;
thread_local Products issued;
thread_local std::deque<Products> in_flight;

// Aligned instructions: the lanes of a warp come together.
inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() {
  in_flight.push_back(std::move(issued));
  issued = {};
  __syncwarp();
}
template <int InFlight>
void wgmma_wait() {
  for (; in_flight.size() > InFlight; in_flight.pop_front()) {
    for (auto& product : in_flight.front()) product();
  }
  __syncwarp();
}

template <Type T>
u32 pack(float low, float high) {
  u16 both[2];
  store_value<T>(both, 0, low);
  store_value<T>(both, 1, high);
  return both[0] | u32(both[1]) << 16;
}
inline u32 bits(float value) { return __float_as_uint(value); }
inline float power_of_two(float x) {
  const float power = std::exp2(x);
  return power < 1.17549435e-38f ? 0.0f : power;
}

inline float element(u32 address) { return unpack<Type::bf16>(load_shared_as<u16>(swizzled(address))); }

// A descriptor with 128-byte swizzle: where it starts, and its two strides.
struct Operand {
  u32 start, lbo, sbo;
  explicit Operand(u64 descriptor)
      : start((descriptor & 0x3FFF) << 4),
        lbo((descriptor >> 16 & 0x3FFF) << 4),
        sbo((descriptor >> 32 & 0x3FFF) << 4) {
    if (descriptor >> 62 != 1) fail("a descriptor without swizzle", start);
  }
  // Rows along k.
  float k_major(u32 row, u32 k) const {
    return element(start + row / 8 * sbo + row % 8 * 128 + 2 * k);
  }
  // Rows along the columns of b, read transposed.
  float n_major(u32 column, u32 k) const {
    return element(start + column / 64 * lbo + column % 64 * 2 + k / 8 * sbo + k % 8 * 128);
  }
};

// d += a b for 64 rows and 16 of k: `a` gives an entry by row and k, `b` by column and k.
template <int N, class A, class B>
void multiply_16(float (&d)[N / 2], A a, B b) {
  const u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < 2; ++i) {
    float row[16];
    for (u32 k = 0; k < 16; ++k) row[k] = a(threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * i, k);
    for (u32 j = 0; j < N / 8; ++j) {
      for (u32 c = 0; c < 2; ++c) {
        float& sum = d[4 * j + 2 * i + c];
        for (u32 k = 0; k < 16; ++k) sum += row[k] * b(8 * j + 2 * (lane % 4) + c, k);
      }
    }
  }
}

// What `a` is when it is given in registers: four words a lane, of four lanes a row.
struct Registers {
  u32 word[32][4];
  float operator()(u32 row, u32 k) const {
    const u32 lane = row % 8 * 4 + k % 8 / 2, which = row % 16 / 8 + k / 8 * 2;
    return unpack<Type::bf16>(word[lane][which] >> k % 2 * 16 & 0xFFFF);
  }
};
inline Registers gather(const u32* own) {
  Registers all;
  for (u32 i = 0; i < 4; ++i) {
    meet(own[i], [&](const u32* lanes) {
      for (u32 lane = 0; lane < 32; ++lane) all.word[lane][i] = lanes[lane];
      return 0u;
    });
  }
  return all;
}

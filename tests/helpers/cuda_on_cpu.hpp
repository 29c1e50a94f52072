// Blocks, warps and clusters of CUDA as threads of the CPU: the text of a kernel runs as it stands.
// Barriers are real ones, shuffles and ballots meet at a barrier of the warp. Slow, and exact.
#pragma once
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
#define __device__
#define __forceinline__ inline

struct Index {
  u32 x, y, z;
};
thread_local Index threadIdx, blockIdx;

struct Warp {
  std::barrier<> barrier{32};
  u32 value[32];
};

struct Block {
  std::barrier<> barrier;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<u64> memory;
  Block(int threads, size_t bytes) : barrier(threads), memory(bytes / 8 + 2, 0xA5A5A5A5A5A5A5A5ull) {
    for (int i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
  }
  u8* bytes() { return reinterpret_cast<u8*>(memory.data()); }
};

struct Cluster {
  std::barrier<> barrier;
  std::vector<std::unique_ptr<Block>> blocks;
  explicit Cluster(int threads) : barrier(threads) {}
};
thread_local Cluster* cluster_here;
thread_local u32 rank_here;

inline Block& block_here() { return *cluster_here->blocks[rank_here]; }
inline u8* shared_memory() { return block_here().bytes(); }
inline void __syncthreads() { block_here().barrier.arrive_and_wait(); }
inline void cluster_sync() { cluster_here->barrier.arrive_and_wait(); }
inline void cluster_sync_relaxed() { cluster_sync(); }
inline u32 cluster_rank() { return rank_here; }
// A launch of its own: nothing is ahead of it and nothing behind.
inline void let_next_start() {}
inline void wait_for_previous() {}
inline u32 shared_address(const void* place) {
  return static_cast<u32>(static_cast<const u8*>(place) - shared_memory());
}
inline u32 cluster_address(u32 address, u32 rank) { return rank << 28 | address; }
inline u32 load_cluster(u32 address) {
  u32 word;
  std::memcpy(&word, cluster_here->blocks[address >> 28]->bytes() + (address & 0xFFFFFFF), 4);
  return word;
}

// What `combine` makes of the values of all lanes.
template <class Combine>
u32 meet(u32 value, Combine combine) {
  Warp& warp = *block_here().warps[threadIdx.x / 32];
  warp.value[threadIdx.x % 32] = value;
  warp.barrier.arrive_and_wait();
  const u32 result = combine(warp.value);
  warp.barrier.arrive_and_wait();
  return result;
}
inline u32 lane_of(u32 value, u32 lane) {
  return meet(value, [=](const u32* all) { return all[lane % 32]; });
}
inline u32 __shfl_sync(u32, u32 value, u32 lane) { return lane_of(value, lane); }
inline u32 __shfl_up_sync(u32, u32 value, u32 step) {
  const u32 lane = threadIdx.x % 32;
  return lane_of(value, lane >= step ? lane - step : lane);
}
inline u32 __shfl_xor_sync(u32, u32 value, u32 step) { return lane_of(value, threadIdx.x % 32 ^ step); }
inline u32 __ballot_sync(u32, bool vote) {
  return meet(vote, [](const u32* all) {
    u32 votes = 0;
    for (int i = 0; i < 32; ++i) votes |= all[i] << i;
    return votes;
  });
}
inline u32 __reduce_max_sync(u32, u32 value) {
  return meet(value, [](const u32* all) {
    u32 largest = 0;
    for (int i = 0; i < 32; ++i) largest = all[i] > largest ? all[i] : largest;
    return largest;
  });
}

inline u32 __reduce_add_sync(u32, u32 value) {
  return meet(value, [](const u32* all) {
    u32 sum = 0;
    for (int i = 0; i < 32; ++i) sum += all[i];
    return sum;
  });
}

inline int __popc(u32 word) { return std::popcount(word); }
inline int __ffs(u32 word) { return word ? std::countr_zero(word) + 1 : 0; }
inline u32 atomicAdd(u32* place, u32 value) { return std::atomic_ref<u32>(*place).fetch_add(value); }
inline void atomicMax(u32* place, u32 value) {
  std::atomic_ref<u32> word(*place);
  u32 old = word;
  while (old < value && !word.compare_exchange_weak(old, value)) {
  }
}

inline float __uint_as_float(u32 word) { return std::bit_cast<float>(word); }
inline float __int_as_float(int word) { return std::bit_cast<float>(word); }
inline u32 __float_as_uint(float value) { return std::bit_cast<u32>(value); }
inline void __syncwarp() { block_here().warps[threadIdx.x / 32]->barrier.arrive_and_wait(); }

// Copies are done at once: that a wait is missing does not show.
inline void copy_async(u32 to, const void* from, bool inside) {
  inside ? std::memcpy(shared_memory() + to, from, 16) : std::memset(shared_memory() + to, 0, 16);
}
inline void commit_copies() {}
template <int Left>
void wait_copies() {}

inline float __fadd_rn(float a, float b) { return a + b; }  // compiled with -ffp-contract=off
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline u32 min(u32 a, int b) { return min(a, static_cast<u32>(b)); }
inline u32 min(int a, u32 b) { return min(static_cast<u32>(a), b); }
inline u64 min(u64 a, u64 b) { return a < b ? a : b; }

enum class Type { bf16, f16, f32, s32, s8, e4m3 };
template <Type T>
float unpack(u32 word) {
  return __uint_as_float(word << 16);
}
template <Type T>
float load_value(const void* tensor, long long at) {
  if constexpr (T == Type::f32) return static_cast<const float*>(tensor)[at];
  return unpack<T>(static_cast<const u16*>(tensor)[at]);
}
// Those of 16 bits to the nearest bfloat16, halves to even.
template <Type T>
void store_value(void* tensor, long long at, float value) {
  if constexpr (T == Type::f32) {
    static_cast<float*>(tensor)[at] = value;
    return;
  }
  const u32 word = __float_as_uint(value);
  const u32 rounded = value == value ? word + 0x7FFF + (word >> 16 & 1) : 0x7FC00000;
  static_cast<u16*>(tensor)[at] = static_cast<u16>(rounded >> 16);
}

// One cluster of blocks after the other; clusters lie along x, then y, then z.
template <class Kernel>
void launch(Index grid, int blocks, int threads, size_t smem_bytes, Kernel kernel) {
  for (u32 number = 0; number < grid.x * grid.y * grid.z; ++number) {
    Cluster cluster(blocks * threads);
    for (int i = 0; i < blocks; ++i) {
      cluster.blocks.push_back(std::make_unique<Block>(threads, smem_bytes));
    }
    std::vector<std::thread> all;
    for (int i = 0; i < blocks * threads; ++i) {
      all.emplace_back([&, i] {
        threadIdx.x = i % threads;
        blockIdx = {number % grid.x * blocks + i / threads, number / grid.x % grid.y,
                    number / grid.x / grid.y};
        rank_here = i / threads;
        cluster_here = &cluster;
        kernel();
      });
    }
    for (auto& each : all) each.join();
  }
}

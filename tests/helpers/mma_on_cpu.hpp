// What kernels of tensor cores need beside cuda_on_cpu.hpp: matrices of a warp, products of 16 x 8 x
// 16, what blocks of a cluster send one another, and copies that are done as late as waits allow.
#pragma once
#include <algorithm>
#include <deque>
#include <functional>

#include "cuda_on_cpu.hpp"

template <>
inline float unpack<Type::f16>(u32 word) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<u16>(word)));
}
inline u32 bits_of_f16(float value) { return std::bit_cast<u16>(static_cast<_Float16>(value)); }
template <>
inline void store_value<Type::f16>(void* tensor, long long at, float value) {
  static_cast<u16*>(tensor)[at] = static_cast<u16>(bits_of_f16(value));
}
template <Type T>
u32 pack(float low, float high) {
  u16 both[2];
  store_value<T>(both, 0, low);
  store_value<T>(both, 1, high);
  return both[0] | static_cast<u32>(both[1]) << 16;
}

inline float power_of_two(float x) { return x < -126 ? 0.0f : std::exp2(x); }

inline u32 load_word_if(bool inside, const void* from, u32 otherwise) {
  if (inside) std::memcpy(&otherwise, from, 4);
  return otherwise;
}

inline u32 bits(float value) { return __float_as_uint(value); }

// Every thread waits where it would arrive: the kernel may do no less between the two.
inline void cluster_arrive_relaxed() { cluster_sync(); }
inline void cluster_wait() {}

// A barrier of one phase: bytes that have yet to come, and arrivals that have.
inline std::atomic_ref<u32> word_of(u8* memory, u32 bar, u32 number) {
  return std::atomic_ref<u32>(*reinterpret_cast<u32*>(memory + bar + number * 4));
}
inline void mbarrier_init(u32 bar, u32) {
  word_of(shared_memory(), bar, 0) = 0;
  word_of(shared_memory(), bar, 1) = 0;
}
inline void mbarrier_init_fence() {}
inline void mbarrier_expect(u32 bar, u32 bytes) {
  word_of(shared_memory(), bar, 0) += bytes;
  word_of(shared_memory(), bar, 1) += 1;
}
inline void mbarrier_wait(u32 bar, u32) {
  while (word_of(shared_memory(), bar, 0) != 0 || word_of(shared_memory(), bar, 1) != 1) {
    std::this_thread::yield();
  }
}
inline void store_async_x4(u32 address, u32 bar, u32 a, u32 b, u32 c, u32 d) {
  u8* memory = cluster_here->blocks[address >> 28]->bytes();
  const u32 words[4] = {a, b, c, d};
  std::memcpy(memory + (address & 0xFFFFFFF), words, 16);
  word_of(memory, bar & 0xFFFFFFF, 0) -= 16;
}

// Lane i has the address of row i % 8 of matrix i / 8.
inline void load_matrix_x4(u32 (&words)[4], u32 address) {
  const u32 lane = threadIdx.x % 32;
  meet(address, [&](const u32* rows) {
    for (u32 m = 0; m < 4; ++m) {
      std::memcpy(&words[m], shared_memory() + rows[m * 8 + lane / 4] + lane % 4 * 4, 4);
    }
    return 0;
  });
}
inline void load_transposed_x4(u32* words, u32 address) {
  const u32 lane = threadIdx.x % 32;
  meet(address, [&](const u32* rows) {
    for (u32 m = 0; m < 4; ++m) {
      u16 both[2];
      for (u32 i = 0; i < 2; ++i) {
        const u32 row = rows[m * 8 + lane % 4 * 2 + i];
        std::memcpy(&both[i], shared_memory() + row + lane / 4 * 2, 2);
      }
      words[m] = both[0] | static_cast<u32>(both[1]) << 16;
    }
    return 0;
  });
}

// Terms as an instruction of Hopper sums them where CUT_SUMS is set: the last is the sum before it.
// Each is cut to 24 bits of the largest, and so is their sum. Infinite ones and NaN are summed.
inline float cut_sum(const double (&terms)[17]) {
  double largest = 0, total = 0;
  for (double term : terms) largest = std::max(largest, std::fabs(term)), total += term;
  if (!(std::fabs(total) < INFINITY) || largest == 0) return static_cast<float>(total);
  const auto cut = [](double value, double of) {
    const double unit = std::ldexp(1.0, std::ilogb(of) - 23);
    return std::trunc(value / unit) * unit;
  };
  total = 0;
  for (double term : terms) total += cut(term, largest);
  return total == 0 ? 0.0f : static_cast<float>(cut(total, total));
}

// Of each warp of the one cluster that runs: what its lanes bring to a product.
inline u32 fragments[16][8][32][6];

template <bool Bf16>
void multiply_add(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  constexpr Type kType = Bf16 ? Type::bf16 : Type::f16;
  auto& mine = fragments[rank_here][threadIdx.x / 32];
  const u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (u32 i = 0; i < 4; ++i) mine[lane][i] = a[i];
  mine[lane][4] = b0, mine[lane][5] = b1;
  __syncwarp();
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = g + i / 2 * 8, column = 2 * t + i % 2;
    double total = sum[i], terms[17];
    terms[16] = sum[i];
    for (u32 k = 0; k < 16; ++k) {
      const u32 of_a = mine[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      const u32 of_b = mine[column * 4 + k % 8 / 2][4 + k / 8];
      const u32 shift = k % 2 * 16;
      terms[k] = double(unpack<kType>(of_a >> shift & 0xFFFF)) * unpack<kType>(of_b >> shift & 0xFFFF);
      total += terms[k];
    }
#ifdef CUT_SUMS
    sum[i] = cut_sum(terms);
#else
    sum[i] = static_cast<float>(total);
#endif
  }
  __syncwarp();
}

// Copies that arrive only when they are waited for, so that a wait for too few of them shows. Those
// of cuda_on_cpu.hpp arrive at once, so that a stage that is filled while it is read shows.
#ifdef LATE_COPIES
inline thread_local std::deque<std::vector<std::function<void()>>> groups{{}};
inline void copy_late(u32 to, const void* from, bool inside) {
  groups.back().push_back([=] { copy_async(to, from, inside); });
}
inline void commit_late() { groups.emplace_back(); }
template <int Left>
void wait_late() {
  for (; groups.size() > Left + 1; groups.pop_front()) {
    for (auto& copy : groups.front()) copy();
  }
}
#define copy_async copy_late
#define commit_copies commit_late
#define wait_copies wait_late
#endif

// What kernel.cuh of spmm_nm needs beside hopper_on_cpu.hpp to multiply weights of 4 bits: 2:4
// products whose sparse side is in registers, and pairs of bfloat16.
#pragma once
#include "hopper_on_cpu.hpp"

static Index gridDim, blockDim;
// Of clusters, of which these tests have none.
template <class... Rest>
void store_async_x4(Rest...) {}
inline bool elect_one() { return threadIdx.x % 32 == 0; }
inline void prefetch_l1(const void*) {}
template <int Threads>
void arrive_at_barrier(u32 id) {
  arrive_at(id, Threads);
}
struct alignas(8) HalfPiece {
  u32 word[2];
};
inline HalfPiece load_half(const u8* from) {
  HalfPiece piece;
  std::memcpy(&piece, from, 8);
  return piece;
}
struct alignas(16) Piece {
  u32 word[4];
};
inline u32 load_shared_u16(u32 address) { return load_shared_as<u16>(address); }
template <class T>
T number(u32 word) {
  return std::bit_cast<T>(word);
}
template <Type T>
constexpr bool kIsBf16 = T == Type::bf16;

inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 all = low | u64(high) << 32;
  u32 word = 0;
  for (int i = 0; i < 4; ++i) word |= u32(all >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return word;
}

// Both halves as bfloat16, rounded once; subnormals count.
template <class Function>
u32 of_halves(Function of_half) {
  u16 both[2];
  for (int i = 0; i < 2; ++i) {
    const double exact = of_half(16 * i);
    float near = static_cast<float>(exact);
    // Odd where it is not exact, so that rounding a second time is right.
    if (near != exact && std::abs(near) > std::abs(exact)) near = std::nextafter(near, 0.0f);
    u32 bits = std::bit_cast<u32>(near);
    if (near != exact) bits |= 1;
    store_value<Type::bf16>(both, i, std::bit_cast<float>(bits));
  }
  return both[0] | u32(both[1]) << 16;
}
inline double half_of(u32 pair, int shift) { return unpack<Type::bf16>(pair >> shift & 0xFFFF); }
inline u32 pair_fma(u32 a, u32 b, u32 c) {
  return of_halves([=](int s) { return half_of(a, s) * half_of(b, s) + half_of(c, s); });
}
inline u32 pair_mul(u32 a, u32 b) {
  return of_halves([=](int s) { return half_of(a, s) * half_of(b, s); });
}

// Index words of a warp: those of lanes 0 and 1 of every four, or of 2 and 3. Each has four windows
// of a row in its low half, and of the row 8 further on in the high one.
struct Windows {
  u32 word[32], selector;
  u32 column(u32 row, u32 kept) const {
    const u32 window = kept / 2, lane = row % 8 * 4 + selector * 2 + window / 4;
    const u32 nibble = word[lane] >> row % 16 / 8 * 16 >> window % 4 * 4;
    return window * 4 + (nibble >> kept % 2 * 2 & 3);
  }
};

// d += a b^T for 64 rows and 32 columns of a, of which a row keeps 16.
template <int N>
void multiply_kept(float (&d)[N / 2], const Registers& a, const Windows& e, u64 b) {
  const Operand tokens(b);
  const u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < N / 2; ++i) {
    const u32 row = threadIdx.x / 32 % 4 * 16 + lane / 4 + i / 2 % 2 * 8;
    const u32 token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (u32 kept = 0; kept < 16; ++kept) {
      d[i] += a(row, kept) * tokens.k_major(token, e.column(row, kept));
    }
  }
}

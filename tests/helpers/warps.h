// The threads of a block on a CPU, one after the other: each runs until it has to wait for others
// of its warp or block. What tests run kernels with where there is no GPU; every vote and shuffle
// must be of whole warps. Blocks come one after the other, so that races between them are not seen.
#include <ucontext.h>

#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __shared__ static

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Index {
  u32 x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

// ---- threads -------------------------------------------------------------------------------

constexpr u32 kStackBytes = 1 << 16;

struct Thread {
  ucontext_t start;
  jmp_buf place;
  std::vector<char> stack;
  bool is_started, is_done;
};
struct Warp {
  u64 given[32], seen[2][32];
  u32 arrived, turn;
};

static std::vector<Thread> threads;
static std::vector<Warp> warps;
static u32 barrier_arrived, barrier_turn, living;
static jmp_buf scheduler;
static void (*body)();

static void wait_once() {
  const u32 me = threadIdx.x;
  if (!_setjmp(threads[me].place)) _longjmp(scheduler, 1);
  threadIdx.x = me;
}

// A thread is made once, and has a kernel after the other.
static void run_thread() {
  for (;;) {
    body();
    threads[threadIdx.x].is_done = true;
    --living;
    wait_once();
  }
}

static void resume(u32 number) {
  Thread& thread = threads[number];
  threadIdx.x = number;
  if (_setjmp(scheduler)) return;
  if (thread.is_started) _longjmp(thread.place, 1);
  thread.is_started = true;
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack.data();
  thread.start.uc_stack.ss_size = thread.stack.size();
  makecontext(&thread.start, run_thread, 0);
  setcontext(&thread.start);
}

static void launch(void (*kernel)(), u32 blocks, u32 of_block) {
  body = kernel, gridDim.x = blocks, blockDim.x = of_block;
  if (threads.size() < of_block) {
    threads.assign(of_block, Thread{});
    for (Thread& thread : threads) thread.stack.resize(kStackBytes);
  }
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    warps.assign(of_block / 32, Warp{});
    barrier_arrived = barrier_turn = 0;
    for (Thread& thread : threads) thread.is_done = false;
    living = of_block;
    while (living > 0) {
      for (volatile u32 number = 0; number < of_block; number = number + 1) {
        if (!threads[number].is_done) resume(number);
      }
    }
  }
}

static void __syncthreads() {
  const u32 turn = barrier_turn;
  if (++barrier_arrived == blockDim.x) {
    barrier_arrived = 0, ++barrier_turn;
  } else {
    while (barrier_turn == turn) wait_once();
  }
}

// What every lane of the warp gives.
static const u64* exchanged(u64 mine) {
  Warp& warp = warps[threadIdx.x / 32];
  const u32 turn = warp.turn;
  warp.given[threadIdx.x % 32] = mine;
  if (++warp.arrived == 32) {
    std::memcpy(warp.seen[turn % 2], warp.given, sizeof warp.given);
    warp.arrived = 0, ++warp.turn;
  } else {
    while (warp.turn == turn) wait_once();
  }
  return warp.seen[turn % 2];
}

// ---- votes and shuffles --------------------------------------------------------------------

template <class To, class From>
static To bits_as(From from) {
  To to{};
  std::memcpy(&to, &from, sizeof(to) < sizeof(from) ? sizeof(to) : sizeof(from));
  return to;
}

static u32 __ballot_sync(u32, bool mine) {
  const u64* all = exchanged(mine);
  u32 votes = 0;
  for (int i = 0; i < 32; ++i) votes |= u32(all[i] != 0) << i;
  return votes;
}
static bool __any_sync(u32, bool mine) { return __ballot_sync(0, mine) != 0; }
static u32 __match_any_sync(u32, u32 mine) {
  const u64* all = exchanged(mine);
  u32 votes = 0;
  for (int i = 0; i < 32; ++i) votes |= u32(all[i] == mine) << i;
  return votes;
}
template <class T>
static T __shfl_sync(u32, T mine, int from) {
  return bits_as<T>(exchanged(bits_as<u64>(mine))[from]);
}
template <class T>
static T __shfl_xor_sync(u32, T mine, int with) {
  return bits_as<T>(exchanged(bits_as<u64>(mine))[threadIdx.x % 32 ^ with]);
}
template <class T>
static T __shfl_up_sync(u32, T mine, u32 by) {
  const u32 lane = threadIdx.x % 32;
  return bits_as<T>(exchanged(bits_as<u64>(mine))[lane < by ? lane : lane - by]);
}
static u32 __reduce_max_sync(u32, u32 mine) {
  const u64* all = exchanged(mine);
  u64 most = 0;
  for (int i = 0; i < 32; ++i) most = all[i] > most ? all[i] : most;
  return u32(most);
}
static u32 __reduce_add_sync(u32, u32 mine) {
  const u64* all = exchanged(mine);
  u64 sum = 0;
  for (int i = 0; i < 32; ++i) sum += all[i];
  return u32(sum);
}

// ---- numbers -------------------------------------------------------------------------------

static u32 __float_as_uint(float value) { return bits_as<u32>(value); }
static float __uint_as_float(u32 bits) { return bits_as<float>(bits); }
static float __int_as_float(int bits) { return bits_as<float>(bits); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static int __popc(u32 bits) { return __builtin_popcount(bits); }
static int __ffs(int bits) { return __builtin_ffs(bits); }
template <class A, class B>
static auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <class A, class B>
static auto max(A a, B b) -> decltype(a + b) {
  return a > b ? a : b;
}
template <class T>
static void atomicAdd(T* to, T more) {
  *to += more;
}
static void atomicOr(u32* to, u32 bits) { *to |= bits; }

// ---- device/epilogue/value.cuh and device/ptx/global.cuh -----------------------------------

enum class Type { bf16, f16, f32, s32, s8, e4m3 };

static u32 nearest_bf16(float value) {
  const u32 bits = __float_as_uint(value);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
template <Type T>
static u32 pack(float low, float high) {
  static_assert(T == Type::bf16);
  return nearest_bf16(low) | nearest_bf16(high) << 16;
}
template <Type T>
static float unpack(u32 word) {
  if constexpr (T == Type::bf16) return __uint_as_float(word << 16);
  return float(bits_as<_Float16>(u16(word)));
}
template <Type T>
static float load_value(const void* tensor, long long at) {
  if constexpr (T == Type::f32) return static_cast<const float*>(tensor)[at];
  return unpack<T>(static_cast<const u16*>(tensor)[at]);
}

struct alignas(16) Piece {
  u32 word[4];
};
struct alignas(8) HalfPiece {
  u32 word[2];
};
template <class Loaded>
static Loaded aligned(const u8* from) {
  if (reinterpret_cast<u64>(from) % sizeof(Loaded)) {
    std::fputs("a load that is not aligned\n", stderr);
    std::abort();
  }
  Loaded loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}
static Piece load_if(bool inside, const u8* from) {
  return inside ? aligned<Piece>(from) : Piece{};
}
static HalfPiece load_half(const u8* from) { return aligned<HalfPiece>(from); }

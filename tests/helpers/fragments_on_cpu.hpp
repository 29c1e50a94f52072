// What fragments.cuh of spmm_bsr needs of PTX beside cuda_on_cpu.hpp: barriers that count bytes,
// boxes that arrive swizzled, matrices of a warp. Copies are done at once, by whoever starts them.
#pragma once
#include <condition_variable>
#include <map>
#include <mutex>

#include "cuda_on_cpu.hpp"

struct int4 {
  int x, y, z, w;
};
struct uint4 {
  u32 x, y, z, w;
};
struct alignas(16) Piece {
  u32 word[4];
};
static Index gridDim;

inline u32 uniform(u32 value) { return value; }
template <int Count>
void keep_registers() {}
template <int Count>
void take_registers() {}
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline void __trap() { std::abort(); }

// ---- Barriers
// ------------------------------------------------------------------------------------

struct Counter {
  std::mutex mutex;
  std::condition_variable changed;
  int count = 0, pending = 0, bytes = 0;
  u32 phase = 0;

  void count_down(int arrivals, int more_bytes) {
    std::lock_guard lock(mutex);
    pending -= arrivals, bytes += more_bytes;
    if (pending < 0) std::abort();  // one arrival too many in a phase
    if (pending == 0 && bytes == 0) pending = count, phase ^= 1, changed.notify_all();
  }
  void wait(u32 parity) {
    std::unique_lock lock(mutex);
    const bool done =
        changed.wait_for(lock, std::chrono::seconds(60), [&] { return phase != parity; });
    if (!done) std::abort();
  }
};
static std::map<std::pair<Block*, u32>, Counter> counters;
static std::mutex counters_mutex;

inline Counter& counter(u32 rank, u32 bar) {
  std::lock_guard lock(counters_mutex);
  return counters[{cluster_here->blocks[rank].get(), bar}];
}
inline void mbarrier_init(u32 bar, u32 count) {
  Counter& made = counter(rank_here, bar);
  made.count = made.pending = count, made.bytes = 0, made.phase = 0;
}
inline void mbarrier_init_fence() {}
inline void mbarrier_expect(u32 bar, u32 bytes) { counter(rank_here, bar).count_down(1, bytes); }
inline void mbarrier_arrive(u32 bar) { counter(rank_here, bar).count_down(1, 0); }
inline void mbarrier_arrive_remote(u32 bar) {
  counter(bar >> 28, bar & 0xFFFFFFF).count_down(1, 0);
}
inline void mbarrier_wait(u32 bar, u32 parity) { counter(rank_here, bar).wait(parity); }

// ---- Copies
// --------------------------------------------------------------------------------------

struct alignas(64) TensorMap {
  const u16* data;
  int tokens, k, rows;
  u8 rest[128 - 8 - 12];
};
inline void prefetch(const TensorMap&) {}

inline void tma_load_multicast(u32 to, const TensorMap& map, u32 bar, u16 mask, int column,
                               int token) {
  for (u32 rank = 0; rank < 16; ++rank) {
    if (!(mask >> rank & 1)) continue;
    u8* memory = cluster_here->blocks[rank]->bytes();
    for (int row = 0; row < map.rows; ++row) {
      for (int i = 0; i < 64; ++i) {
        const bool inside = token + row < map.tokens && column + i < map.k;
        const u16 value = inside ? map.data[(token + row) * map.k + column + i] : 0;
        const u32 at = to + row * 128 + i * 2;
        std::memcpy(memory + (at ^ (at >> 7 & 7) << 4), &value, 2);
      }
    }
    counter(rank, bar).count_down(0, -map.rows * 128);
  }
}
inline void tma_load(u32 to, const TensorMap& map, u32 bar, int column, int token) {
  tma_load_multicast(to, map, bar, 1 << rank_here, column, token);
}
inline void reload_here_if(Piece& piece, bool inside, const u8* from) {
  if (inside) std::memcpy(&piece, from, 16);
}
inline void prefetch_l1(const void*) {}
inline uint4 load_shared_x4(u32 at) {
  uint4 words;
  std::memcpy(&words, shared_memory() + at, 16);
  return words;
}
inline void store_shared_x4(u32 at, uint4 words) { std::memcpy(shared_memory() + at, &words, 16); }

// ---- Matrices of a warp
// ---------------------------------------------------------------------------

struct Given {
  u32 words[32][8];
};
static std::map<Warp*, Given> given;
static std::mutex given_mutex;

// What all lanes give, until the second call of `part`.
inline Given& meet_with(const u32* words, int count) {
  Warp* warp = block_here().warps[threadIdx.x / 32].get();
  Given* all;
  {
    std::lock_guard lock(given_mutex);
    all = &given[warp];
  }
  std::copy(words, words + count, all->words[threadIdx.x % 32]);
  warp->barrier.arrive_and_wait();
  return *all;
}
inline void part() { block_here().warps[threadIdx.x / 32]->barrier.arrive_and_wait(); }

inline u16 half_at(u32 at) {
  u16 value;
  std::memcpy(&value, shared_memory() + at, 2);
  return value;
}
inline void load_matrix_x4(u32 (&words)[4], u32 address) {
  const Given& all = meet_with(&address, 1);
  const u32 lane = threadIdx.x % 32;
  for (u32 m = 0; m < 4; ++m) {
    std::memcpy(&words[m], shared_memory() + all.words[m * 8 + lane / 4][0] + lane % 4 * 4, 4);
  }
  part();
}
inline void load_transposed_x4(u32* words, u32 address) {
  const Given& all = meet_with(&address, 1);
  const u32 lane = threadIdx.x % 32;
  for (u32 m = 0; m < 4; ++m) {
    const u32 low = half_at(all.words[m * 8 + lane % 4 * 2][0] + lane / 4 * 2);
    words[m] = low | half_at(all.words[m * 8 + lane % 4 * 2 + 1][0] + lane / 4 * 2) << 16;
  }
  part();
}
template <int Offset>
void store_transposed_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  const u32 mine[] = {address + Offset, a, b, c, d};
  const Given& all = meet_with(mine, 5);
  const u32 lane = threadIdx.x % 32, m = lane / 8, token = lane % 8;
  for (u32 row = 0; row < 8; ++row) {
    const u16 half = all.words[row * 4 + token / 2][1 + m] >> token % 2 * 16;
    std::memcpy(shared_memory() + address + row * 2, &half, 2);
  }
  part();
}
inline float half_of(u32 word, u32 which) { return __uint_as_float(word >> which * 16 << 16); }
template <bool Bf16>
void multiply_add(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  static_assert(Bf16);
  const u32 mine[] = {a[0], a[1], a[2], a[3], b0, b1};
  const Given& all = meet_with(mine, 6);
  const u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < 4; ++i) {
    const u32 column = lane % 4 * 2 + i % 2;
    for (u32 k = 0; k < 16; ++k) {
      const u32 left = all.words[lane / 4 * 4 + k % 8 / 2][i / 2 + k / 8 * 2];
      const u32 right = all.words[column * 4 + k % 8 / 2][4 + k / 8];
      sum[i] += half_of(left, k % 2) * half_of(right, k % 2);
    }
  }
  part();
}
template <Type T>
u32 pack(float low, float high) {
  u16 halves[2];
  store_value<T>(halves, 0, low);
  store_value<T>(halves, 1, high);
  return halves[0] | halves[1] << 16;
}

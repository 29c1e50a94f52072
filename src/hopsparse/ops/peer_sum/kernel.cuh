// peer_sum: y = sum of what every rank has + bias + residual, or columns of all ranks side by side.
//
// Each rank's product has written its part to memory that its peers map (symmetric memory). A block
// tells block b of every peer that its own part is there, waits until theirs are, and reads all of
// them over NVLink: nothing is copied first, and what is added is added in the order of the ranks,
// in float32, so that every rank has the same bits. A part may be written again by the second call
// from now: block b of the next one comes only when this kernel has ended on every rank. Where the
// next call may use the same memory (`drain`), blocks also wait until their peers have read.
//
// Turns are counted in device memory, by block, so that a captured launch may be replayed; a call
// has the same number of blocks on every rank. Bound: up to some 64 tokens, latency: a flag and a
// load over NVLink one after the other; beyond, NVLink, over which a rank reads all other parts.

#include "epilogue/value.cuh"
#include "ptx/base.cuh"
#include "ptx/grid.cuh"
#include "ptx/peer.cuh"
#include "ptx/written.cuh"

namespace peer_sum {

constexpr u32 kMost = 8, kBlocks = 128;
constexpr int kEntries = 8;  // of y, that a thread makes at a time

// The start of each rank's symmetric memory; zero at first.
struct Flags {
  u32 ready[kBlocks][kMost], done[kBlocks][kMost];  // by block and rank: the turn it has come to
  u32 turn[kBlocks];                                // of this rank alone: its last turn
};

struct Args {
  u8* base[kMost];       // symmetric memory of each rank, as this one maps it
  const u8* residual;    // as y, or null
  const u8* bias;        // [out], or null
  u8* y;                 // [tokens, out]
  u64 slot;              // bytes from a base to a rank's part
  u32 chunks;            // of y: of kEntries entries where it is a sum, of 16 bytes elsewhere
  u32 row_chunks;        // of a row of y
  u32 blocks;            // of the grid
  u32 rank, ranks;       // which of them this is, and how many
  u32 drain;             // whether to wait until every peer has read
  u32 patience_ms;       // how long to wait for a peer
  u32 start[kMost + 1];  // where columns of each rank start in a row of y, in chunks; and their end
};

struct alignas(16) Words {
  u32 word[4];
};

// ---- ranks meet ----------------------------------------------------------------------------

// Thread r tells rank r the turn that this block has come to, and waits until that rank has.
__device__ __forceinline__ void meet(const Args& a, bool at_end, u32 turn) {
  const u32 peer = threadIdx.x;
  if (peer < a.ranks && peer != a.rank) {
    Flags* theirs = reinterpret_cast<Flags*>(a.base[peer]);
    const Flags* mine = reinterpret_cast<const Flags*>(a.base[a.rank]);
    const u32 b = blockIdx.x;
    signal_peer(at_end ? &theirs->done[b][a.rank] : &theirs->ready[b][a.rank], turn);
    wait_peer(at_end ? &mine->done[b][peer] : &mine->ready[b][peer], turn, a.patience_ms);
  }
  __syncthreads();
}

// ---- add -----------------------------------------------------------------------------------

// How many pieces of 16 bytes kEntries entries are.
template <Type T>
constexpr int kPieces = T == Type::f32 ? 2 : 1;

template <Type T>
__device__ __forceinline__ void widen(float (&v)[kEntries], const u32 (&words)[kPieces<T>][4]) {
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    if constexpr (T == Type::f32) {
      v[i] = __uint_as_float(words[i / 4][i % 4]);
    } else {
      const u32 both = words[0][i / 2];
      v[i] = unpack<T>(i % 2 ? both >> 16 : both & 0xFFFF);
    }
  }
}

template <Type T>
__device__ __forceinline__ void add(float (&v)[kEntries], const u32 (&words)[kPieces<T>][4]) {
  float more[kEntries];
  widen<T>(more, words);
#pragma unroll
  for (int i = 0; i < kEntries; ++i) v[i] = __fadd_rn(v[i], more[i]);
}

template <Type T>
__device__ __forceinline__ void add_from(float (&v)[kEntries], const u8* tensor, u32 chunk) {
  if (tensor == nullptr) return;
  u32 words[1][4];
  load_written(words[0], true, tensor + u64(chunk) * 16);
  add<T>(v, words);
}

template <class C>
__device__ __forceinline__ void finish(const Args& a, u32 chunk,
                                       const u32 (&parts)[C::kRanks][kPieces<C::kPart>][4]) {
  float v[kEntries];
  widen<C::kPart>(v, parts[0]);
#pragma unroll
  for (u32 r = 1; r < C::kRanks; ++r) {
    if (C::kRanks == 2 || r < a.ranks) add<C::kPart>(v, parts[r]);
  }
  add_from<C::kOut>(v, a.bias, chunk % a.row_chunks);
  add_from<C::kOut>(v, a.residual, chunk);
  Words words;
#pragma unroll
  for (int i = 0; i < 4; ++i) words.word[i] = pack<C::kOut>(v[2 * i], v[2 * i + 1]);
  reinterpret_cast<Words*>(a.y)[chunk] = words;
}

template <class C>
__device__ __forceinline__ void sum(const Args& a) {
  constexpr int kOf = kPieces<C::kPart>;
  const u32 step = a.blocks * C::kThreads;
  for (u32 first = blockIdx.x * C::kThreads + threadIdx.x; first < a.chunks;
       first += C::kDepth * step) {
    u32 parts[C::kDepth][C::kRanks][kOf][4];
#pragma unroll
    for (u32 d = 0; d < C::kDepth; ++d) {
      const u32 chunk = first + d * step;
#pragma unroll
      for (u32 r = 0; r < C::kRanks; ++r) {
        const bool inside = chunk < a.chunks && (C::kRanks == 2 || r < a.ranks);
        const u8* from = a.base[r] + a.slot + u64(chunk) * (16 * kOf);
#pragma unroll
        for (int i = 0; i < kOf; ++i) load_peer(parts[d][r][i], inside, from + 16 * i);
      }
    }
#pragma unroll
    for (u32 d = 0; d < C::kDepth; ++d) {
      if (first + d * step < a.chunks) finish<C>(a, first + d * step, parts[d]);
    }
  }
}

// ---- gather --------------------------------------------------------------------------------

// Where 16 bytes of y are.
__device__ __forceinline__ const u8* source_of(const Args& a, u32 chunk) {
  const u32 row = chunk / a.row_chunks, column = chunk - row * a.row_chunks;
  u32 r = 0;
  while (r + 1 < a.ranks && column >= a.start[r + 1]) ++r;
  const u64 at = u64(row) * (a.start[r + 1] - a.start[r]) + (column - a.start[r]);
  return a.base[r] + a.slot + at * 16;
}

template <class C>
__device__ __forceinline__ void gather(const Args& a) {
  const u32 step = a.blocks * C::kThreads;
  for (u32 first = blockIdx.x * C::kThreads + threadIdx.x; first < a.chunks;
       first += C::kDepth * step) {
    Words words[C::kDepth];
#pragma unroll
    for (u32 d = 0; d < C::kDepth; ++d) {
      const u32 chunk = first + d * step;
      const bool inside = chunk < a.chunks;
      load_peer(words[d].word, inside, source_of(a, inside ? chunk : first));
    }
#pragma unroll
    for (u32 d = 0; d < C::kDepth; ++d) {
      if (first + d * step < a.chunks) reinterpret_cast<Words*>(a.y)[first + d * step] = words[d];
    }
  }
}

// ---- the kernel ----------------------------------------------------------------------------

template <class C>
__device__ __forceinline__ void run(const Args& a) {
  let_next_start();
  wait_for_previous();
  Flags* mine = reinterpret_cast<Flags*>(a.base[a.rank]);
  const u32 turn = load_turn(&mine->turn[blockIdx.x]) + 1;
  meet(a, false, turn);
  // All threads that need it have read the last turn.
  if (threadIdx.x == 0) mine->turn[blockIdx.x] = turn;
  if constexpr (C::kGathers) {
    gather<C>(a);
  } else {
    sum<C>(a);
  }
  if (a.drain == 0) return;
  __syncthreads();
  meet(a, true, turn);
}

}  // namespace peer_sum

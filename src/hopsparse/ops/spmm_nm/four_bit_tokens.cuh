// The producer where x has 4 bits: it brings E4M3 of x * 2^-9, by way of registers. Needs Args,
// Smem, Place, Origin and fill_weights of kernel.cuh, which includes it where they are known.
//
// The copy engine cannot widen, and a trip through shared memory would cost a third of what the
// tensor cores read there. So all threads of the producer load what they widen, a stage ahead; that
// hides one trip to L2, where x lies, since all blocks read it. Shared memory is written once, as
// by TMA.
#pragma once

namespace spmm_nm {

// Pieces of 32 columns. A thread has always the same columns, of every kRows-th token.
template <class C>
struct FourBitX {
  static constexpr int kOfRow = 4 * C::kUnits, kRows = 128 / kOfRow;
  static_assert(kRows % 8 == 0, "rows of a thread have one place in the swizzle");
  static constexpr int kCount = (C::kTokens + kRows - 1) / kRows;
  Piece piece[kCount];

  static __device__ __forceinline__ int row() { return threadIdx.x % 128 / kOfRow; }

  // Of one stage; zeros past the end of rows, of x, and of the tile.
  __device__ __forceinline__ void load(const Args& args, int token0, int unit) {
    const int token = token0 + row(), byte = unit * 64 + threadIdx.x % kOfRow * 16;
    const int rows = byte < args.x_bytes ? min(args.tokens - token, C::kTokens - row()) : 0;
    const u8* from = args.x_codes + (long long)token * args.x_pitch + byte;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      piece[i] = load_here_if(i * kRows < rows, from + (long long)(i * kRows) * args.x_pitch);
    }
  }

  // Where this thread's first piece goes in a stage. Rows are 128 bytes, and their 16-byte chunks
  // where the 128-byte swizzle has them: that is the same for all pieces.
  static __device__ __forceinline__ uint2 places() {
    const u32 chunk = threadIdx.x % 4 * 2, unit = threadIdx.x % kOfRow / 4;
    const u32 start = (unit * C::kTokens + row()) * kTokenBytes;
    return {start + (chunk ^ row() % 8) * 16, start + ((chunk + 1) ^ row() % 8) * 16};
  }

  __device__ __forceinline__ void store(u32 x, uint2 place) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (C::kTokens % kRows != 0 && i * kRows + row() >= C::kTokens) return;
      const uint2 a = nibbles_to_e4m3(piece[i].word[0]), b = nibbles_to_e4m3(piece[i].word[1]);
      const uint2 c = nibbles_to_e4m3(piece[i].word[2]), d = nibbles_to_e4m3(piece[i].word[3]);
      store_shared_x4(x + place.x + i * kRows * kTokenBytes, {a.x, a.y, b.x, b.y});
      store_shared_x4(x + place.y + i * kRows * kTokenBytes, {c.x, c.y, d.x, d.y});
    }
  }
};

// Which stage comes next, over the tiles of a block.
template <class C>
struct Cursor {
  int index, k = 0;
  Origin from{};

  __device__ __forceinline__ Cursor(const Args& args, Place<C> at)
      : index(blockIdx.x / kBlocks<C>) {
    if (is_valid(args)) from = origin_of<C>(args, 0, index, at);
  }
  __device__ __forceinline__ bool is_valid(const Args& args) const {
    return index < args.out_tiles * args.token_tiles;
  }
  __device__ __forceinline__ void advance(const Args& args, Place<C> at) {
    if (++k < args.stages_of_k) return;
    k = 0;
    index += gridDim.x / kBlocks<C>;
    if (is_valid(args)) from = origin_of<C>(args, 0, index, at);
  }
  __device__ __forceinline__ int unit(const Args& args, Place<C> at) const {
    return (at.part * args.stages_of_k + k) * C::kUnits;
  }
};

template <class C>
__device__ __forceinline__ void produce_from_four_bits(const Args& args, u32 smem, Place<C> at) {
  const uint2 place = FourBitX<C>::places();
  Ring<C::kStages> ring;
  ring.parity = 1;  // of the phase before the first: every stage starts empty
  wait_for_previous();
  Cursor<C> next(args, at);
  FourBitX<C> x;
  x.load(args, next.from.token, next.unit(args, at));
#pragma unroll 1
  while (next.is_valid(args)) {
    const Cursor<C> now = next;
    next.advance(args, at);
    // Before the wait: ptxas would put loads that nothing here uses behind all that follows.
    FourBitX<C> ahead;
    ahead.load(args, next.from.token, next.unit(args, at));  // the last time: anywhere in x
    mbarrier_wait(smem + Smem<C>::kEmptyAt + ring.stage * 8, ring.parity);
    if (threadIdx.x % 128 == 0) {
      expect_stage<C>(args, smem, ring.stage);
      fill_weights<C>(args, smem, at, ring.stage, now.k, now.from);
    }
    x.store(smem + ring.stage * Smem<C>::kX, place);
    async_proxy_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem + Smem<C>::kFullAt + ring.stage * 8);
    ring.advance();
    x = ahead;
  }
}

}  // namespace spmm_nm

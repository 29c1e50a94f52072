// Codes of 4 bits, two a byte, to E4M3 of code * 2^-9, once for all blocks of the product behind
// it.
//   thread  kEach times 8 bytes to 16, the ones of a warp side by side
//   grid    as many blocks as run at once, at most; each walks over the rest
// Bound: bytes, half of those it writes and those, which stay in L2 for the product. The product
// may start while this still runs: then all that was ahead of this kernel has ended.

#include "epilogue/nibbles.cuh"
#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"

namespace widen {

struct Args {
  const u8* x;       // [rows, 8 * pieces] bytes, rows pitch apart
  u8* y;             // [rows, 16 * pieces] bytes
  long long pitch;   // of x, a multiple of 8
  u32 rows, pieces;  // rows * pieces is below 2^31
};

constexpr u32 kThreads = 256, kEach = 4, kChunk = kThreads * kEach;

__device__ __forceinline__ void run(const Args& args) {
  wait_for_previous();
  let_next_start();
  const u32 total = args.rows * args.pieces;
  for (u32 start = blockIdx.x * kChunk; start < total; start += gridDim.x * kChunk) {
    HalfPiece codes[kEach];
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 at = min(start + i * kThreads + threadIdx.x, total - 1);
      const u32 row = args.rows == 1 ? 0 : at / args.pieces;
      codes[i] = load_half(args.x + row * args.pitch + (at - row * args.pieces) * 8);
    }
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
      const u32 at = start + i * kThreads + threadIdx.x;
      const uint2 a = nibbles_to_e4m3(codes[i].word[0]), b = nibbles_to_e4m3(codes[i].word[1]);
      if (at < total) *reinterpret_cast<Piece*>(args.y + u64(at) * 16) = {a.x, a.y, b.x, b.y};
    }
  }
}

}  // namespace widen

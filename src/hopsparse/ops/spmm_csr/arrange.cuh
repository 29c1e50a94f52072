// Tokens in the order in which the tensor cores take columns of a packed weight, for wide.cuh.
//
// A lane has four neighbouring columns of a tile of 16 x 16 (packed.py): the first two are columns
// 2 t and 2 t + 1 of what is multiplied, the others 2 t + 8 and 2 t + 9. Of 16 columns the pairs
// 0, 2, 4, 6 come first, then 1, 3, 5, 7. Rows are filled up with zeros.
//   thread  16 columns of a token
// Bound: bytes of x, twice; they stay in L2. wide.cuh may start while this still runs: it reads
// nothing but its weight before it waits.

#include "ptx/base.cuh"
#include "ptx/grid.cuh"

namespace spmm_csr_arrange {

struct Args {
  const u8* x;         // [tokens, k], 16-bit floats, neighbouring columns
  u8* y;               // [tokens, 16 * pieces]
  u64 pitch;           // bytes from token to token of x
  u32 tokens, k;       // tokens * pieces is below 2^31
  u32 pieces, vector;  // whether rows of x, and their starts, are on 16 bytes
};

constexpr u32 kThreads = 256;

// Eight columns at once, or nothing behind the last one.
__device__ __forceinline__ void load_aligned(u32* words, const u8* row, u32 column, u32 k) {
  uint4 found = {0, 0, 0, 0};
  if (column < k) found = *reinterpret_cast<const uint4*>(row + column * 2);
  words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
}

__device__ __forceinline__ u32 load_pair(const u8* row, u32 column, u32 k) {
  const u16* values = reinterpret_cast<const u16*>(row);
  const u32 low = column < k ? values[column] : 0, high = column + 1 < k ? values[column + 1] : 0;
  return low | high << 16;
}

__device__ __forceinline__ void run(const Args& args) {
  let_next_start();
  const u32 index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= args.tokens * args.pieces) return;
  const u32 token = index / args.pieces, column = (index - token * args.pieces) * 16;
  const u8* row = args.x + token * args.pitch;
  u32 words[8];
  if (args.vector) {
    load_aligned(words, row, column, args.k);
    load_aligned(words + 4, row, column + 8, args.k);
  } else {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) words[i] = load_pair(row, column + 2 * i, args.k);
  }
  uint4* to = reinterpret_cast<uint4*>(args.y + u64(index) * 32);
  to[0] = {words[0], words[2], words[4], words[6]};
  to[1] = {words[1], words[3], words[5], words[7]};
}

}  // namespace spmm_csr_arrange

// The epilogue of fragments.cuh: the sums of a slot, in registers of one warp, to y[tokens, out].
// Needs Args, Smem and Sums of fragments.cuh, which includes it where they are known.
#pragma once

namespace spmm_bsr {

// What is added to the sums of a slot, but for a residual.
template <class C>
struct Terms {
  float alpha, bias[C::kHeight][2];

  __device__ __forceinline__ Terms(const Args& args, int row0) : alpha(args.alpha) {
#pragma unroll
    for (int i = 0; i < 2 * C::kHeight; ++i) {
      const int row = row0 + threadIdx.x % 32 / 4 + i * 8;
      const bool exists = args.bias != nullptr && row < args.out;
      bias[i / 2][i % 2] = exists ? load_value<C::kNumbers>(args.bias, row) : 0.0f;
    }
  }
  __device__ __forceinline__ float finish(float sum, int fragment, int half) const {
    return activate<C::kActivation>(sum * alpha + bias[fragment][half]);
  }
};

// Where 16 bytes of a line, which is what a slot has of one token, lie in shared memory: permuted
// so that eight tokens of a chunk meet in no bank.
template <class C>
__device__ __forceinline__ u32 chunk_address(u32 buffer, u32 token, u32 chunk) {
  constexpr u32 kLine = Smem<C>::kLine;
  return buffer + token * kLine + (chunk ^ token / (128 / kLine) % (kLine / 16)) * 16;
}

// This lane's address in the 16 tokens x 16 rows that one instruction moves.
template <class C>
__device__ __forceinline__ u32 fragment_address(u32 buffer, u32 fragment) {
  const u32 lane = threadIdx.x % 32;
  return chunk_address<C>(buffer, lane / 16 * 8 + lane % 8, fragment * 2 + lane / 8 % 2);
}

// The 16 bytes of y, counted in elements, that this lane moves in round `i` of a piece.
template <class C>
struct Chunk {
  long long at;
  u32 shared;
  bool exists;

  __device__ __forceinline__ Chunk(const Args& args, u32 buffer, int row0, int token0, int i) {
    constexpr u32 kOfLine = Smem<C>::kLine / 16;
    const u32 index = threadIdx.x % 32 + i * 32, line = index / kOfLine, chunk = index % kOfLine;
    const int token = token0 + line, row = row0 + chunk * 8;
    at = (long long)token * args.out + row;
    exists = token < args.tokens && row < args.out;
    shared = chunk_address<C>(buffer, line, chunk);
  }
};

// 16 tokens of a slot: written in the order of fragments, transposed, and read back as lines of 32
// or 64 bytes. Pieces alternate between two buffers, so that one barrier each is enough.
template <class C>
__device__ __forceinline__ void store_piece(const Args& args, Sums<C>& d, const Terms<C>& terms,
                                            u32 buffer, int row0, int token0, int i) {
  u32 words[C::kHeight][4];
  if constexpr (C::kResidual) {
#pragma unroll
    for (int h = 0; h < C::kHeight; ++h) {
      const Chunk<C> chunk(args, buffer, row0, token0, h);
      uint4 found = {0, 0, 0, 0};
      if (chunk.exists) {
        found = *reinterpret_cast<const uint4*>(static_cast<const u16*>(args.residual) + chunk.at);
      }
      store_shared_x4(chunk.shared, found);
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < C::kHeight; ++h) {
      load_transposed_x4(words[h], fragment_address<C>(buffer, h));
    }
    __syncwarp();
  }
#pragma unroll
  for (int h = 0; h < C::kHeight; ++h) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // rows 0 to 7 and 8 to 15 of eight tokens, then of the next
      const float* sums = d[h][2 * i + j / 2] + j % 2 * 2;
      float low = terms.finish(sums[0], h, j % 2), high = terms.finish(sums[1], h, j % 2);
      if constexpr (C::kResidual) {
        low += unpack<C::kOut>(words[h][j]);
        high += unpack<C::kOut>(words[h][j] >> 16);
      }
      words[h][j] = pack<C::kOut>(low, high);
    }
    store_transposed_x4<0>(fragment_address<C>(buffer, h), words[h][0], words[h][1], words[h][2],
                           words[h][3]);
  }
  __syncwarp();
#pragma unroll
  for (int h = 0; h < C::kHeight; ++h) {
    const Chunk<C> chunk(args, buffer, row0, token0, h);
    const uint4 found = load_shared_x4(chunk.shared);
    if (chunk.exists) *reinterpret_cast<uint4*>(static_cast<u16*>(args.y) + chunk.at) = found;
  }
}

// Where lines cannot be written: y of 32 bits, or rows that are no multiple of 16 bytes.
template <class C>
__device__ __forceinline__ void store_directly(const Args& args, Sums<C>& d, const Terms<C>& terms,
                                               int row0, int token0) {
  const int token_of_lane = token0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * C::kHeight; ++i) {
    const int row = row0 + threadIdx.x % 32 / 4 + i * 8;
#pragma unroll
    for (int n = 0; n < C::kTokens / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = token_of_lane + n * 8 + e;
        if (row < args.out && token < args.tokens) {
          const long long at = (long long)token * args.out + row;
          float v = terms.finish(d[i / 2][n][i % 2 * 2 + e], i / 2, i % 2);
          if constexpr (C::kResidual) v += load_value<C::kOut>(args.residual, at);
          store_value<C::kOut>(args.y, at, v);
        }
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void store_slot(const Args& args, Sums<C>& d, u32 smem, u32 warp,
                                           int row0, int token0) {
  const Terms<C> terms(args, row0);
  if constexpr (C::kDirect) {
    store_directly<C>(args, d, terms, row0, token0);
  } else {
    const u32 buffers = smem + Smem<C>::kStoreAt + warp * 2 * Smem<C>::kStore;
    __syncwarp();  // the last piece of the item before was read
#pragma unroll
    for (int i = 0; i < C::kTokens / 16; ++i) {
      const u32 buffer = buffers + i % 2 * Smem<C>::kStore;
      store_piece<C>(args, d, terms, buffer, row0, token0 + i * 16, i);
    }
  }
}

}  // namespace spmm_bsr

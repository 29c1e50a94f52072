// Several weights in one launch: expert e has rows e * out to (e + 1) * out of w, and the tokens
// from ends[e - 1] to ends[e], which only the GPU knows. Needs Args, Smem, Place and origin_in of
// kernel.cuh, which includes it where they are known.
#pragma once

namespace spmm_nm {

// Ends that do not ascend, or lie outside x, give wrong rows and touch no other memory.
__device__ __forceinline__ int end_of(const Args& args, int expert) {
  return expert < 0 ? 0 : min(max(args.ends[expert], 0), args.tokens);
}

// Token tiles, counted in clusters, of the experts before this one. All blocks count for
// themselves: a table in memory would be a launch of its own.
__device__ __forceinline__ int table_entry(u32 table, int expert) {
  return expert == 0 ? 0 : static_cast<int>(load_shared<0>(table + (expert - 1) * 4));
}

template <class C>
__device__ __forceinline__ int token_tiles_until(u32 smem, int expert) {
  return table_entry(smem + Smem<C>::kExpertsAt, expert);
}

template <class C>
constexpr int kResultBytes = C::kOut == Type::f32 || C::kOut == Type::s32   ? 4
                             : C::kOut == Type::s8 || C::kOut == Type::e4m3 ? 1
                                                                            : 2;

template <class C>
__device__ __forceinline__ void count_tiles(const Args& args, u32 smem) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x;
  int before = 0;
  for (int first = 0; first < args.experts; first += 32) {
    const int expert = first + lane;
    int tiles = 0;
    if (expert < args.experts) {
      constexpr int kTokens = C::kTokens * C::kClusterTokens;
      tiles = (max(0, end_of(args, expert) - end_of(args, expert - 1)) + kTokens - 1) / kTokens;
    }
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
      const int other = __shfl_up_sync(~0u, tiles, apart);
      if (lane >= apart) tiles += other;
    }
    if (expert < args.experts)
      store_shared_u32(smem + Smem<C>::kExpertsAt + expert * 4, before + tiles);
    before += __shfl_sync(~0u, tiles, 31);
  }
}

// Tokens past the last end meet no expert: zeros, by all threads of the grid.
template <class C>
__device__ __forceinline__ void clear_what_nobody_has(const Args& args) {
  const long long row = static_cast<long long>(args.out / C::kFold) * kResultBytes<C>;
  const long long end = args.tokens * row, step = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long first = end_of(args, args.experts - 1) * row;
  long long at = first + (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
  for (; at < end; at += step * 16) {
    *reinterpret_cast<uint4*>(static_cast<u8*>(args.y) + at) = {0, 0, 0, 0};
  }
}

template <class C>
__device__ __forceinline__ Origin origin_of_expert(const Args& args, u32 smem, int index,
                                                   Place<C> at) {
  const u32 table = smem + Smem<C>::kExpertsAt;
  const int tile = index / args.out_tiles;
  int low = 0, high = args.experts;  // the last expert that starts at this tile or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table_entry(table, middle) <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int before = table_entry(table, low), own = table_entry(table, low + 1) - before;
  const TileAt of_expert =
      raster(index - before * args.out_tiles, args.out_tiles, own, args.raster_group);
  return origin_in<C>(args, of_expert, at, low * ((args.out + 63) / 64), end_of(args, low - 1),
                      end_of(args, low));
}

}  // namespace spmm_nm

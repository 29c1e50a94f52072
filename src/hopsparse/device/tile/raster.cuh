// The order in which a persistent grid walks the tiles of y.
#pragma once
#include "ptx/base.cuh"

struct TileAt {
  int out, tokens;  // in tiles
};

// Columns of `group` token tiles are walked out-features first within a group, so that the tiles in
// flight at one time are a near square of y and re-read the least from device memory.
__device__ __forceinline__ TileAt raster(int index, int out_tiles, int token_tiles, int group) {
  const int per_group = group * out_tiles;
  const int first = index / per_group * group;
  const int width = min(group, token_tiles - first);
  const int rest = index - index / per_group * per_group;
  return {rest / width, first + rest % width};
}

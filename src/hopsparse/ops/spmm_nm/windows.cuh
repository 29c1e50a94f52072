// spmm_nm whose tokens are the windows of images: an implicit GEMM for convolutions of several
// taps.
//
// All is as in kernel.cuh but where tokens come from. A unit of 64 columns of w is 64 channels of
// one tap, and a box of tokens is those channels of as many windows, one behind the other along
// lines, images and the batch: what the copy engine fetches in its im2col mode, zeros for padding
// included. No matrix of windows is written. The box has the layout in shared memory that rows of x
// have.

#include "./kernel.cuh"
#include "tile/divisor.cuh"

namespace spmm_nm {

// The map of x is [images, height, width, channels] in im2col mode: boxes of x_rows windows x a
// unit.
struct WindowArgs {
  Args args;                     // first, as kernel.cuh hands it on
  Divisor places_x, places_y;    // windows of a line, and lines of windows of an image
  Divisor units_of_tap, taps_x;  // 64 channels each; taps of a line
  int units, images;             // of all taps; the number of images
  int stride_x, stride_y, padding, dilation;
};

__device__ __forceinline__ void tma_load_windows(u32 dst, const TensorMap& map, u32 bar, int c,
                                                 int x, int y, int image, u16 tap_x, u16 tap_y) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(dst),
      "l"(&map), "r"(bar), "r"(c), "r"(x), "r"(y), "r"(image), "h"(tap_x), "h"(tap_y)
      : "memory");
}

__device__ __forceinline__ void tma_load_windows_multicast(u32 dst, const TensorMap& map, u32 bar,
                                                           u16 mask, int c, int x, int y, int image,
                                                           u16 tap_x, u16 tap_y) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], {%8, %9}, %3;" ::"r"(dst),
      "l"(&map), "r"(bar), "h"(mask), "r"(c), "r"(x), "r"(y), "r"(image), "h"(tap_x), "h"(tap_y)
      : "memory");
}

// As fill_tokens of producer.cuh: this block's slice of the windows that it shares, to all who
// share them. What lies past the last tap is asked for of an image that is not there, and arrives
// as zero.
template <class C>
__device__ __forceinline__ void fill_windows(const WindowArgs& all, u32 smem, Place<C> at,
                                             u32 stage, int k, Origin from) {
  using S = Smem<C>;
  const Args& args = all.args;
  const u32 bar = smem + S::kFullAt + stage * 8;
  const int unit = (at.part * args.stages_of_k + k) * C::kUnits;
  const u32 to = smem + stage * S::kX + at.out * args.x_rows * kTokenBytes;
  const u32 window = from.token + at.out * args.x_rows;
  const u32 line = all.places_x(window), image = all.places_y(line);
  const int x = int(window - line * all.places_x.size) * all.stride_x - all.padding;
  const int y = int(line - image * all.places_y.size) * all.stride_y - all.padding;
#pragma unroll
  for (int u = 0; u < C::kUnits; ++u) {
    const u32 number = unit + u, tap = all.units_of_tap(number), tap_y = all.taps_x(tap);
    const int c = (number - tap * all.units_of_tap.size) * 64;
    const u16 along_x = (tap - tap_y * all.taps_x.size) * all.dilation;
    const u16 along_y = tap_y * all.dilation;
    const int of = int(number) < all.units ? int(image) : all.images;
    const u32 box = to + u * C::kTokens * kTokenBytes;
    if constexpr (C::kClusterOut == 1) {
      tma_load_windows(box, args.x, bar, c, x, y, of, along_x, along_y);
    } else {
      const u16 mask = ((1 << C::kClusterOut) - 1) << (at.first + at.tokens * C::kClusterOut);
      tma_load_windows_multicast(box, args.x, bar, mask, c, x, y, of, along_x, along_y);
    }
  }
}

}  // namespace spmm_nm

// im2col: windows of channels-last images [n, height, width, c] to rows [n y x, taps c] of a
// matrix.
//
// A thread has one vector of a row: the same tap and the same channels in every row that it fills,
// so that it divides for them once. It fetches kUnroll rows before it stores the first. Threads
// that are neighbours store neighbouring vectors; a block has neighbouring rows, whose windows
// share pixels in L1.
//
// Bound: writing. Each byte of x is written once for each tap, and read from device memory once.
// What a product reads behind this kernel comes from L2 as far as the matrix fits there.

#include "ptx/base.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "tile/divisor.cuh"

namespace im2col {

using i64 = long long;

struct Args {
  const u8* x;
  u8* columns;                               // [rows, vectors], contiguous
  i64 image_bytes, line_bytes, pixel_bytes;  // from one to the next, in x
  Divisor places_y, places_x;                // windows of an image
  u32 rows, height, width;                   // rows of the matrix; of an image
  u32 taps_x, vectors, vectors_of_tap;       // of a window along x; of a row; of a tap
  u32 lanes, rows_at_once;                   // vectors of a row, and rows, that a block has
  int stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x;
};

template <int Bytes>
struct Vector;
template <>
struct Vector<16> {
  using Type = Piece;
};
template <>
struct Vector<8> {
  using Type = u64;
};
template <>
struct Vector<4> {
  using Type = u32;
};
template <>
struct Vector<2> {
  using Type = u16;
};
template <>
struct Vector<1> {
  using Type = u8;
};

// Zero outside. Pixels are read again for the next window, so they may stay in L1.
template <int Bytes>
__device__ __forceinline__ typename Vector<Bytes>::Type fetch(bool inside, const u8* from) {
  using Type = typename Vector<Bytes>::Type;
  if constexpr (Bytes == 16) {
    return load_here_if(inside, from);
  } else {
    return inside ? *reinterpret_cast<const Type*>(from) : Type(0);
  }
}

// Grid: x along the rows, rows_at_once * kUnroll a block; y along the vectors of a row.
template <class Config>
__device__ __forceinline__ void gather(const Args& a) {
  using Type = typename Vector<Config::kVector>::Type;
  const u32 group = threadIdx.x / a.lanes;
  const u32 vector = blockIdx.y * a.lanes + threadIdx.x % a.lanes;
  const u32 tap = vector / a.vectors_of_tap, part = vector % a.vectors_of_tap;
  const int at_y = int(tap / a.taps_x) * a.dilation_y - a.padding_y;
  const int at_x = int(tap % a.taps_x) * a.dilation_x - a.padding_x;
  const u32 first = blockIdx.x * (a.rows_at_once * Config::kUnroll) + group;
  let_next_start();
  wait_for_previous();
  if (group >= a.rows_at_once || vector >= a.vectors) return;
  Type found[Config::kUnroll];
#pragma unroll
  for (int i = 0; i < Config::kUnroll; ++i) {
    const u32 row = first + i * a.rows_at_once;
    const u32 line = a.places_x(row), image = a.places_y(line);
    const int y = int(line - image * a.places_y.size) * a.stride_y + at_y;
    const int x = int(row - line * a.places_x.size) * a.stride_x + at_x;
    // As unsigned numbers, negative ones are beyond every end.
    const bool inside = row < a.rows && u32(y) < a.height && u32(x) < a.width;
    const i64 at = image * a.image_bytes + y * a.line_bytes + x * a.pixel_bytes;
    found[i] = fetch<Config::kVector>(inside, a.x + at + i64(part) * Config::kVector);
  }
#pragma unroll
  for (int i = 0; i < Config::kUnroll; ++i) {
    const u32 row = first + i * a.rows_at_once;
    if (row >= a.rows) return;
    u8* to = a.columns + (u64(row) * a.vectors + vector) * Config::kVector;
    *reinterpret_cast<Type*>(to) = found[i];
  }
}

}  // namespace im2col

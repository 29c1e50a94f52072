"""What the producer of windows asks the copy engine for, and what that gives, on the CPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hopsparse.ops import Windows
from hopsparse.ops.spmm_nm.windows.plan import UNIT, window_scalars

ROOT = Path(__file__).parents[2]
ARGS_BYTES = 8

# What fill_windows needs of kernel.cuh, and a copy engine that writes down what it is asked for.
_BEFORE = """
struct TensorMap {};
struct Asked { int to, mask, c, x, y, image, tap_x, tap_y; };
static Asked* asked;
static int count;
namespace spmm_nm {
constexpr u32 kTokenBytes = 128;
struct Args { TensorMap x; short x_rows; int stages_of_k; };
template <class C> struct Smem { static constexpr u32 kFullAt = 0, kX = 1 << 16; };
template <class C> struct Place { u32 out, tokens, part, first; };
struct Origin { int panel, token; };
inline void tma_load_windows(u32 to, const TensorMap&, u32, int c, int x, int y, int image, u16 p,
                             u16 q) {
  asked[count++] = {int(to), 0, c, x, y, image, p, q};
}
inline void tma_load_windows_multicast(u32 to, const TensorMap&, u32, u16 mask, int c, int x, int y,
                                       int image, u16 p, u16 q) {
  asked[count++] = {int(to), mask, c, x, y, image, p, q};
}
}
"""

_ENTRY = """
template <int Units, int ClusterOut>
struct Tile {
  static constexpr int kUnits = Units, kClusterOut = ClusterOut, kTokens = 64;
};
template <class C>
void run(const spmm_nm::WindowArgs& a, int k, int token, u32 out) {
  spmm_nm::fill_windows<C>(a, 0, {out, 0, 0, 0}, 0, k, {0, token});
}
extern "C" int entry(const void* scalars, int x_rows, int stages, int k, int token, int out,
                     int units, int cluster_out, Asked* to) {
  spmm_nm::WindowArgs a;
  std::memcpy(reinterpret_cast<u8*>(&a) + ARGS, scalars, sizeof(a) - ARGS);
  a.args.x_rows = x_rows, a.args.stages_of_k = stages;
  asked = to, count = 0;
  if (units == 1) cluster_out == 1 ? run<Tile<1, 1>>(a, k, token, out)
                                   : run<Tile<1, 2>>(a, k, token, out);
  else cluster_out == 1 ? run<Tile<2, 1>>(a, k, token, out) : run<Tile<2, 2>>(a, k, token, out);
  return count;
}
"""


@dataclass(frozen=True)
class Asked:
    """One copy: where it goes, to whom, and the first window, channel and tap."""

    to: int
    mask: int
    c: int
    x: int
    y: int
    image: int
    tap_x: int
    tap_y: int


Fill = Callable[..., list[Asked]]


def compiled(folder: Path) -> Fill:
    """`fill_windows` of a stage: the copies that it asks for."""
    text = (ROOT / "src/hopsparse/ops/spmm_nm/windows.cuh").read_text(encoding="utf-8")
    divisor = (ROOT / "src/hopsparse/device/tile/divisor.cuh").read_text(encoding="utf-8")
    # The instructions themselves are the copy engine's, which stands above.
    start = text.index("__device__ __forceinline__ void tma_load_windows(")
    text = text[:start] + text[text.index("// As fill_tokens of producer.cuh") :]
    text = re.sub(r"^\s*#(include|pragma).*$", "", divisor + _BEFORE + text, flags=re.MULTILINE)
    source, library = folder / "windows.cpp", folder / "windows.so"
    head = f'#define ARGS {ARGS_BYTES}\n#include "cuda_on_cpu.hpp"\n'
    source.write_text(f"{head}{text}{_ENTRY}")
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entry = ctypes.CDLL(str(library)).entry

    def fill(
        windows: Windows, images: tuple[int, int, int, int], x_rows: int, **at: int
    ) -> list[Asked]:
        kept = (ctypes.c_int * (8 * 16))()
        scalars = window_scalars(windows, images)
        names = ("stages", "k", "token", "out", "units", "cluster_out")
        found = entry(scalars, x_rows, *(at[name] for name in names), kept)
        return [Asked(*kept[8 * i : 8 * i + 8]) for i in range(found)]

    return fill


def fetched(x: Tensor, windows: Windows, asked: Asked, pixels: int) -> Tensor:
    """What the copy engine gives in its im2col mode: [pixels, 64].

    First taps walk from corner to corner of an image, along x, then y, then on to the next image
    (PTX ISA, im2col mode); what lies outside is zero.

    Args:
        x: [n, c, height, width].
        windows: Square.
        asked: The copy.
        pixels: Windows of a box.
    """
    n, _, height, width = x.shape
    first = -windows.padding[0]
    last = windows.padding[0] - (windows.kernel[0] - 1) * windows.dilation[0]
    box = x.new_zeros(pixels, UNIT)
    at_x, at_y, image = asked.x, asked.y, asked.image
    for row in box:
        from_x, from_y = at_x + asked.tap_x, at_y + asked.tap_y
        if 0 <= from_x < width and 0 <= from_y < height and image < n:
            row.copy_(x[image, asked.c : asked.c + UNIT, from_y, from_x])
        at_x += windows.stride[1]
        if at_x > width - 1 + last:
            at_x, at_y = first, at_y + windows.stride[0]
        if at_y > height - 1 + last:
            at_y, image = first, image + 1
    return box

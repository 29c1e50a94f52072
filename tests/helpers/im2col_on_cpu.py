"""The text of the im2col kernel, compiled for the CPU: its threads run one after the other."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.ops._windows import Windows
from hopsparse.ops.im2col import plan
from hopsparse.ops.im2col.device import args_for, vector_of

ROOT = Path(__file__).parents[2]

_LOADS = """
struct alignas(16) Piece {
  u32 word[4];
};
inline Piece load_here_if(bool inside, const u8* from) {
  return inside ? *reinterpret_cast<const Piece*>(from) : Piece{};
}
"""

# No thread waits for another, so that they need not run at once.
_ENTRY = """
template <int Vector>
void run(const im2col::Args& a, u32 x, u32 y) {
  for (u32 block = 0; block < x * y; ++block) {
    blockIdx = {block % x, block / x, 0};
    for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) im2col::gather<Tested<Vector>>(a);
  }
}
extern "C" void entry(const im2col::Args* a, u32 x, u32 y, int vector) {
  vector == 16 ? run<16>(*a, x, y) : vector == 8 ? run<8>(*a, x, y) : vector == 4
               ? run<4>(*a, x, y) : vector == 2 ? run<2>(*a, x, y) : run<1>(*a, x, y);
}
"""

Run = Callable[..., Tensor]


def compiled(folder: Path) -> Run:
    """The kernel: images, windows and bytes of a vector to columns; what is not written is 0xA5."""
    kernel = (ROOT / "src/hopsparse/ops/im2col/kernel.cuh").read_text(encoding="utf-8")
    kernel = (ROOT / "src/hopsparse/device/tile/divisor.cuh").read_text(encoding="utf-8") + kernel
    text = re.sub(r"^\s*#(include|pragma).*$", "", kernel, flags=re.MULTILINE)
    fields = f"static constexpr int kVector = Vector, kUnroll = {plan.UNROLL};"
    config = f"template <int Vector> struct Tested {{ {fields} }};"
    source, library = folder / "im2col.cpp", folder / "im2col.so"
    head = f'#define THREADS {plan.THREADS}\n#include "cuda_on_cpu.hpp"\n'
    source.write_text(f"{head}{_LOADS}{text}{config}{_ENTRY}")
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    include = f"-I{Path(__file__).parent}"
    subprocess.run(["g++", *options, include, "-o", str(library), str(source)], check=True)
    entry = ctypes.CDLL(str(library)).entry

    def run(x: Tensor, windows: Windows, vector: int | None = None) -> Tensor:
        vector = vector or vector_of(x)
        places = windows.places(*x.shape[2:])
        shape = (x.shape[0] * places[0] * places[1], windows.taps * x.shape[1])
        columns = x.new_empty(shape)
        columns.view(torch.uint8).fill_(0xA5)
        args = args_for(x, columns, windows, vector)
        grid = plan.share_of(args.vectors).grid(args.rows)
        entry(ctypes.byref(args), grid[0], grid[1], vector)
        return columns

    return run

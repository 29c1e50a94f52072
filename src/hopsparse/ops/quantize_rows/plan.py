"""Which kernel quantises which rows, and the bytes of its argument."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

#: Entries that a thread reads, rounds and stores at a time.
CHUNK = 8

# Instructions that the SASS of every kernel must show.
_SASS = ("REDUX.MAX", "MUFU.RCP", "FFMA")

#: Columns that the kernel counts in 32 bits with a sign, with room for the last step of a block.
LONGEST_ROW = 2**30
#: Blocks of a grid along x.
MOST_ROWS = 2**31 - 1

#: Codes by the word that `hopsparse.formats.Scheme` has for them; the last are those of int4, each
#: as the number of E4M3 that it is.
CODES = {"int8": "int8", "fp8": "e4m3", "int4": "int4", "int4_in_e4m3": "int4_in_e4m3"}
_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

Source = Literal["plain", "norm", "halves", "interleaved"]
SOURCES: tuple[Source, ...] = ("plain", "norm", "halves", "interleaved")


@dataclass(frozen=True)
class Shape:
    """Threads, and what they hold of a row.

    Attributes:
        threads: Of a block.
        team: Of a row: a warp, or the block.
        chunks: A thread keeps in registers; 0: rows are read again in every pass, and may start
            anywhere.
    """

    threads: int
    team: int
    chunks: int

    @property
    def longest(self) -> int:
        """Columns that a team can keep.

        Example:
            >>> Shape(256, 256, 7).longest
            14336
        """
        return self.team * self.chunks * CHUNK


#: Shapes that keep a row, the shortest first. Few threads with many chunks: what a thread does once
#: a row (the scale, its reciprocal, the barrier) costs as much as two chunks.
KEEPING = (
    Shape(128, 32, 8),
    Shape(128, 128, 4),  # rows of 4096: half of the next one's chunks would be zeros, and computed
    Shape(128, 128, 8),
    Shape(256, 256, 7),
    Shape(512, 512, 7),
)
REREADING = Shape(512, 512, 0)


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
        ("vector", ctypes.c_uint32),
        ("eps", ctypes.c_float),
    )


ARGS_BYTES = ctypes.sizeof(Args)


def shape_for(k: int, *, vector: bool) -> Shape:
    """Who works on rows of k.

    Args:
        k: Columns of the codes.
        vector: Whether k is a multiple of 8 and every row starts on 16 bytes.

    Example:
        >>> shape_for(4096, vector=True).team, shape_for(4097, vector=False).chunks
        (128, 0)
    """
    if vector:
        for shape in KEEPING:
            if k <= shape.longest:
                return shape
    return REREADING


def spec_for(dtype: str, codes: str, source: Source, shape: Shape) -> KernelSpec:
    """The kernel that makes `codes` of rows of `dtype`.

    Args:
        dtype: bfloat16, float16 or float32.
        codes: One of `CODES`.
        source: What is done to x first.
        shape: One of `KEEPING`, or `REREADING`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("bfloat16", "int8", "plain", REREADING).name
        'bfloat16 plain int8, read again'
    """
    known = dtype in _TYPES and codes in CODES and source in SOURCES
    if not known or shape not in (*KEEPING, REREADING):
        raise ArgumentError(
            f"a quantize_rows kernel for {dtype}, {codes}, {source}, {shape}",
            need=f"one of {', '.join(_TYPES)}; of {', '.join(CODES)}; of {', '.join(SOURCES)}",
            hint='spec_for("bfloat16", "int8", "plain", shape_for(4096, vector=True))',
        )
    kept = f"up to {shape.longest}" if shape.chunks else "read again"
    return KernelSpec(
        op="quantize_rows",
        name=f"{dtype} {source} {codes}, {kept}",
        kernel="ops/quantize_rows/kernel.cuh",
        text=_text(_TYPES[dtype], CODES[codes], source, shape),
        entry="quantize_rows_kernel",
        threads=shape.threads,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS_BYTES,
        pdl=True,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return _SASS


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    shapes = (*KEEPING, REREADING)
    return [spec_for(*chosen) for chosen in product(_TYPES, CODES, SOURCES, shapes)]


def blocks_for(shape: Shape, rows: int) -> int:
    """Blocks of a launch.

    Example:
        >>> blocks_for(Shape(128, 32, 8), 9), blocks_for(Shape(128, 128, 8), 9)
        (3, 9)
    """
    return -(-rows // (shape.threads // shape.team))


def _text(kind: str, codes: str, source: Source, shape: Shape) -> str:
    return f"""
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr quantize_rows::Codes kCodes = quantize_rows::Codes::{codes};
  static constexpr quantize_rows::Source kSource = quantize_rows::Source::{source};
  static constexpr int kThreads = {shape.threads}, kTeam = {shape.team}, kChunks = {shape.chunks};
}};
static_assert(sizeof(quantize_rows::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
extern "C" __global__ void __launch_bounds__({shape.threads})
    quantize_rows_kernel(const __grid_constant__ quantize_rows::Args a) {{
  quantize_rows::quantize<Config>(a);
}}
"""

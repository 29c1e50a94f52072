"""Which kernel gathers which windows, and the bytes of its argument."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ...errors import ArgumentError
from ...plan.division import Divisor
from ...plan.spec import KernelSpec

#: Threads of a block: what 3x3 windows of 256 channels of 16 bits are in pieces of 16 bytes, and
#: those of 64, 128 and 512 channels divide or are a multiple of.
THREADS = 288
#: Rows of the matrix that a thread fetches before it stores the first.
UNROLL = 4
#: Bytes that a thread moves at a time, the best first.
VECTORS = (16, 8, 4, 2, 1)
#: Rows that the kernel counts in 32 bits, with room for the last block.
MOST_ROWS = 2**31 - 2**16
_GRID_Y = 65_535


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("image_bytes", ctypes.c_int64),
        ("line_bytes", ctypes.c_int64),
        ("pixel_bytes", ctypes.c_int64),
        ("places_y", Divisor),
        ("places_x", Divisor),
        ("rows", ctypes.c_uint32),
        ("height", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
        ("taps_x", ctypes.c_uint32),
        ("vectors", ctypes.c_uint32),
        ("vectors_of_tap", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("rows_at_once", ctypes.c_uint32),
        ("stride_y", ctypes.c_int32),
        ("stride_x", ctypes.c_int32),
        ("padding_y", ctypes.c_int32),
        ("padding_x", ctypes.c_int32),
        ("dilation_y", ctypes.c_int32),
        ("dilation_x", ctypes.c_int32),
    )


ARGS_BYTES = ctypes.sizeof(Args)


@dataclass(frozen=True)
class Share:
    """Who moves what of a row of the matrix.

    Attributes:
        parts: Blocks side by side that have a row together.
        lanes: Vectors of a row that a block has.
        rows_at_once: Rows that its threads take together.
    """

    parts: int
    lanes: int
    rows_at_once: int

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Blocks along x, y and z.

        Example:
            >>> share_of(72).grid(100)
            (7, 1, 1)
        """
        return -(-rows // (self.rows_at_once * UNROLL)), self.parts, 1


def share_of(vectors: int) -> Share:
    """How blocks share rows of so many vectors.

    Example:
        >>> share_of(72), share_of(576)
        (Share(parts=1, lanes=72, rows_at_once=4), Share(parts=2, lanes=288, rows_at_once=1))
    """
    parts = -(-vectors // THREADS)
    lanes = -(-vectors // parts)
    return Share(parts, lanes, THREADS // lanes)


def has_kernel(rows: int, vectors: int, height: int, width: int) -> bool:
    """Whether the kernel can count so far."""
    fits = vectors <= THREADS * _GRID_Y
    return fits and 0 < rows <= MOST_ROWS and max(height, width) < 2**30


def spec_for(vector: int) -> KernelSpec:
    """The kernel that moves so many bytes at a time.

    Args:
        vector: One of `VECTORS`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for(16).name
        '16 bytes'
    """
    if vector not in VECTORS:
        raise ArgumentError(
            f"an im2col kernel for {vector} bytes",
            need=f"one of {', '.join(map(str, VECTORS))}",
            hint="spec_for(16)",
        )
    return KernelSpec(
        op="im2col",
        name=f"{vector} bytes",
        kernel="ops/im2col/kernel.cuh",
        text=_text(vector),
        entry="im2col_kernel",
        threads=THREADS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS_BYTES,
        pdl=True,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return ("STG.E.128",) if spec == spec_for(16) else ("STG.E",)


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    return [spec_for(vector) for vector in VECTORS]


def _text(vector: int) -> str:
    return f"""
struct Config {{
  static constexpr int kVector = {vector}, kUnroll = {UNROLL};
}};
static_assert(sizeof(im2col::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
extern "C" __global__ void __launch_bounds__({THREADS})
    im2col_kernel(const __grid_constant__ im2col::Args a) {{
  im2col::gather<Config>(a);
}}
"""

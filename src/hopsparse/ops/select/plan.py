"""Which kernel selects of which rows, and the bytes of its argument."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ...errors import ArgumentError
from ...plan.spec import KernelSpec
from .exponential import COEFFICIENTS, LOG2_E

# Instructions that the SASS of a kernel must show: counts by digit in one instruction whatever the
# digits are, and ballots.
_SASS = ("ATOMS.POPC.INC.32", "VOTE")
_SASS_CLUSTER = ("UCGABAR_ARV", "LD.E")

_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}

By = Literal["rank", "mass", "threshold"]
BYS: tuple[By, ...] = ("rank", "mass", "threshold")

_PASSES, _DIGITS = 4, 256


@dataclass(frozen=True)
class Shape:
    """Who works on a row.

    Attributes:
        cluster: Blocks of a row.
        threads: Of a block.
        capacity: Columns that a block keeps in shared memory.
    """

    cluster: int
    threads: int
    capacity: int

    @property
    def longest(self) -> int:
        """Columns of a row, at most.

        Example:
            >>> Shape(8, 1024, 16_384).longest
            131072
        """
        return self.cluster * self.capacity

    def smem_bytes(self, by: By) -> int:
        """Shared memory of a block, as `struct Smem` of kernel.cuh has it."""
        digits = _PASSES * _DIGITS
        masses = digits if by == "mass" else 1
        words = digits + 2 * masses
        words += words % 2  # 64-bit sums come next
        words += 2 * (_DIGITS + 2 * 32) + _DIGITS + 2 * 32 + 2 * (2 + 1) + 3 + 3
        return -(-4 * (words + self.capacity) // 16) * 16


#: The first that is long enough has a row. One block where its barriers are cheaper than those of a
#: cluster.
SHAPES = (Shape(1, 256, 8192), Shape(8, 1024, 16_384), Shape(8, 1024, 48 * 1024))
#: The same where rows fill the GPU: with one block each, then with two blocks on an SM.
SHAPES_OF_MANY = (Shape(1, 1024, 48 * 1024), Shape(8, 512, 16_384))
#: More rows than an H100 or H200 has room for clusters of 1,024 threads, one block on an SM.
MANY_ROWS = 17

#: Columns of the longest row that a kernel takes.
MOST_COLUMNS = SHAPES[-1].longest
#: Rows of one launch: blocks of a grid along x.
MOST_ROWS = (2**31 - 1) // 8


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        ("scores", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("limit", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("columns", ctypes.c_uint32),
        ("width", ctypes.c_uint32),
        ("k_of_all", ctypes.c_int32),
        ("sink", ctypes.c_int32),
        ("recent", ctypes.c_int32),
        ("number", ctypes.c_float),
    )


ARGS_BYTES = ctypes.sizeof(Args)


def shape_for(columns: int, rows: int) -> Shape:
    """Who works on a row, of so many, of so many columns.

    Raises:
        ArgumentError: They are longer than any kernel takes.

    Example:
        >>> shape_for(8192, 99).cluster, shape_for(8193, 16).cluster, shape_for(8193, 17).cluster
        (1, 8, 1)
    """
    many: tuple[Shape, ...] = SHAPES_OF_MANY if rows >= MANY_ROWS else ()
    for shape in (SHAPES[0], *many, *SHAPES[1:]):
        if columns <= shape.longest:
            return shape
    raise ArgumentError(
        f"a select kernel for rows of {columns}",
        need=f"at most {MOST_COLUMNS} columns",
        hint="the reference, which runs on a GPU too",
    )


def spec_for(dtype: str, by: By, shape: Shape) -> KernelSpec:
    """The kernel that selects of rows of `dtype`.

    Args:
        dtype: bfloat16, float16 or float32.
        by: What ends a row besides k.
        shape: One of `SHAPES` or `SHAPES_OF_MANY`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("float32", "rank", SHAPES[0]).name
        'float32 by rank, up to 8192, 1 x 256'
    """
    if dtype not in _TYPES or by not in BYS or shape not in (*SHAPES, *SHAPES_OF_MANY):
        raise ArgumentError(
            f"a select kernel for {dtype}, {by}, {shape}",
            need=f"one of {', '.join(_TYPES)}; of {', '.join(BYS)}; of SHAPES or SHAPES_OF_MANY",
            hint='spec_for("float32", "rank", shape_for(4096, 1))',
        )
    return KernelSpec(
        op="select",
        name=f"{dtype} by {by}, up to {shape.longest}, {shape.cluster} x {shape.threads}",
        kernel="ops/select/kernel.cuh",
        text=_text(_TYPES[dtype], by, shape),
        entry="select_kernel",
        threads=shape.threads,
        cluster=(shape.cluster, 1, 1),
        smem_bytes=shape.smem_bytes(by),
        args_bytes=ARGS_BYTES,
        pdl=True,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return _SASS if spec.cluster == (1, 1, 1) else (*_SASS, *_SASS_CLUSTER)


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    return [spec_for(*chosen) for chosen in product(_TYPES, BYS, (*SHAPES, *SHAPES_OF_MANY))]


def _float(value: float) -> str:
    """A float32 by its bits, so that no compiler rounds it."""
    return f"__builtin_bit_cast(float, 0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}u)"


def _text(kind: str, by: By, shape: Shape) -> str:
    poly = "\n".join(
        f"  static constexpr float kPoly{i} = {_float(each)};"
        for i, each in enumerate(COEFFICIENTS)
    )
    return f"""
struct Config {{
  static constexpr Type kType = Type::{kind};
  static constexpr select::By kBy = select::By::{by};
  static constexpr int kCluster = {shape.cluster}, kThreads = {shape.threads};
  static constexpr int kCapacity = {shape.capacity};
  static constexpr float kLog2E = {_float(LOG2_E)};
{poly}
}};
static_assert(sizeof(select::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
static_assert(sizeof(select::Smem<Config>) == {shape.smem_bytes(by)}, "plan.py counts its bytes");
extern "C" __global__ void __launch_bounds__({shape.threads}, {1024 // shape.threads})
    select_kernel(const __grid_constant__ select::Args a) {{
  select::run<Config>(a);
}}
"""

"""Which kernel packs which matrix, and the bytes of its argument."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

THREADS, PANEL_ROWS, UNIT_COLS = 128, 64, 64

# Instructions that the SASS of every kernel must show.
_SASS = ("STG.E.64", "PRMT", "SHFL.BFLY")

#: Rows and columns that the kernel counts in 32 bits, with room for the last tile.
LONGEST_SIDE = 2**31 - 1024

_GRID_Y = 65_535  # largest grid along y


@dataclass(frozen=True)
class _Entry:
    """Bits of a dtype: bytes, whether a lone sign bit is a number, bits of infinity."""

    nbytes: int
    sign_counts: bool
    infinity: int


_ENTRIES = {
    "bfloat16": _Entry(2, False, 0x7F80),
    "float16": _Entry(2, False, 0x7C00),
    "float8_e4m3fn": _Entry(1, False, 0),
    "float8_e5m2": _Entry(1, False, 0),
    "int8": _Entry(1, True, 0),
}

Select = Literal["check", "magnitude"]


@dataclass(frozen=True)
class PackConfig:
    """How a matrix is packed.

    Attributes:
        select: "check" refuses groups with more than two non-zeros, "magnitude" keeps the two
            largest (16-bit values only).
        vector: Rows start on 16 bytes and columns are neighbours: 16 bytes a load. Otherwise
            entries are loaded one by one.
        units: 64-column units a thread packs, all loaded before the first is used.
    """

    select: Select = "check"
    vector: bool = True
    units: int = 2


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        ("dense", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("meta", ctypes.c_void_p),
        ("refused", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("col_stride", ctypes.c_int64),
        ("rows", ctypes.c_uint32),
        ("cols", ctypes.c_uint32),
        ("units", ctypes.c_uint32),
    )


ARGS_BYTES = ctypes.sizeof(Args)


def supports(dtype: str, select: Select) -> bool:
    """Whether a kernel packs values of this dtype.

    Example:
        >>> supports("int8", "check"), supports("int8", "magnitude"), supports("float32", "check")
        (True, False, False)
    """
    return dtype in _ENTRIES and (select == "check" or _ENTRIES[dtype].nbytes == 2)


def spec_for(config: PackConfig, dtype: str) -> KernelSpec:
    """The kernel that packs values of `dtype`; dtypes that need the same one share it.

    Args:
        config: How.
        dtype: Name of a torch dtype: bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for(PackConfig(), "bfloat16").name
        '16-bit check vector x2'
        >>> spec_for(PackConfig(), "bfloat16") == spec_for(PackConfig(), "float16")
        True
    """
    if not supports(dtype, config.select) or config.units < 1:
        raise ArgumentError(
            f"a pack_nm kernel for {dtype} with {config}",
            need=f"one of {', '.join(_ENTRIES)}; 16-bit values to select; at least one unit",
            hint='spec_for(PackConfig(), "bfloat16")',
        )
    entry, magnitude = _ENTRIES[dtype], config.select == "magnitude"
    kind = dtype if magnitude or entry.sign_counts else f"{8 * entry.nbytes}-bit"
    access = "vector" if config.vector else "entry"
    return KernelSpec(
        op="pack_nm",
        name=f"{kind} {config.select} {access} x{config.units}",
        kernel="ops/pack_nm/kernel.cuh",
        text=_text(config, entry, magnitude),
        entry="pack_nm_kernel",
        threads=THREADS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS_BYTES,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return _SASS


def every_spec() -> list[KernelSpec]:
    """All kernels that a call or a benchmark may run, each once."""
    vector = [PackConfig(select, True, units) for select, units in product(_SELECTS, _UNITS)]
    entry = [default_config(select, vector=False) for select in _SELECTS]
    specs = {
        spec_for(config, dtype): None
        for config, dtype in product(vector + entry, _ENTRIES)
        if supports(dtype, config.select)
    }
    return list(specs)


def default_config(select: Select, *, vector: bool) -> PackConfig:
    """What `pack_nm` runs."""
    return PackConfig(select, vector, units=2 if vector else 1)


def grid_for(config: PackConfig, rows: int, cols: int) -> tuple[int, int, int]:
    """Blocks along x (columns), y and z (panels, y first).

    Example:
        >>> grid_for(PackConfig(units=2), 130, 200)
        (2, 3, 1)
    """
    panels, units = -(-rows // PANEL_ROWS), -(-cols // UNIT_COLS)
    depth = -(-panels // _GRID_Y)
    return -(-units // config.units), -(-panels // depth), depth


def _text(config: PackConfig, entry: _Entry, magnitude: bool) -> str:
    return f"""
struct Config {{
  static constexpr int kEntryBytes = {entry.nbytes}, kUnits = {config.units};
  static constexpr bool kVector = {str(config.vector).lower()}, kSelect = {str(magnitude).lower()};
  static constexpr bool kSignCounts = {str(entry.sign_counts).lower()};
  static constexpr u32 kInfinity = {entry.infinity if magnitude else 0:#x};
}};
static_assert(sizeof(pack_nm::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
extern "C" __global__ void __launch_bounds__({THREADS})
    pack_nm_kernel(const __grid_constant__ pack_nm::Args a) {{
  pack_nm::pack<Config>(a);
}}
"""


_SELECTS: tuple[Select, ...] = ("check", "magnitude")
_UNITS = (1, 2, 4)

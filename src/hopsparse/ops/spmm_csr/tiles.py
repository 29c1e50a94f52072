"""Which kernel multiplies few tokens by a weight of bits and values, and its argument."""

from __future__ import annotations

import ctypes
from functools import cache

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

#: Sides of a unit, and of a tile of it.
UNIT, TILE = 64, 16
#: Tiles of a unit, and its words of 32 bits.
UNIT_TILES, UNIT_WORDS = 16, 128
#: Values start on as many.
PIECE = 8
WARPS, STAGES = 8, 3
#: Most values of a unit that a kernel has room for.
ROOMS = (1024, 2048, 4096)
#: Blocks of eight tokens that a block has.
TOKEN_TILES = (1, 2, 4)
_ROW_PAD = 68
#: How C++ calls the dtypes.
TYPES = {"bfloat16": "bf16", "float16": "f16"}


class TileArgs(ctypes.Structure):
    """The argument of the kernel; `struct Args` of tiles.cuh."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("prefixes", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("pitch", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
        ("units", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
    )


ARGS_BYTES = ctypes.sizeof(TileArgs)


def token_tiles(tokens: int) -> int:
    """Blocks of eight tokens that a block works on.

    Example:
        >>> [token_tiles(tokens) for tokens in (1, 9, 17, 64)]
        [1, 2, 4, 4]
    """
    return next((tiles for tiles in TOKEN_TILES if tokens <= tiles * 8), TOKEN_TILES[-1])


@cache
def tile_spec(dtype: str, tiles: int, room: int) -> KernelSpec:
    """The kernel.

    Args:
        dtype: bfloat16 or float16.
        tiles: One of `TOKEN_TILES`.
        room: One of `ROOMS`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> tile_spec("bfloat16", 2, 1024).name
        'tiles bfloat16, 16 tokens, units of up to 1024 values'
    """
    if dtype not in TYPES or tiles not in TOKEN_TILES or room not in ROOMS:
        raise ArgumentError(
            f"a spmm_csr kernel of tiles for {dtype}, {tiles}, {room}",
            need=f"one of {', '.join(TYPES)}; of {TOKEN_TILES}; of {ROOMS}",
            hint='tile_spec("bfloat16", 2, 1024)',
        )
    stage = UNIT_WORDS * 6 + room * 2
    sums = WARPS * tiles * 8 * _ROW_PAD * 4
    return KernelSpec(
        op="spmm_csr",
        name=f"tiles {dtype}, {8 * tiles} tokens, units of up to {room} values",
        kernel="ops/spmm_csr/tiles.cuh",
        text=f"""
struct Config {{
  static constexpr Type kType = Type::{TYPES[dtype]};
  static constexpr int kTokenTiles = {tiles}, kUnitValues = {room};
  static constexpr int kWarps = {WARPS}, kStages = {STAGES};
}};
static_assert(sizeof(spmm_csr_tiles::Args) == {ARGS_BYTES}, "tiles.py packs {ARGS_BYTES} bytes");
static_assert(spmm_csr_tiles::Facts<Config>::kStageBytes == {stage}, "tiles.py asks for {stage}");
extern "C" __global__ void __launch_bounds__({32 * WARPS})
    spmm_csr_tiles_kernel(const __grid_constant__ spmm_csr_tiles::Args a) {{
  spmm_csr_tiles::multiply<Config>(a);
}}
""",
        entry="spmm_csr_tiles_kernel",
        threads=32 * WARPS,
        cluster=(1, 1, 1),
        smem_bytes=max(WARPS * STAGES * stage, sums),
        args_bytes=ARGS_BYTES,
    )


def tile_specs() -> list[KernelSpec]:
    """All of them."""
    return [
        tile_spec(dtype, tiles, room) for dtype in TYPES for tiles in TOKEN_TILES for room in ROOMS
    ]

"""widen.cuh as Python sees it: x of 4 bits to E4M3 once, not in every tile."""

from __future__ import annotations

from functools import cache
from struct import Struct

from ...plan import KernelSpec

THREADS, EACH = 256, 4
_BLOCKS_OF_SM = 2048 // THREADS
#: Pieces of 8 bytes of x that it counts.
MOST_PIECES = 2**31 - 1
#: x, y, pitch of x, rows, pieces of a row.
ARGS = Struct("<2Q q 2I")
#: Instructions that the kernel must hold: it stores 16 bytes at a time.
SASS = ("LDG.E.NA.LTC128B.64", "STG.E.128", "ACQBULK")


@cache
def widen_spec() -> KernelSpec:
    """The kernel; there is one.

    Example:
        >>> widen_spec().name
        'widen int4 to e4m3'
    """
    text = f"""
static_assert(sizeof(widen::Args) == {ARGS.size}, "Args of widen.cuh and of widen.py differ");
static_assert(widen::kThreads == {THREADS} && widen::kEach == {EACH}, "as widen.py counts blocks");
extern "C" __global__ void __launch_bounds__({THREADS})
    widen_kernel(const __grid_constant__ widen::Args args) {{
  widen::run(args);
}}
"""
    return KernelSpec(
        op="spmm_nm",
        name="widen int4 to e4m3",
        kernel="ops/spmm_nm/widen.cuh",
        text=text,
        entry="widen_kernel",
        threads=THREADS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS.size,
        pdl=True,
    )


def pieces_of(k: int) -> int:
    """Pieces of 8 bytes of a row of k codes, whose rows start on 16.

    Example:
        >>> pieces_of(32), pieces_of(33)
        (2, 4)
    """
    return -(-k // 32) * 2


def blocks_for(pieces: int, sm_count: int) -> int:
    """Blocks of a launch, for so many pieces in all.

    Example:
        >>> blocks_for(1, 132), blocks_for(2**30, 132)
        (1, 1056)
    """
    return min(-(-pieces // (THREADS * EACH)), _BLOCKS_OF_SM * sm_count)

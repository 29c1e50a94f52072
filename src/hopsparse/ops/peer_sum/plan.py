"""Which kernel adds or gathers what ranks have, the bytes of its argument, and of its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

#: Ranks, and blocks of a launch, that there are flags for.
MOST_RANKS, MOST_BLOCKS = 8, 128
#: Bytes in front of the parts: `struct Flags` of kernel.cuh, and room up to a page.
FLAGS_BYTES = 4 * MOST_BLOCKS * (2 * MOST_RANKS + 1)
HEADER_BYTES = 16 * 1024
#: Entries of y that a thread makes at a time, and bytes that it loads at a time.
CHUNK, CHUNK_BYTES = 8, 16
#: What the kernel counts in 32 bits, with room for the last step of a grid.
MOST_CHUNKS = 2**31

_THREADS = 256
_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_OUT = ("bfloat16", "float16")
# Loads of other GPUs' memory, and the flags ahead of them.
_SASS = ("LDG.E.128.STRONG.SYS", "LDG.E.STRONG.SYS", "STG.E.STRONG.SYS", "ACQBULK")


class Args(ctypes.Structure):
    """The kernel's argument; `struct Args` of kernel.cuh."""

    _fields_ = (
        ("base", ctypes.c_void_p * MOST_RANKS),
        ("residual", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("slot", ctypes.c_uint64),
        ("chunks", ctypes.c_uint32),
        ("row_chunks", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("ranks", ctypes.c_uint32),
        ("drain", ctypes.c_uint32),
        ("patience_ms", ctypes.c_uint32),
        ("start", ctypes.c_uint32 * (MOST_RANKS + 1)),
    )


ARGS_BYTES = ctypes.sizeof(Args)


@dataclass(frozen=True)
class Place:
    """Where the parts of one call are, and how its ranks meet.

    Attributes:
        bases: Address of each rank's symmetric memory, as this process maps it.
        rank: Which of them this is.
        slot: Bytes from a base to a part.
        drain: Whether the next call may use the same slot, so that this one waits for its readers.
        patience_ms: How long to wait for a peer.
    """

    bases: tuple[int, ...]
    rank: int
    slot: int
    drain: bool
    patience_ms: int


def spec_of_sum(part: str, out: str, ranks: int) -> KernelSpec:
    """The kernel that adds parts of dtype `part` to rows of dtype `out`.

    Args:
        part: bfloat16, float16 or float32.
        out: bfloat16 or float16; a part of 16 bits has the same.
        ranks: 2 to 8.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_of_sum("bfloat16", "bfloat16", 2).name
        'sum of bfloat16 to bfloat16, 2 ranks'
    """
    known = part in ("float32", out) and out in _OUT and 2 <= ranks <= MOST_RANKS
    if not known:
        raise ArgumentError(
            f"a peer_sum kernel of {part} to {out} for {ranks} ranks",
            need=f"one of {', '.join(_OUT)}, parts like it or float32, 2 to {MOST_RANKS} ranks",
            hint='spec_of_sum("bfloat16", "bfloat16", 2)',
        )
    count = 2 if ranks == 2 else MOST_RANKS
    # Loads in flight hide what NVLink takes; with 8 ranks a chunk has 8 of them.
    depth = 1 if count > 2 else 2 if part == "float32" else 4
    name = f"sum of {part} to {out}, {'2' if count == 2 else f'up to {count}'} ranks"
    types = (_TYPES[part], _TYPES[out])
    return _spec(name, _text(types, count, depth, gathers=False))


def spec_of_gather() -> KernelSpec:
    """The kernel that puts columns side by side.

    Example:
        >>> spec_of_gather().name
        'gather'
    """
    return _spec("gather", _text(("bf16", "bf16"), 2, 4, gathers=True))


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return _SASS


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    sums = [
        spec_of_sum(part, out, ranks)
        for out in _OUT
        for part in (out, "float32")
        for ranks in (2, MOST_RANKS)
    ]
    return [*sums, spec_of_gather()]


def blocks_for(chunks: int) -> int:
    """Blocks of a launch: the same on every rank, whatever its GPU.

    Example:
        >>> blocks_for(1), blocks_for(257), blocks_for(10**6)
        (1, 2, 128)
    """
    return min(-(-chunks // _THREADS), MOST_BLOCKS)


def args_of(
    place: Place,
    addresses: tuple[int, int, int],
    chunks: int,
    row_chunks: int,
    starts: Sequence[int] = (),
) -> Args:
    """The argument of a launch.

    Args:
        place: Where the parts are.
        addresses: Of residual, bias and y; 0 where there is none.
        chunks: Of y.
        row_chunks: Of a row of y.
        starts: First chunk of each rank's columns in a row, and their end; of a gather.
    """
    bases, ranks = place.bases, len(place.bases)
    unused = MOST_RANKS - ranks
    return Args(
        (ctypes.c_void_p * MOST_RANKS)(*bases, *[0] * unused),
        *addresses,
        place.slot,
        *(chunks, row_chunks, blocks_for(chunks), place.rank, ranks, place.drain),
        place.patience_ms,
        (ctypes.c_uint32 * (MOST_RANKS + 1))(*starts),
    )


def _spec(name: str, text: str) -> KernelSpec:
    return KernelSpec(
        op="peer_sum",
        name=name,
        kernel="ops/peer_sum/kernel.cuh",
        text=text,
        entry="peer_sum_kernel",
        threads=_THREADS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS_BYTES,
        pdl=True,
    )


def _text(types: tuple[str, str], ranks: int, depth: int, *, gathers: bool) -> str:
    return f"""
struct Config {{
  static constexpr Type kPart = Type::{types[0]}, kOut = Type::{types[1]};
  static constexpr u32 kRanks = {ranks}, kDepth = {depth}, kThreads = {_THREADS};
  static constexpr bool kGathers = {str(gathers).lower()};
}};
static_assert(sizeof(peer_sum::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
static_assert(sizeof(peer_sum::Flags) == {FLAGS_BYTES}, "plan.py counts its bytes");
extern "C" __global__ void __launch_bounds__({_THREADS})
    peer_sum_kernel(const __grid_constant__ peer_sum::Args a) {{
  peer_sum::run<Config>(a);
}}
"""

"""The kernels of hybrid_gradient, the order that they run in, and the bytes of their argument."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from ...errors import ArgumentError
from ...plan.spec import KernelSpec

#: Values that a warp has at a time, and of a tile, whose taken values are counted as one.
STRIP, TILE = 512, 512 * 32
#: Magnitudes that the first threshold is taken from; all of them where there are no more.
SAMPLES = 1 << 18
# Bins of a histogram of the upper 15 bits of magnitudes, and of the lower 16.
_HIGH_BINS, _LOW_BINS = 1 << 15, 1 << 16
#: Of all: of the sample, of candidates, of all values, and around the k-th.
BINS = 3 * _HIGH_BINS + _LOW_BINS
STATE_BYTES = 32
# Standard deviations of the sample: one call in 30,000 would find too few candidates, and read all
# again. Each costs a twentieth more candidates at k = 0.1 %.
_SURE = 4
_THREADS, _SETTLERS = 256, 1024
# Of the grid of a pass: what an H200's 132 SMs hold of such blocks, and no more.
_MOST_BLOCKS = 132 * 8

_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
#: Coder in C++, values of a block and largest code, by the word of `remainder.CODERS`.
REMAINDERS: dict[str | None, tuple[str, int, int]] = {
    None: ("none", 128, 1),
    "int8": ("int8", 512, 127),
    "int4": ("int4", 128, 7),
    "int3.5": ("int3h", 128, 5),
    "int3": ("int3", 128, 3),
    "sign": ("sign", 512, 1),
}
_LARGEST = float.fromhex("0x1.fffffep127")


@dataclass(frozen=True)
class Step:
    """One launch of a call.

    Attributes:
        entry: What it runs.
        stage: Of those that run it, from 0.
        histogram: Which it counts in or looks through. None is used twice, so that only `clear`
            writes zeros.
    """

    entry: str
    stage: int = 0
    histogram: int = 0

    def aim(self, args: Args, histograms: int) -> None:
        """Say in the argument what is this step's own; `histograms` is where they lie."""
        args.stage, args.histogram = self.stage, histograms + 8 * _HIGH_BINS * self.histogram


#: The launches of a call, in order.
STEPS = (
    Step("clear"),
    Step("sample"),
    Step("settle", 0, 0),
    Step("code_all", 0, 1),
    Step("settle", 1, 1),
    Step("code_all", 1, 2),
    Step("settle", 2, 2),
    Step("refine", 0, 3),
    Step("settle", 3, 3),
    Step("count"),
    Step("settle", 4),
    Step("emit"),
)
# What differs between kernels of an entry.
_OF_TYPE, _OF_CODER = ("sample", "code_all"), ("code_all", "emit")
# Instructions that the SASS of each must show.
_SASS = {
    "clear": ("STG.E.64",),
    "sample": ("MATCH.ANY", "LDG.E"),
    "settle": ("SHFL.UP", "BAR.SYNC"),
    "code_all": ("LDG.E.NA.LTC128B.128.CONSTANT", "STG.E.128", "MATCH.ANY"),
    "refine": ("LDG.E.128", "MATCH.ANY"),
    "count": ("LDG.E.128", "REDUX.SUM"),
    "emit": ("LDG.E.128", "STG.E.128", "VOTE.ANY"),
}


class Args(ctypes.Structure):
    """The argument of all kernels; `struct Args` of kernel.cuh."""

    _fields_ = (
        ("gradient", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("finite", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("histogram", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("n", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("wanted_samples", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("samples", ctypes.c_uint32),
        ("every", ctypes.c_uint32),
        ("phase", ctypes.c_uint32),
        ("vector", ctypes.c_uint32),
        ("stage", ctypes.c_uint32),
    )


ARGS_BYTES = ctypes.sizeof(Args)


@dataclass(frozen=True)
class Workspace:
    """Where the parts of a call's memory begin, in bytes.

    Attributes:
        histogram: Counts of magnitudes.
        tiles: Counts of what is taken.
        held: Which blocks are rounded last.
        nbytes: Of all.
    """

    histogram: int
    tiles: int
    held: int
    nbytes: int

    @classmethod
    def of(cls, n: int) -> Workspace:
        """That of a gradient of n values; the state is at 0.

        Example:
            >>> Workspace.of(110_000_000).nbytes / 110e6 < 0.02
            True
        """
        histogram = 256
        tiles = histogram + 8 * BINS
        held = tiles + 16 * -(-n // TILE)
        return cls(histogram, tiles, held, held + -(-n // STRIP))


def sampling(n: int, k: int) -> tuple[int, int, int]:
    """How many magnitudes are looked at, a stretch of how many each stands for, and which is taken.

    As many values as the taken one counts for are candidates: more than k, or all are read again.

    Example:
        >>> sampling(1000, 10)
        (1000, 1, 10)
        >>> sampling(110_000_000, 110_000)
        (262144, 419, 331)
    """
    if n <= SAMPLES:
        return n, 1, k
    expected = SAMPLES * k / n
    wanted = math.ceil(expected + _SURE * math.sqrt(expected) + _SURE)
    return SAMPLES, n // SAMPLES, min(wanted, SAMPLES)


def spec_for(entry: str, dtype: str, remainder: str | None) -> KernelSpec:
    """The kernel of an entry for gradients of a dtype; those it does not depend on share one.

    Args:
        entry: Of one of `STEPS`.
        dtype: float32, bfloat16 or float16.
        remainder: One of `REMAINDERS`.

    Raises:
        ArgumentError: There is no such kernel.

    Example:
        >>> spec_for("emit", "float16", "int4").name, spec_for("count", "float16", "int4").name
        ('emit int4', 'count')
    """
    if entry not in _SASS or dtype not in _TYPES or remainder not in REMAINDERS:
        raise ArgumentError(
            f"a hybrid_gradient kernel {entry!r} for {dtype}, {remainder}",
            need=f"one of {', '.join(_SASS)}; of {', '.join(_TYPES)}; of {', '.join(_words())}",
            hint='spec_for("emit", "float32", "int4")',
        )
    dtype = dtype if entry in _OF_TYPE else "float32"
    remainder = remainder if entry in _OF_CODER else None
    words = [entry, *[dtype] * (entry in _OF_TYPE), *[str(remainder)] * (entry in _OF_CODER)]
    return KernelSpec(
        op="hybrid_gradient",
        name=" ".join(words),
        kernel="ops/hybrid_gradient/kernel.cuh",
        text=_text(entry, dtype, remainder),
        entry="hybrid_gradient_kernel",
        threads=_threads(entry),
        cluster=(1, 1, 1),
        smem_bytes=0,
        args_bytes=ARGS_BYTES,
    )


def sass_of(spec: KernelSpec) -> tuple[str, ...]:
    """Instructions that a kernel must hold."""
    return _SASS[spec.name.split()[0]]


def every_spec() -> list[KernelSpec]:
    """All kernels that a call may run."""
    every = {
        spec_for(step.entry, dtype, remainder): None
        for step in STEPS
        for dtype in _TYPES
        for remainder in REMAINDERS
    }
    return list(every)


def blocks_for(entry: str, n: int) -> int:
    """Blocks of a launch over n values.

    Example:
        >>> blocks_for("settle", 10**9), blocks_for("code_all", 10_000)
        (1, 3)
    """
    if entry == "settle":
        return 1
    if entry in ("clear", "sample"):  # four a thread
        return -(-(BINS if entry == "clear" else min(n, SAMPLES)) // (4 * _THREADS))
    warps = -(-n // (STRIP if entry == "code_all" else TILE))
    return min(-(-warps * 32 // _THREADS), _MOST_BLOCKS)


def _threads(entry: str) -> int:
    return _SETTLERS if entry == "settle" else _THREADS


def _words() -> list[str]:
    return [str(word) for word in REMAINDERS]


def _text(entry: str, dtype: str, remainder: str | None) -> str:
    coder, _, most = REMAINDERS[remainder]
    # So that the largest code times a scale that was rounded up is finite; as in remainder.py.
    largest = ctypes.c_float(_LARGEST * (1 - 2.0**-8) / most).value.hex()
    config = "<Config>" if entry in (*_OF_TYPE, *_OF_CODER) else ""
    return f"""
struct Config {{
  static constexpr Type kType = Type::{_TYPES[dtype]};
  static constexpr hybrid_gradient::Coder kCoder = hybrid_gradient::Coder::{coder};
  static constexpr float kLargestScale = {largest}f;
}};
static_assert(sizeof(hybrid_gradient::Args) == {ARGS_BYTES}, "plan.py packs {ARGS_BYTES} bytes");
static_assert(sizeof(hybrid_gradient::State) == {STATE_BYTES}, "plan.py gives it {STATE_BYTES}");
extern "C" __global__ void __launch_bounds__({_threads(entry)})
    hybrid_gradient_kernel(const __grid_constant__ hybrid_gradient::Args a) {{
  hybrid_gradient::{entry}{config}(a);
}}
"""

"""A unit with pauses in it: what kernels are compiled from while they are verified under delays.

A missing wait shows only where who is waited for is late. So every wait for a barrier and every
start of a copy pauses first, by a pseudo-random time. The calls are put into the text of the
wrappers, so that the text of a kernel without delays, and with it its entry of the cache, is what
it always was.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from ..errors import CompileError

_PAUSE = "device/ptx/delay.cuh"
#: What a wrapper is told apart by beside the place of its warp: the stage where it has one.
_PAUSING = {
    "mbarrier_init": "bar",
    "mbarrier_wait": "bar + parity",
    "tma_load": "dst",
    "tma_load_multicast": "dst",
    "bulk_load": "dst",
    "store_async_x4": "bar",
    "wait_copies": "0xC0",
    "wait_for_copies": "0xC1",
    "named_barrier": "0xD0 + id",
    "wait_for_turn": "0xE0 + wg",
    "cluster_sync": "0xF0",
    "cluster_sync_relaxed": "0xF1",
    "cluster_wait": "0xF2",
}
_DEFINITION = re.compile(rf"__device__ __forceinline__ void ({'|'.join(_PAUSING)})\([^)]*\) {{\n")
# A macro is not expanded inside itself, so that this ends in the barrier of CUDA.
_SYNCTHREADS = "#define __syncthreads() (delay(__LINE__), __syncthreads())"


def delayed(unit: str, seed: int) -> str:
    r"""A translation unit whose waits and copies pause first.

    Args:
        unit: As `translation_unit` makes it.
        seed: Of the pauses, 0 to 2^32 - 1. It is part of the text, and so of the name in the cache.

    Raises:
        CompileError: A seed that is none.

    Example:
        >>> text = "__device__ __forceinline__ void wait_copies() {\n}\n"
        >>> "  delay(0xC0);" in delayed(text, 7).splitlines(), delayed(text, 7).splitlines()[0]
        (True, '#define DELAY_SEED 7u')
    """
    if not 0 <= seed < 2**32:
        raise CompileError(f"delays of seed {seed}", need="0 to 4294967295", hint="1")
    pausing = _DEFINITION.sub(lambda found: f"{found[0]}  delay({_PAUSING[found[1]]});\n", unit)
    return f"#define DELAY_SEED {seed}u\n{_pause()}{_SYNCTHREADS}\n{pausing}"


@cache
def _pause() -> str:
    text = files(__package__.partition(".")[0]).joinpath(_PAUSE).read_text(encoding="utf-8")
    return text.replace("#pragma once\n", "")

"""Where the dense product is faster than every tile: measured by the tuner, taken by layers.

Only who keeps the decoded weight can take it; to decode at a call costs more than it saves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from ...formats.nm import NM
from ...tune import Machine, Store, machine_of, token_classes
from .cost import Problem
from .plan import DENSE, key_of, versions

#: How many times faster dense must be. It keeps the decoded weight beside the packed one, nearly
#: three times the memory, which a tie does not pay for; and tiles within 2 % are ties (CANDIDATES).
MARGIN = 1.02


@dataclass(frozen=True)
class DenseWin:
    """What was measured where dense wins.

    Attributes:
        dense_us: Of the dense product.
        tile_us: Of the fastest tile.
    """

    dense_us: float
    tile_us: float

    def describe(self) -> str:
        """Both times, as a clause.

        Example:
            >>> DenseWin(5.5, 6.6).describe()
            'tuned: 5.5 us against 6.6 of the fastest tile'
        """
        return f"tuned: {self.dense_us:.1f} us against {self.tile_us:.1f} of the fastest tile"


def dense_win(problem: Problem, dtype: str, machine: Machine) -> DenseWin | None:
    """The times of a problem's class, if dense was measured to win there; else None.

    Args:
        problem: Sizes, all positive.
        dtype: Of x and w, `bfloat16` or `float16`.
        machine: The GPU.
    """
    entry = Store.default().get(key_of(problem, dtype, machine))
    if entry.best([DENSE]) is None or (best := entry.best(versions(dtype))) is None:
        return None
    dense_us, tile_us = entry.measured[DENSE].us, entry.measured[best].us
    return DenseWin(dense_us, tile_us) if beats(dense_us, tile_us) else None


def beats(dense_us: float, tile_us: float) -> bool:
    """Whether dense runs for these times; a time that was not measured is infinite or NaN."""
    return dense_us * MARGIN < tile_us < float("inf")


@dataclass
class DenseCounts:
    """The token counts for which layers of one shape run dense.

    All layers of a shape hold one object. It is asked at every call, so it decides for all classes
    at once, and most layers read no more than `never`.

    Attributes:
        shape: [out, k] of the weight.
        dtype: Of the weight.
        device: Ordinal of the GPU.
        never: It was looked up, and there is no such count.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: int
    never: bool = False
    _ranges: tuple[range, ...] | None = field(default=None, repr=False)

    def __contains__(self, tokens: int) -> bool:
        # Asked at every call of a layer that has such counts; `any` takes 0.6 us longer.
        for each in self._ranges or self._found():  # noqa: SIM110
            if tokens in each:
                return True
        return False

    def reach(self, max_tokens: int) -> bool:
        """Whether there is such a count from 1 to `max_tokens`."""
        return any(each.start <= max_tokens for each in self._found())

    def forget(self) -> None:
        """Look tuning results up again."""
        self.never, self._ranges = False, None

    def _found(self) -> tuple[range, ...]:
        if (ranges := self._ranges) is None:
            machine, dtype = machine_of(self.device), _name(self.dtype)
            ranges = self._ranges = tuple(
                range(each.first, (each.last or sys.maxsize - 1) + 1)
                for each in token_classes()
                if dense_win(Problem(each.measured, *self.shape), dtype, machine)
            )
            self.never = not ranges
        return ranges


_KNOWN: dict[tuple[object, ...], DenseCounts] = {}


def counts_of(w: NM) -> DenseCounts:
    """The token counts for which a layer with this weight runs dense; nothing is looked up yet."""
    facts = w.shape, w.dtype, w.values.get_device()
    if (known := _KNOWN.get(facts)) is None:
        known = _KNOWN[facts] = DenseCounts(*facts)
    return known


def forget_counts() -> None:
    """Look tuning results up again for every layer there is."""
    for each in _KNOWN.values():
        each.forget()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

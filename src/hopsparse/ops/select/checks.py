"""What is verified of select: the columns that a plain sort of each row chooses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...verify import Check, Expected, Trial
from .cases import EDGE, Case
from .op import select

_OP = "select"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MODES: dict[str, dict[str, Any]] = {
    "rank": {},
    "ends": {"sink": 2, "recent": 5},
    "threshold": {"threshold": 0.25},
    "top-p": {"top_p": 0.9},
}
# Of longer rows one kind of scores is enough: sorting them takes the CPU most of the time.
_LONG_COLUMNS = 20_100
# The quick set of a GPU: each way to choose, a block and a cluster for each row.
_FIRST = (
    "off-tile-rank",
    "off-tile-ends",
    "off-tile-threshold",
    "off-tile-top-p",
    "beyond-a-block-rank",
    "a-block-each-rank",
)
_LONGEST = 393_216  # of the kernel; beyond, torch sorts


def checks() -> Iterator[Check]:
    """Every case, dtype and way to choose."""
    for case in EDGE:
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            for mode in _MODES:
                trials = partial(_chosen, case, dtype, mode)
                short = case.columns <= _LONG_COLUMNS or (case.name == "cluster" and mode == "rank")
                quick = dtype == torch.float32 and short
                kernel = case.columns <= _LONGEST
                called = f"{case.name}-{mode}"
                first = called in (_FIRST if quick else _FIRST[:1])
                yield Check(_OP, called, name, "", trials, kernel, quick, first=first)


def _chosen(case: Case, dtype: torch.dtype, mode: str, device: torch.device) -> Iterator[Trial]:
    options = _MODES[mode]
    both = [torch.randn(case.rows, case.columns), _hard(case)]
    if case.columns > _LONG_COLUMNS:
        both = both[mode in ("rank", "threshold") :][:1]
    for scores in (each.to(dtype) for each in both):
        run = partial(select, scores.to(device), case.k, **options)
        if mode != "top-p":
            indices, counts = _sorted(scores, case.k, options)
        elif device.type == "cuda":
            # Which integer the mass of a score is belongs to the definition, which is torch's.
            indices, counts = select(scores, case.k, **options)
        else:
            yield Trial(lambda run=run: run()[1], [_counts(scores, case.k)])  # type: ignore[misc]
            continue
        yield Trial(run, [Expected.bits(indices, "indices"), Expected.bits(counts, "counts")])


def _hard(case: Case) -> Tensor:
    """Few values, so that ties are many; NaN, infinities, zeros of both signs."""
    scores = torch.randint(-3, 4, (case.rows, case.columns)).float()
    dice = torch.rand(scores.shape)
    scores = scores.masked_fill(dice < 0.01, torch.nan).masked_fill(dice > 0.8, -torch.inf)
    scores[(dice > 0.5) & (scores == 0)] = -0.0
    return scores.masked_fill((dice > 0.01) & (dice < 0.0105), torch.inf)


def _sorted(scores: Tensor, k: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """By a stable sort of float64, NaN first, and a walk through what is forced."""
    rows, columns = scores.shape
    width = min(k, columns)
    wide = scores.double()
    least = options.get("threshold", -torch.inf)
    # A NaN is not below a threshold, and -inf is never there.
    there = (wide > -torch.inf) & ((wide >= least) | wide.isnan()) | wide.isnan()
    keys = torch.where(wide.isnan(), torch.inf, wide)
    order = keys.argsort(dim=1, descending=True, stable=True)
    # A second stable sort puts NaN before +inf, both in the order of columns.
    is_nan = wide.isnan().gather(1, order).int()
    order = order.gather(1, is_nan.argsort(dim=1, descending=True, stable=True))
    last = [*range(columns - 1, -1, -1)][: options.get("recent", 0)]
    first = [*range(min(columns, options.get("sink", 0)))]
    forced = [*last, *(each for each in first if each not in last)][:width]
    indices = torch.full((rows, width), -1, dtype=torch.int32)
    counts = torch.zeros(rows, dtype=torch.int32)
    is_forced = torch.zeros(columns, dtype=torch.bool)
    is_forced[forced] = True
    for row in range(rows):
        free = order[row][there[row][order[row]] & ~is_forced[order[row]]]
        chosen = torch.cat((torch.tensor(forced, dtype=torch.int64), free[: width - len(forced)]))
        counts[row] = len(chosen)
        indices[row, : len(chosen)] = chosen.sort().values.int()
    return indices, counts


def _counts(scores: Tensor, k: int) -> Expected:
    """How many hold nine tenths of the mass exp(score), give or take what 2^-32 of each allows."""
    wide = scores.double()
    top = wide.nan_to_num(torch.inf).amax(1, keepdim=True)
    endless = top == torch.inf
    infinite = (wide == torch.inf) | wide.isnan()
    mass = torch.where(endless, infinite.double(), (wide - top.where(~endless, 0.0)).exp())
    mass = mass.nan_to_num(0.0).where(wide.isnan() & endless, mass.nan_to_num(0.0))
    mass = torch.where(wide.isnan(), endless.double(), mass)
    running = mass.sort(1, descending=True).values.cumsum(1)
    total, off = running[:, -1:], 1e-6
    ends = []
    for part in (0.9 * (1 - off), 0.9 * (1 + off)):
        reached = (running < part * total).sum(1) + (total[:, 0] > 0).long()
        ends.append(reached.clamp(max=min(k, scores.shape[1])))
    return Expected.within(ends[0], ends[1], torch.int32, "counts")

"""What is verified of hybrid_gradient: what is taken, and that nothing is lost of what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...measure.error import unit_roundoff
from ...verify import Check, Expected, Trial
from .indices import decode_indices
from .op import hybrid_gradient
from .remainder import CODERS

_OP = "hybrid_gradient"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = (1, 127, 128, 513, 4099, 65_537, 300_001)
_NAMES = ("values", "counts", "offsets", "codes", "scales", "rest", "finite")
_LARGE = 100_000
_KINDS = ("normal", "few-values", "sparse", "nan")


def checks() -> Iterator[Check]:
    """Every size, kind of numbers, dtype and way to round the others."""
    for n in _SIZES:
        for kind in _KINDS if n < _LARGE else _KINDS[:2]:
            for dtype in _DTYPES:
                for remainder in (None, *CODERS):
                    name = f"{str(dtype).removeprefix('torch.')}-{remainder or 'whole'}"
                    trials = partial(_trials, n, kind, dtype, remainder)
                    quick = dtype == torch.float32 and kind in _KINDS[:2] and n <= 70_000
                    # Each dtype and coder once, and a second block of the selection with ties.
                    first = (n, kind) == (4099, "normal")
                    first |= (n, kind, name) == (65_537, "few-values", "float32-int4")
                    yield Check(_OP, f"{n}-{kind}", name, "", trials, quick=quick, first=first)


def _trials(
    n: int, kind: str, dtype: torch.dtype, remainder: Any, device: torch.device
) -> Iterator[Trial]:
    gradient, residual = _gradient(kind, n).to(dtype), torch.randn(n) * 0.01
    for kept, k, every, phase in ((None, n // 10, 1, 0), (residual, -(-n // 100), 3, 1)):
        turn: dict[str, Any] = {"every": every, "phase": phase}
        there = None if kept is None else kept.to(device)
        given = (gradient.to(device), there, k, remainder)
        vector = gradient.float() if kept is None else gradient.float() + kept
        if device.type == "cuda":
            wanted = hybrid_gradient(gradient, kept, k, remainder, **turn)
            expected = [Expected.bits(*each) for each in zip(wanted, _NAMES, strict=True)]
            yield Trial(partial(hybrid_gradient, *given, **turn), expected)
        yield Trial(partial(_together, *given, **turn), _of(vector, k, remainder))


def _gradient(kind: str, n: int) -> Tensor:
    values = torch.randn(n) * 0.01
    if kind == "few-values":
        return torch.randint(-3, 4, (n,)).float()
    if kind == "sparse":
        return values * (torch.rand(n) < 0.01)
    if kind == "nan":
        values[n // 2] = torch.nan
    return values


def _together(
    gradient: Tensor, residual: Tensor | None, k: int, remainder: Any, *, every: int, phase: int
) -> list[Tensor]:
    """Places and values, and the sum of all that is sent and kept."""
    found = hybrid_gradient(gradient, residual, k, remainder, every=every, phase=phase)
    values, counts, offsets, codes, scales, rest, finite = found
    positions = decode_indices(counts, offsets)
    whole = rest.clone()
    if remainder is not None:
        coder = CODERS[remainder]
        whole.view(-1, coder.block)[phase::every] += coder.decode(codes, scales)
    whole = whole[: gradient.numel()].clone()
    whole[positions.long()] += values
    return [positions, values, whole, finite]


def _of(vector: Tensor, k: int, remainder: str | None) -> Sequence[Expected]:
    """By a stable sort: of equal magnitudes the first; what is not finite sends zeros."""
    # One bit and the scale are not all of a number: what is added up again may round.
    slack = None
    if remainder == "sign":
        slack = 4 * unit_roundoff(torch.float32) * vector.nan_to_num(0.0).abs().amax().double()
        slack = slack.expand(vector.shape)
    finite = bool(vector.isfinite().all())
    if not finite:
        vector = torch.zeros_like(vector)
    order = vector.double().abs().argsort(descending=True, stable=True)[:k].sort().values
    return (
        Expected(order.double(), torch.int64, name="positions"),
        Expected(vector[order].double(), torch.float32, name="values"),
        Expected(vector.double(), torch.float32, slack, name="what is sent and kept"),
        Expected(torch.tensor([float(finite)]).double(), torch.uint8, name="finite"),
    )

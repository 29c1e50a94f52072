"""What is verified of pack_nm: bytes of the packed matrix, and that they read back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from ...formats.nm import NM
from ...formats.pattern import NMPattern
from ...verify import Check, Expected, Trial, dense_weight
from . import plan
from .cases import EDGE, SMOKE, Case
from .op import pack_nm

_OP = "pack_nm"
_TWO_FOUR = NMPattern(2, 4)
_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def checks() -> Iterator[Check]:
    """Every case and dtype as it is, and those of 16 and 32 bits by magnitude."""
    for case in SMOKE + EDGE:
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            # Dtypes of a size share a kernel.
            quick = dtype in (torch.bfloat16, torch.int8)
            trials, kernel = partial(_packed, case, dtype), plan.supports(name, "check")
            first = case.name == "ragged" or (quick and case.name == "many-panels")
            yield Check(_OP, case.name, name, "nm-2:4", trials, kernel, quick, first=first)
            if dtype.itemsize > 1:
                trials = partial(_selected, case, dtype)
                kernel = plan.supports(name, "magnitude")
                magnitude = f"{case.name}-magnitude"
                yield Check(_OP, magnitude, name, "nm-2:4", trials, kernel, quick, first=first)


def _packed(case: Case, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    dense = dense_weight((case.rows, case.cols), _TWO_FOUR, dtype)
    yield Trial(partial(_parts, dense.to(device), "check"), _expected(NM.from_dense(dense), dense))
    # Columns that are rows in memory, which no kernel reads 16 bytes at a time.
    turned = dense.T.contiguous().to(device).T
    yield Trial(partial(_parts, turned, "check"), _expected(NM.from_dense(dense), dense))


def _selected(case: Case, dtype: torch.dtype, device: torch.device) -> Iterator[Trial]:
    """Full groups, with ties among integers: the first of equal ones are kept."""
    dense = torch.randint(-9, 10, (case.rows, case.cols)).to(dtype)
    kept = _two_largest(dense)
    yield Trial(
        partial(_parts, dense.to(device), "magnitude"), _expected(NM.from_dense(kept), kept)
    )


def _parts(dense: Tensor, select: plan.Select) -> list[Tensor]:
    packed = pack_nm(dense, _TWO_FOUR, select=select)
    return [packed.values, packed.meta, packed.to_dense()]


def _expected(packed: NM, dense: Tensor) -> list[Expected]:
    # A zero may be -0.0 in a weight that is given, and is 0 in what is read back: numbers.
    back = Expected(dense.double(), dense.dtype, name="read back")
    return [Expected.bits(packed.values, "values"), Expected.bits(packed.meta, "meta"), back]


def _two_largest(dense: Tensor) -> Tensor:
    """Of each group, one entry after the other: nothing is shared with what packs."""
    kept = torch.zeros_like(dense)
    size = dense.double().abs()
    for first in range(0, dense.shape[1], 4):
        part = size[:, first : first + 4]
        order = part.argsort(dim=1, descending=True, stable=True)[:, :2] + first
        kept.scatter_(1, order, dense.gather(1, order))
    return kept

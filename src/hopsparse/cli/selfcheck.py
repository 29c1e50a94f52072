"""Do formats round-trip, and do reference products agree with float64, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import HopsparseError
from ..formats import (
    BSR,
    BSR24,
    FORMATS,
    VALUE_DTYPES,
    BlockPattern,
    NMPattern,
    Pattern,
    SparseMatrix,
    Unstructured,
    convert,
)
from ..measure.error import product_bound
from ..models.verify import Check
from ..nn import SparseLinear
from ..prune import magnitude

_SHAPES = ((64, 64), (70, 52), (1, 4), (129, 260))
_PATTERNS: tuple[Pattern, ...] = (
    NMPattern(2, 4),
    NMPattern(1, 4),
    NMPattern(4, 6),
    NMPattern(6, 8),
    Unstructured(0.7),
    BlockPattern(16, 16, 0.5),
)
_PRODUCT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def self_checks() -> Iterator[Check]:
    """Every format by dtype, pattern and shape; then every format's product."""
    threads = torch.get_num_threads()
    # Hundreds of tiny matrices: on two busy cores, waiting for a second thread made this 149 s
    # instead of 8.
    torch.set_num_threads(1)
    try:
        yield from _all_checks()
    finally:
        torch.set_num_threads(threads)


def names() -> list[str]:
    """What `self_checks` gives, by name and in its order."""
    trips, products = (
        (f"round trip {fmt}" for fmt in FORMATS),
        (f"product {fmt}" for fmt in FORMATS),
    )
    return [*trips, "conversions", *products]


def _all_checks() -> Iterator[Check]:
    for fmt in FORMATS:
        yield _checked(f"round trip {fmt}", lambda fmt=fmt: _round_trips(fmt))  # type: ignore[misc]
    yield _checked("conversions", _conversions)
    for fmt in FORMATS:
        yield _checked(f"product {fmt}", lambda fmt=fmt: _products(fmt))  # type: ignore[misc]


def _checked(name: str, body: Callable[[], str]) -> Check:
    try:
        return Check(name, True, body())
    except (HopsparseError, _Mismatch) as error:
        return Check(name, False, str(error))


class _Mismatch(Exception):
    """A value that is not what it must be."""


def _weight(shape: tuple[int, int], dtype: torch.dtype, pattern: Pattern, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    pruned = magnitude(values, pattern)
    # Away from zero before a cast to 8 bits: what the pattern keeps must stay non-zero.
    live = pruned != 0
    scaled = torch.where(live, pruned.sign() * (1 + pruned.abs() * 8), 0.0)
    return scaled.to(dtype)


def _packed(fmt: str, dense: Tensor, pattern: Pattern) -> SparseMatrix | None:
    """The weight in `fmt`, or None where the format does not hold the pattern."""
    if fmt == "nm":
        if not isinstance(pattern, NMPattern):
            return None
        return FORMATS["nm"].from_dense(dense, pattern)  # type: ignore[call-arg]
    if fmt == "bsr":
        return BSR.from_dense(dense, (16, 16))
    if fmt == "bsr24":
        fits = isinstance(pattern, NMPattern) and pattern.m == 4
        return BSR24.from_dense(dense, (16, 16)) if fits else None
    return FORMATS[fmt].from_dense(dense)


def _cases() -> Iterator[tuple[tuple[int, int], Pattern, int]]:
    seed = 0
    for shape in _SHAPES:
        for pattern in _PATTERNS:
            seed += 1
            yield shape, pattern, seed


def _round_trips(fmt: str) -> str:
    done = 0
    for shape, pattern, seed in _cases():
        for dtype in VALUE_DTYPES:
            dense = _weight(shape, dtype, pattern, seed)
            matrix = _packed(fmt, dense, pattern)
            if matrix is None:
                continue
            matrix.validate()
            if not _same_bits(matrix.to_dense(), dense):
                raise _Mismatch(f"{dtype} {list(shape)} {pattern} does not read back as stored")
            done += 1
    return f"{done} matrices of {len(VALUE_DTYPES)} dtypes read back bit for bit"


def _conversions() -> str:
    dense = _weight((96, 64), torch.bfloat16, NMPattern(2, 4), 1)
    start = _packed("nm", dense, NMPattern(2, 4))
    assert start is not None
    for source in FORMATS:
        first = convert(start, source)
        for target in FORMATS:
            if not _same_bits(convert(first, target).to_dense(), dense):
                raise _Mismatch(f"nm -> {source} -> {target} changes the matrix")
    return f"{len(FORMATS) ** 2} pairs of formats keep every bit"


def _products(fmt: str) -> str:
    done = 0
    for shape, pattern, seed in _cases():
        for dtype in _PRODUCT_DTYPES:
            dense = _weight(shape, dtype, pattern, seed)
            matrix = _packed(fmt, dense, pattern)
            if matrix is None:
                continue
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(5, shape[1], generator=generator).to(dtype)
            found = SparseLinear(matrix)(x)
            exact = x.double() @ dense.double().T
            wrong = (found.double() - exact).abs() - product_bound(x, dense, torch.float32, dtype)
            if not bool((wrong <= 0).all()):
                row, col = divmod(int(wrong.argmax()), wrong.shape[1])
                raise _Mismatch(
                    f"{dtype} {list(shape)} {pattern}: y[{row}, {col}] is "
                    f"{found[row, col].item():g}, float64 gives {exact[row, col].item():g}"
                )
            done += 1
    return f"{done} products within the derived bound of float64"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))

"""Which entries of a weight may be non-zero: N:M, unstructured, or blocks.

A pattern is a plain value: hashable, printable, and `parse_pattern(str(p)) == p`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ArgumentError

_EXAMPLES = "2:4, 6:8, unstructured:0.5 or block:32x32:0.5"


@dataclass(frozen=True)
class NMPattern:
    """At most `n` of every `m` consecutive entries along k are kept (NVIDIA's reading of N:M)."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m <= 64:
            raise ArgumentError(
                f"pattern {self.n}:{self.m}", need="0 < N < M <= 64", hint="2:4, 4:8 or 6:8"
            )

    @property
    def sparsity(self) -> float:
        """Fraction of entries that are zero."""
        return 1 - self.n / self.m

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


@dataclass(frozen=True)
class Unstructured:
    """A fraction `sparsity` of all entries is zero, anywhere."""

    sparsity: float

    def __post_init__(self) -> None:
        _check_fraction(self.sparsity, "unstructured:0.5")

    def __str__(self) -> str:
        return f"unstructured:{float(self.sparsity)!r}"


@dataclass(frozen=True)
class BlockPattern:
    """A fraction `sparsity` of the `rows` x `cols` blocks is zero."""

    rows: int
    cols: int
    sparsity: float = 0.5

    def __post_init__(self) -> None:
        if min(self.rows, self.cols) < 1:
            raise ArgumentError(
                f"block of {self.rows}x{self.cols}", need="positive sides", hint="block:32x32"
            )
        _check_fraction(self.sparsity, "block:32x32:0.5")

    def __str__(self) -> str:
        return f"block:{self.rows}x{self.cols}:{float(self.sparsity)!r}"


Pattern = NMPattern | Unstructured | BlockPattern


def parse_pattern(text: str) -> Pattern:
    """Read a pattern as users write it.

    Args:
        text: `N:M`, `unstructured:FRACTION` or `block:ROWSxCOLS[:FRACTION]`, where FRACTION is the
            part that becomes zero.

    Raises:
        ArgumentError: The text is no pattern.

    Example:
        >>> parse_pattern("2:4")
        NMPattern(n=2, m=4)
        >>> str(parse_pattern("block:32x32"))
        'block:32x32:0.5'
    """
    text = text.strip()
    if found := re.fullmatch(r"(\d+):(\d+)", text):
        return NMPattern(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"unstructured:([0-9.eE+-]+)", text):
        return Unstructured(_fraction(found[1]))
    if found := re.fullmatch(r"block:(\d+)x(\d+)(?::([0-9.eE+-]+))?", text):
        sparsity = _fraction(found[3]) if found[3] else 0.5
        return BlockPattern(int(found[1]), int(found[2]), sparsity)
    raise ArgumentError(
        f"pattern {text!r}", need="N:M, unstructured:F or block:RxC", hint=_EXAMPLES
    )


def as_nm_pattern(pattern: NMPattern | str) -> NMPattern:
    """An N:M pattern given as a value or as text.

    Raises:
        ArgumentError: It is something else.
    """
    value = parse_pattern(pattern) if isinstance(pattern, str) else pattern
    if not isinstance(value, NMPattern):
        raise ArgumentError(f"pattern {value!s}", need="N:M", hint="2:4")
    return value


def _fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"fraction {text!r}", need="a number", hint=_EXAMPLES) from None


def _check_fraction(value: float, example: str) -> None:
    if not 0 < value < 1:
        raise ArgumentError(
            f"sparsity {float(value)!r}",
            need="a fraction between 0 and 1, both excluded",
            hint=example,
        )

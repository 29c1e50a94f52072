"""Named gradients of hybrid_gradient: what benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """The size of a gradient.

    Attributes:
        name: Unique.
        n: Values.
        k: How many are taken.
    """

    name: str
    n: int
    k: int


#: A layer of 4 M values, one of 50 M, and as many values as BERT-Base has, a thousandth taken.
TIMED = (
    Case("4M", 4_194_304, 4_195),
    Case("50M", 50_000_000, 50_000),
    Case("110M", 110_000_000, 110_000),
)

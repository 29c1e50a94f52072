"""Named inputs of quantize_rows: what tests check and benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass

from .plan import Source


@dataclass(frozen=True)
class Case:
    """The shape of an input.

    Attributes:
        name: Unique.
        rows: Tokens.
        k: Columns of the codes; a gated input has twice as many.
    """

    name: str
    rows: int
    k: int


#: Rows that start on 16 bytes, of every shape of a team, whole and cut; and rows that do not.
EDGE = (
    Case("one-entry", 1, 1),
    Case("pair", 3, 2),
    Case("odd", 5, 7),
    Case("one-chunk", 4, 8),
    Case("two-chunks", 9, 16),
    Case("warp", 130, 576),
    Case("whole-warp", 5, 2048),
    Case("short-block", 3, 2056),
    Case("block", 33, 4096),
    Case("off-16-bytes", 3, 4100),
    Case("whole-block", 2, 8192),
    Case("whole-wide-block", 7, 14336),
    Case("large-block", 2, 16384),
    Case("whole-large-block", 2, 28672),
    Case("read-again", 2, 28680),
    Case("longest", 1, 57344),
    Case("long-odd", 1, 28671),
)

#: Widths of Llama-3-8B and Llama-3-70B at one decoding step, a batch of them, and a prefill.
MODEL = tuple(
    Case(f"{rows}x{k}", rows, k) for k in (4096, 8192, 14336, 28672) for rows in (16, 256, 4096)
)

#: What is timed of each case.
TIMED: tuple[Source, ...] = ("plain", "norm", "halves", "interleaved")

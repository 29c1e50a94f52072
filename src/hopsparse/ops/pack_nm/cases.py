"""Named matrices of pack_nm: what tests check and benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """The shape of a matrix.

    Attributes:
        name: Unique.
        rows: Any number from 1.
        cols: Any number from 1.
    """

    name: str
    rows: int
    cols: int


SMOKE = (Case("one-tile", 64, 64), Case("smoke", 128, 256))

#: Rows off the panel; columns off the unit, the step, the 16 bytes and the group; one of each.
EDGE = (
    Case("one-entry", 1, 1),
    Case("one-group", 1, 4),
    Case("narrow", 65, 3),
    Case("flat", 2, 72),
    Case("half-panel", 33, 128),
    Case("upper-rows", 8, 144),
    Case("ragged", 70, 50),
    Case("cut-piece", 129, 130),
    Case("cut-group", 7, 201),
    Case("cut-unit", 200, 328),
    Case("many-units", 66, 4104),
    Case("many-panels", 4100, 40),
)

#: Projections of Llama-3-8B and Llama-3-70B, and squares.
MODEL = (
    Case("llama3-8b-qo", 4096, 4096),
    Case("llama3-8b-up", 14336, 4096),
    Case("llama3-8b-down", 4096, 14336),
    Case("square-8192", 8192, 8192),
    Case("llama3-70b-up", 28672, 8192),
    Case("square-16384", 16384, 16384),
)

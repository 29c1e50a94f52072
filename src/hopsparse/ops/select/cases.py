"""Named inputs of select: what tests check and benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """The shape of an input.

    Attributes:
        name: Unique.
        rows: Rows of scores.
        columns: Of each.
        k: Chosen of each.
    """

    name: str
    rows: int
    columns: int
    k: int


#: Around what a thread, a warp, a block and a cluster hold.
EDGE = (
    Case("one", 1, 1, 1),
    Case("all", 3, 17, 17),
    Case("more-than-all", 2, 31, 40),
    Case("warp", 5, 32, 7),
    Case("off-warp", 4, 33, 1),
    Case("tile", 3, 1024, 100),
    Case("off-tile", 3, 1025, 1024),
    Case("one-block", 2, 8192, 64),
    Case("beyond-a-block", 2, 8193, 64),
    Case("cluster", 2, 65_536, 2048),
    Case("odd-cluster", 3, 100_003, 2048),
    Case("a-block-each", 19, 20_011, 500),
    Case("small-clusters", 18, 50_003, 1000),
    Case("case-13", 1, 262_144, 2048),
    Case("longest", 1, 393_216, 2048),
    Case("beyond-the-kernel", 1, 393_217, 16),
)

#: Tokens of long contexts; and blocks of 64 of them, 128K and 1M tokens.
MODEL = (
    *(Case(f"{rows}x128K", rows, 131_072, 2048) for rows in (1, 8, 64)),
    *(Case(f"{rows}x32K", rows, 32_768, 2048) for rows in (1, 8, 64)),
    *(Case(f"{rows}x2K-blocks", rows, 2048, 32) for rows in (8, 64, 256)),
    *(Case(f"{rows}x16K-blocks", rows, 16_384, 64) for rows in (8, 64)),
)

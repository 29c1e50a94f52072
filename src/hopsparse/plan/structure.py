"""What the pattern of a matrix looks like, as numbers: what a format is chosen from.

`hopsparse.measure.analyse` counts them; `hopsparse.measure.rank` makes a list of formats of them.
Everything is exact but `Structure.reordered`, which a search found and a better one could beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

#: Sides of the square blocks that are looked at.
BLOCK_SIDES = (8, 16, 32, 64, 128)

Shape = Literal["empty", "dense", "diagonal", "banded", "blocks", "2:4", "power law", "scattered"]
Order = Literal["natural", "dealt", "matched"]


@dataclass(frozen=True)
class LineCounts:
    """Non-zeros of the rows, or of the columns, of a matrix.

    Attributes:
        least: Of the emptiest line.
        most: Of the fullest line.
        mean: Over all lines.
        variation: Standard deviation over mean; 0 for an empty matrix.
        empty: Lines without any.
        histogram: First and last count of a bin, and the lines in it: 0, 1, 2, 3 to 4, 5 to 8, and
            so on, up to the bin of the fullest line.
    """

    least: int
    most: int
    mean: float
    variation: float
    empty: int
    histogram: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class BlockFill:
    """The matrix in square blocks; blocks of the last row and column may be cut.

    Attributes:
        side: Rows and columns of a block.
        kept: Blocks that hold a non-zero.
        total: All blocks.
        fill: Non-zeros over all entries of the kept blocks, padding included; 0 if there are none.
        most: Kept blocks of the fullest block row.
    """

    side: int
    kept: int
    total: int
    fill: float
    most: int

    @property
    def density(self) -> float:
        """Kept blocks over all blocks.

        Example:
            >>> BlockFill(side=8, kept=1, total=4, fill=0.5, most=1).density
            0.25
        """
        return self.kept / self.total


@dataclass(frozen=True)
class TwoFourFit:
    """How far the matrix is from 2:4, along its rows.

    Attributes:
        excess: Non-zeros beyond two in their group of four.
        share: Part of the non-zeros that 2:4 holds: 1 where it fits.
        groups_over: Groups with more than two.
        first: Row and group of the first of them.
    """

    excess: int
    share: float
    groups_over: int
    first: tuple[int, int] | None

    @property
    def fits(self) -> bool:
        """Whether the matrix is 2:4 as it is."""
        return self.excess == 0


@dataclass(frozen=True)
class Reordered:
    """The best fit that was found with the columns in another order.

    Attributes:
        fit: The fit.
        how: `natural` (the order as it is), `dealt` (by count, one to each group in turn) or
            `matched` (columns whose entries seldom meet).
        at_most: No order can hold a larger part of the non-zeros: rows with more of them than two
            in every group say so.
        note: What was not tried, or "".
    """

    fit: TwoFourFit
    how: Order
    at_most: float
    note: str = ""


@dataclass(frozen=True)
class Diagonals:
    """Where non-zeros lie about the main diagonal.

    Attributes:
        below: Lower bandwidth: the most that a row index is past the column's; 0 if it never is.
        above: Upper bandwidth.
        occupied: Diagonals that hold a non-zero.
        on_main: Non-zeros on the main diagonal.
        within: The least distance from the main diagonal that holds 90 % of the non-zeros.
    """

    below: int
    above: int
    occupied: int
    on_main: int
    within: int


@dataclass(frozen=True)
class Structure:
    """All that was counted of a pattern [rows, cols].

    Attributes:
        shape: Rows and columns.
        nnz: Non-zeros.
        rows: Non-zeros a row.
        cols: Non-zeros a column.
        blocks: By rising side.
        two_four: Fit to 2:4 as it is.
        reordered: Fit to 2:4 with columns in another order.
        diagonals: Where they lie.
    """

    shape: tuple[int, int]
    nnz: int
    rows: LineCounts
    cols: LineCounts
    blocks: tuple[BlockFill, ...]
    two_four: TwoFourFit
    reordered: Reordered
    diagonals: Diagonals

    @property
    def density(self) -> float:
        """Non-zeros over all entries."""
        return self.nnz / (self.shape[0] * self.shape[1])

    def block(self, side: int) -> BlockFill:
        """The fill of blocks of one of `BLOCK_SIDES`."""
        return next(block for block in self.blocks if block.side == side)

    def natural_side(self) -> int | None:
        """The side of the blocks that the matrix is made of, or None.

        The largest that is at least 90 % full, in a matrix of which it leaves blocks out.
        """
        full = [b.side for b in self.blocks if b.fill >= _FULL and 0 < b.kept < b.total]
        return max(full, default=None)

    def looks(self) -> Shape:
        """The one word that fits best; a reading aid, on which no choice depends."""
        if not self.nnz:
            return "empty"
        if self.density > _DENSE:
            return "dense"
        if self.diagonals.on_main == self.nnz:
            return "diagonal"
        if self.diagonals.below + self.diagonals.above + 1 <= _BAND * sum(self.shape):
            return "banded"
        if self.natural_side() is not None:
            return "blocks"
        if self.two_four.fits and self.density >= _NEARLY_HALF:
            return "2:4"
        heavy = max(self.rows.variation, self.cols.variation) >= 1
        return "power law" if heavy else "scattered"

    def to_json(self) -> dict[str, Any]:
        """Plain values, with what is derived from them."""
        facts = asdict(self)
        for block, own in zip(facts["blocks"], self.blocks, strict=True):
            block["density"] = own.density
        return facts | {
            "density": self.density,
            "looks": self.looks(),
            "natural_block": self.natural_side(),
        }


_FULL = 0.9
_DENSE = 0.9
# Of the sum of the sides; the diagonals of a full matrix are as many as that.
_BAND = 1 / 16
_NEARLY_HALF = 0.4


def bins(counts_by_bin: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """Bins of `LineCounts.histogram`, from the lines in each: 0, 1, 2, 3 to 4, 5 to 8, ...

    Example:
        >>> bins([5, 0, 1, 2])
        ((0, 0, 5), (1, 1, 0), (2, 2, 1), (3, 4, 2))
    """
    edges = [(0, 0), (1, 1)]
    while len(edges) < len(counts_by_bin):
        last = edges[-1][1]
        edges.append((last + 1, 2 * last))
    return tuple(
        (first, last, lines) for (first, last), lines in zip(edges, counts_by_bin, strict=False)
    )


def percent(part: float) -> str:
    """A part as text; nothing but all of it is 100 %.

    Example:
        >>> percent(1.0), percent(0.99999), percent(0.5)
        ('100 %', '99.99 %', '50.00 %')
    """
    return "100 %" if part == 1 else f"{min(100 * part, 99.99):.2f} %"

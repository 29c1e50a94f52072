"""What `inspect` says of one matrix: its structure, and formats and kernels for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import bytes_text, stdout, time_text
from .matrices import Read, read_named

if TYPE_CHECKING:
    from rich.console import Console

    from ..measure.ranking import Candidate, Ranking
    from ..models.auto import Chosen
    from ..plan import Structure, Target


@dataclass(frozen=True)
class Analysis:
    """One matrix.

    Attributes:
        name: Of the matrix.
        format: How it is stored.
        dtype: Of its values.
        notes: What was changed or assumed when it was read.
        structure: What was counted.
        rankings: One for each token count.
        auto: What `convert --to auto` makes of it.
    """

    name: str
    format: str
    dtype: str
    notes: list[str]
    structure: Structure
    rankings: list[Ranking]
    auto: Chosen

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "format": self.format,
            "dtype": self.dtype,
            "notes": self.notes,
            "structure": self.structure.to_json(),
            "rankings": [ranking.to_json() for ranking in self.rankings],
            "auto": asdict(self.auto),
        }


@dataclass(frozen=True)
class Question:
    """What is asked of every matrix.

    Attributes:
        tokens: Token counts to predict for.
        dtype: To predict in.
        target: The GPU.
        plot: Where to draw the matrix, or None.
    """

    tokens: Sequence[int]
    dtype: str
    target: Target
    plot: Path | None


def analysed(name: str, read: Read, question: Question) -> Analysis:
    """Read a matrix, count it, rank what could multiply by it, and draw it.

    Raises:
        HopsparseError: It cannot be read, is larger than is counted, or the plot not be written.
    """
    from ..formats import MatrixFacts
    from ..measure.ranking import rank
    from ..measure.structure import analyse, compressed
    from ..models.auto import choose, kernels

    matrix, notes, made = read_named(name, read)
    structure = analyse(matrix, validate=not made)
    facts, known = MatrixFacts.of(matrix), kernels()
    auto = choose(name, matrix, folder=False, target=question.target, structure=structure)
    rankings = [
        rank(structure, count, question.target, dtype=question.dtype, kernels=known)
        for count in question.tokens
    ]
    if question.plot is not None:
        from ..report.spy import write_plot

        write_plot(compressed(matrix), structure, question.plot, name)
    return Analysis(name, facts.stored_as, facts.dtype, notes, structure, rankings, auto)


def print_analysis(found: Analysis) -> None:
    """Write what was found as tables."""
    console, structure = stdout(), found.structure
    rows, cols = structure.shape
    told = (
        f"{found.name}: {rows} x {cols} of {found.dtype}, {structure.nnz} non-zeros, "
        f"density {structure.density:.3g}, looks {structure.looks()}"
    )
    console.print(told, markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for line in _lines(structure):
        console.print(line, markup=False, soft_wrap=True)
    _print_blocks(console, structure)
    for ranking in found.rankings:
        _print_ranking(console, ranking)
    for label, why in found.rankings[0].left_out.items():
        console.print(f"not {label}: {why}", markup=False, soft_wrap=True)
    block = f" {found.auto.block[0]}x{found.auto.block[1]}" if found.auto.block else ""
    console.print(
        f"convert --to auto stores {found.auto.format}{block}: {found.auto.why}",
        markup=False,
        soft_wrap=True,
    )


def _lines(structure: Structure) -> list[str]:
    lines = []
    for word, counts in (("rows", structure.rows), ("columns", structure.cols)):
        lines.append(
            f"{word}: {counts.least} to {counts.most} non-zeros, mean {counts.mean:.4g}, "
            f"variation {counts.variation:.2f}, {counts.empty} empty"
        )
    bins = [
        (f"{first}" if first == last else f"{first}-{last}") + f": {many}"
        for first, last, many in structure.rows.histogram
        if many
    ]
    lines.append("rows by non-zeros: " + ", ".join(bins))
    from ..plan.structure import percent

    spread, fit, other = structure.diagonals, structure.two_four, structure.reordered
    lines.append(
        f"diagonals: {spread.occupied} occupied, {spread.below} below and {spread.above} above "
        f"the main one at most, 90 % within {spread.within}"
    )
    text = f"2:4 holds {percent(fit.share)} of the non-zeros"
    if not fit.fits:
        text += (
            f"; {percent(other.fit.share)} with columns {_ORDERS[other.how]}, and in no order more "
            f"than {percent(other.at_most)}"
        )
    return [*lines, text + (f" ({other.note})" if other.note else "")]


_ORDERS = {"natural": "as they are", "dealt": "dealt out by count", "matched": "matched"}


def _print_blocks(console: Console, structure: Structure) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("block", "kept", "of", "density", "fill", "most in a row"):
        table.add_column(title, justify="right", no_wrap=True)
    for block in structure.blocks:
        table.add_row(
            f"{block.side}x{block.side}",
            str(block.kept),
            str(block.total),
            f"{block.density:.3g}",
            f"{block.fill:.3g}",
            str(block.most),
        )
    console.print(table)


def _print_ranking(console: Console, ranking: Ranking) -> None:
    from rich.table import Table

    console.print(
        f"\n{ranking.tokens} tokens in {ranking.dtype} on {ranking.target}, predicted, "
        "not measured",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("format")
    table.add_column("kernel")
    for title in ("stored", "predicted", "floor", "cuSPARSE"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in ranking.candidates:
        table.add_row(*_cells(each))
    console.print(table)


def _cells(each: Candidate) -> tuple[str, ...]:
    def time(value: float | None) -> str:
        return "-" if value is None else time_text(value)

    return (
        each.label,
        each.kernel or "none yet",
        bytes_text(each.bytes),
        time(each.predicted_us),
        time(each.floor_us),
        time(each.peer_us),
    )

"""A picture of one matrix: where its entries are, the blocks they fill, and how rows differ."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, UnsupportedError
from ..files import written_whole
from ..formats import CSR
from ..measure.structure import cell_counts, window
from ..plan import Structure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What a plot is written as.
SUFFIXES = (".svg", ".png", ".pdf")
_CELLS = 256
_MOST_LINES = 64  # of a lattice, along a side
_WINDOW, _BLOCKS_SHOWN = 128, 6


def check_plot(path: Path) -> None:
    """Refuse before any work starts, where the plot could not be written afterwards.

    Raises:
        ArgumentError: A suffix that is not written.
        UnsupportedError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(
            f"plot {path}", need="a file that ends in " + ", ".join(SUFFIXES), hint="spy.svg"
        )
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "no matplotlib to plot with",
            need="the report extra",
            hint="pip install 'hopsparse[report]', or leave --plot out",
        )


def write_plot(matrix: CSR, structure: Structure, path: Path, title: str = "") -> None:
    """Plot a matrix into a file, which appears whole or not at all.

    On the left the whole matrix, at most 256 cells a side, dark where it is full, with the lattice
    of its blocks if it has blocks and they are few enough to be seen. In the middle the
    surroundings of its fullest cell, entry by entry, in blocks. On the right, rows by non-zeros.

    Args:
        matrix: [rows, cols] on the CPU, without stored zeros.
        structure: What `analyse` counted of it.
        path: Ends in one of `SUFFIXES`.
        title: Its name.

    Raises:
        ArgumentError: Another suffix.
        UnsupportedError: matplotlib is not installed.
        CheckpointError: The file cannot be written.
    """
    check_plot(path)
    from matplotlib import rc_context

    from .figures import STYLE

    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure = structure_figure(matrix, structure, title)
        kind = path.suffix.lower().removeprefix(".")
        facts: dict[str, Any] = {"CreationDate" if kind == "pdf" else "Date": None}
        with written_whole(path) as temporary:
            figure.savefig(
                temporary, format=kind, dpi=160, metadata=None if kind == "png" else facts
            )


def structure_figure(matrix: CSR, structure: Structure, title: str = "") -> Figure:
    """The figure of `write_plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.3), layout="constrained")
    whole, part, lines = figure.subplots(1, 3)
    side = structure.natural_side() or structure.blocks[1].side
    counts, full = cell_counts(matrix, _CELLS)
    _whole(whole, full, structure)
    _part(part, matrix, counts, side)
    _rows(lines, structure)
    rows, cols = structure.shape
    looks = f"{rows:,} x {cols:,}, {structure.nnz:,} non-zeros, {structure.looks()}"
    figure.suptitle(f"{title}: {looks}" if title else looks, fontsize=10)
    return figure


def _whole(axes: Axes, full: Any, structure: Structure) -> None:
    from matplotlib.colors import LogNorm

    rows, cols = structure.shape
    shown = np.ma.masked_equal(full, 0)
    low = float(shown.min()) if structure.nnz else 1.0
    image = axes.imshow(
        shown,
        norm=LogNorm(min(low, 0.5), 1),
        cmap="Blues",
        extent=(0, cols, rows, 0),
        aspect="auto",
        interpolation="nearest",
    )
    axes.figure.colorbar(image, ax=axes, shrink=0.6, label="non-zeros in a cell, part of it")
    side = structure.natural_side()
    if side and max(rows, cols) <= _MOST_LINES * side:
        _lattice(axes, slice(0, rows), slice(0, cols), side)
        axes.set_title(f"whole, blocks of {side}", fontsize=9)
    else:
        axes.set_title("whole", fontsize=9)
    axes.set_xlabel("column")
    axes.set_ylabel("row")


def _part(axes: Axes, matrix: CSR, counts: Any, side: int) -> None:
    """The surroundings of the fullest cell, and the kept blocks in them."""
    from matplotlib.patches import Rectangle

    size = max(_WINDOW, side * _BLOCKS_SHOWN)
    cell = np.unravel_index(int(counts.argmax()), counts.shape)
    spans = []
    for at, length, cells in zip(cell, matrix.shape, counts.shape, strict=True):
        start = int(at) * length // cells // side * side
        start = max(0, min(start, (length - size) // side * side))
        spans.append(slice(start, min(length, start + size)))
    rows, cols = spans
    shown = window(matrix, rows, cols)
    extent = (cols.start, cols.stop, rows.stop, rows.start)
    axes.imshow(
        shown, cmap="Greys", vmax=1.4, extent=extent, aspect="auto", interpolation="nearest"
    )
    for top in range(0, shown.shape[0], side):
        for left in range(0, shown.shape[1], side):
            if shown[top : top + side, left : left + side].any():
                corner = (cols.start + left, rows.start + top)
                axes.add_patch(Rectangle(corner, side, side, facecolor="#d9822b", alpha=0.25))
    _lattice(axes, rows, cols, side)
    axes.set_xlim(cols.start, cols.stop)
    axes.set_ylim(rows.stop, rows.start)
    axes.locator_params(nbins=5)
    axes.set_title(f"where it is fullest, kept blocks of {side}", fontsize=9)
    axes.set_xlabel("column")


def _lattice(axes: Axes, rows: slice, cols: slice, side: int) -> None:
    if rows.stop - rows.start > side:
        edges = range(rows.start + side, rows.stop, side)
        axes.hlines(list(edges), cols.start, cols.stop, color="#d9822b", linewidth=0.4)
    if cols.stop - cols.start > side:
        edges = range(cols.start + side, cols.stop, side)
        axes.vlines(list(edges), rows.start, rows.stop, color="#d9822b", linewidth=0.4)


def _rows(axes: Axes, structure: Structure) -> None:
    bins = structure.rows.histogram
    names = [f"{first}" if first == last else f"{first} to {last}" for first, last, _ in bins]
    axes.barh(range(len(bins)), [lines for *_, lines in bins], color="#3b82c4")
    axes.set_yticks(range(len(bins)), names, fontsize=8)
    axes.invert_yaxis()
    # Where few rows hold much, they would not be seen beside the many.
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, 2 * max(lines for *_, lines in bins))
    axes.set_xlabel("rows")
    axes.set_ylabel("non-zeros")
    variation = structure.rows.variation
    axes.set_title(f"rows by non-zeros, variation {variation:.2f}", fontsize=9)

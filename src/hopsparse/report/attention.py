"""Plots of what sparse attention costs: recall by layer, perplexity and needles by budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..files import written_whole
from .figures import INK, PALETTE, STYLE, WIDE, figure_svg


def write_attention_plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write recall.svg, error.svg, perplexity.svg and, with needles, needles.svg.

    Args:
        report: What `attention_report` returned.
        folder: Where they go; existing ones are replaced.

    Raises:
        CheckpointError: One cannot be written.
    """
    rows = [row for row in report["contexts"] if row["budget"]]
    plots: dict[str, str] = {}
    if report["layers"]:
        plots["recall"] = _by_layer(
            report["layers"], "Attention mass inside of what is attended, by layer", _recall
        )
        plots["error"] = _by_layer(
            report["layers"], "Output error against dense float32, by layer", _error
        )
    if rows:
        plots["perplexity"] = _by_budget(
            rows, "Perplexity over that of dense attention", lambda row: row["ratio"]
        )
    if any(row["needles"] for row in rows):
        plots["needles"] = _by_budget(
            rows, "Needles found", lambda row: row["needles_found"] / max(row["needles"], 1)
        )
    written = []
    for name, svg in plots.items():
        path = folder / f"{name}.svg"
        with written_whole(path) as temporary:
            temporary.write_text(svg + "\n", encoding="utf-8")
        written.append(path)
    return written


def _by_layer(
    layers: list[dict[str, Any]], title: str, draw: Callable[[Any, list[int], Any, str, str], None]
) -> str:
    """One line a budget, of the longest context."""
    context = max(row["context"] for row in layers)
    own = [row for row in layers if row["context"] == context]
    budgets = sorted({row["budget"] for row in own})
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
        axes = figure.subplots()
        for budget, colour in zip(budgets, _colours(budgets), strict=True):
            chosen = sorted(
                (row for row in own if row["budget"] == budget), key=lambda row: row["layer"]
            )
            draw(axes, [row["layer"] for row in chosen], chosen, colour, f"{budget} of {context:,}")
        axes.set_xlabel("layer")
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        axes.legend(frameon=False, title="tokens attended")
        return figure_svg(figure, title)


def _recall(axes: Any, layers: list[int], rows: Any, colour: str, label: str) -> None:
    axes.plot(layers, [100 * row["recall"] for row in rows], color=colour, label=label)
    first = [100 * row["recall_p1"] for row in rows]
    axes.plot(layers, first, color=colour, linestyle=":", label=f"{label}, 1st percentile")
    axes.set_ylabel("mass, %")
    axes.set_ylim(0, 102)


def _error(axes: Any, layers: list[int], rows: Any, colour: str, label: str) -> None:
    axes.plot(layers, [100 * row["error"] for row in rows], color=colour, label=label)
    axes.set_ylabel("relative error, %")
    axes.set_ylim(bottom=0)


def _by_budget(
    rows: list[dict[str, Any]], title: str, value: Callable[[dict[str, Any]], float]
) -> str:
    """One line a context."""
    contexts = sorted({row["context"] for row in rows})
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDE, 2.6), layout="constrained")
        axes = figure.subplots()
        for context, colour in zip(contexts, _colours(contexts), strict=True):
            own = [row for row in rows if row["context"] == context]
            points = [row["budget"] for row in own], [value(row) for row in own]
            axes.plot(*points, marker="o", color=colour, label=f"{context:,}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens attended")
        axes.set_ylabel(title.lower())
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        axes.legend(frameon=False, title="context")
        return figure_svg(figure, title)


def _colours(lines: list[int]) -> list[str]:
    return [PALETTE[index % len(PALETTE)] for index in range(len(lines))]

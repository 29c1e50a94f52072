"""Quality against predicted speed as a plot: the plans of a Pareto front and every uniform form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..files import written_whole
from ..models.pareto import Pareto, ParetoPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_X_LABELS = {
    "time": "predicted speed of a decode step, dense = 1",
    "floor": "speed of a decode step at the memory and compute limits, dense = 1",
    "bytes": "dense weight bytes over stored weight bytes",
}
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
# Uniform forms that ruin a model would squeeze all others into a corner.
_HIGHEST_RATIO = 4.0
_LEGEND_BESIDE = 6.0


def pareto_svg(pareto: Pareto, width: float) -> str:
    """The plot as SVG text for a page; needs matplotlib.

    Args:
        pareto: The plans.
        width: In inches.
    """
    from matplotlib import rc_context

    from .figures import STYLE, figure_svg

    with rc_context(STYLE):
        return figure_svg(_figure(pareto, width), "Predicted perplexity against predicted speed")


def save_pareto(pareto: Pareto, path: Path) -> None:
    """Write the plot; needs matplotlib.

    Raises:
        ArgumentError: The name does not end in .png or .svg.
        CheckpointError: The file cannot be written.
    """
    check_plot_name(path)
    from matplotlib import rc_context

    from .figures import INK, STYLE, WIDE

    plain = {key: "#333333" if value == INK else value for key, value in STYLE.items()}
    with rc_context({**plain, "svg.hashsalt": "pareto"}), written_whole(path) as temporary:
        # A date inside would make every run another file.
        dated = {"Date": None} if path.suffix == ".svg" else {}
        _figure(pareto, WIDE).savefig(temporary, format=path.suffix[1:], dpi=160, metadata=dated)


def check_plot_name(path: Path) -> None:
    """Refuse a name before any work that the plot is made of.

    Raises:
        ArgumentError: It does not end in .png or .svg.
    """
    if path.suffix not in SUFFIXES:
        raise ArgumentError(
            f"a plot named {path.name}",
            need="a name that ends in " + " or ".join(SUFFIXES),
            hint=f"{path.stem}.png",
        )


def _figure(pareto: Pareto, width: float) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    wide = width > _LEGEND_BESIDE
    # A column of the legend holds about 20 lines; on a phone it lies under the plot.
    height = 0.5 * width if wide else 0.8 * width + 0.1 * len(pareto.uniform)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_yscale("log")
    shown = [point.ratio for point in (*pareto.front, *pareto.uniform)]
    top = min(_HIGHEST_RATIO, max([1.02, pareto.budget or 1.0, *shown]))
    axes.set_ylim(1 - 0.02 * math.log(top), top * (1 + 0.04 * math.log(top)))
    _draw_front(axes, pareto)
    _draw_uniform(axes, pareto.uniform, top)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(_X_LABELS[pareto.objective])
    axes.set_ylabel("predicted perplexity, dense = 1")
    axes.set_title(
        f"{pareto.target.upper()}, batch {pareto.batch:,}, context {pareto.context:,}: "
        "predicted, not measured",
        loc="left",
        fontsize=9,
    )
    axes.grid(alpha=0.2, linewidth=0.6)
    axes.set_axisbelow(True)
    place = {"loc": "outside right center"} if wide else {"loc": "outside lower center", "ncols": 2}
    figure.legend(frameon=False, fontsize=8 if wide else 7, **place)
    return figure


def _draw_front(axes: Axes, pareto: Pareto) -> None:
    from .figures import PALETTE

    within = [point for point in pareto.front if point.ratio <= _HIGHEST_RATIO]
    gains, ratios = [point.gain for point in within], [point.ratio for point in within]
    axes.plot(gains, ratios, "-o", color=PALETTE[0], markersize=2.5, linewidth=1, label="mixed")
    if pareto.budget is not None:
        axes.axhline(pareto.budget, color=PALETTE[7], linewidth=0.8, linestyle="--", label="budget")
    if pareto.chosen is not None and pareto.chosen.ratio <= _HIGHEST_RATIO:
        axes.plot(
            [pareto.chosen.gain],
            [pareto.chosen.ratio],
            "*",
            color=PALETTE[1],
            markersize=13,
            label="this plan",
            zorder=5,
        )


def _draw_uniform(axes: Axes, points: Sequence[ParetoPoint], top: float) -> None:
    """A colour a pattern and a mark a scheme; one that is off the plot lies on its upper edge."""
    from .figures import PALETTE

    split = [point.label.partition("+") for point in points]
    patterns = list(dict.fromkeys(pattern for pattern, _, _ in split))
    schemes = list(dict.fromkeys(scheme for _, _, scheme in split))
    for point, (pattern, _, scheme) in zip(points, split, strict=True):
        above = point.ratio > top
        axes.plot(
            [point.gain],
            [min(point.ratio, top)],
            linestyle="",
            marker=_MARKS[schemes.index(scheme) % len(_MARKS)],
            color=PALETTE[(2 + patterns.index(pattern)) % len(PALETTE)],
            fillstyle="none" if above else "full",
            markersize=6,
            label=f"all {point.label}" + (" (above)" if above else ""),
        )

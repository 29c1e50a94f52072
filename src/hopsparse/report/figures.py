"""The plots of the page, as SVG text that takes its colours from the page.

Ink and axes become `currentColor`, so that one figure serves light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..measure import Total

#: One colour a kind of projection: six hues that stay apart on white, on near-black and in the
#: common forms of colour blindness (after Okabe and Ito).
PALETTE = ("#3b82c4", "#d9822b", "#2a9d76", "#b86bb0", "#c8a415", "#cf5c4e", "#6b8fd4", "#7d8590")

TIMES = "\N{MULTIPLICATION SIGN}"

#: Dense and chosen, in the figure of predicted time.
PAIR = ("#9aa4af", "#3b82c4")

# A colour no plot uses by itself: the marker that `_themed` replaces.
INK = "#123456"
#: How all figures look.
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
}


@dataclass(frozen=True)
class LayerError:
    """One bar: relative output error (0 to 1) of one projection of one block."""

    block: int
    kind: str
    error: float


#: Widths in inches: a desktop page, and a phone of 360 px where text must stay readable.
WIDE, NARROW = 9.2, 3.45


def error_bars(layers: Sequence[LayerError], colours: Mapping[str, str], width: float) -> str:
    """Output error of every pruned layer by block: one row and one colour a kind of projection.

    Rows share one scale, so heights compare across kinds.
    """
    blocks = sorted({layer.block for layer in layers})
    top = max((layer.error for layer in layers), default=0.0) or 1.0
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 0.55 + 0.62 * len(colours)), layout="constrained")
        rows = figure.subplots(len(colours), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (kind, colour) in zip(rows, colours.items(), strict=True):
            own = [layer for layer in layers if layer.kind == kind]
            axes.bar(
                [blocks.index(layer.block) for layer in own],
                [100 * layer.error for layer in own],
                width=0.78,
                color=colour,
            )
            axes.set_ylim(0, 108 * top)
            axes.yaxis.set_major_locator(MaxNLocator(2))
            axes.set_title(kind, loc="left", fontsize=9, pad=2)
            axes.set_axisbelow(True)
            axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        step = max(1, len(blocks) // (15 if width == WIDE else 6))
        ticks = range(0, len(blocks), step)
        rows[-1].set_xticks(list(ticks), [str(blocks[tick]) for tick in ticks])
        rows[-1].set_xlabel("block")
        figure.supylabel("output error, %", fontsize=9)
        return figure_svg(figure, "Output error of every pruned layer, by block")


def predicted_bars(totals: Sequence[Total], colours: tuple[str, str], width: float) -> str:
    """Predicted time at each token count: dense is 1, the chosen plans are the other bar."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 0.6 + 0.5 * len(totals)), layout="constrained")
        axes = figure.subplots()
        rows = range(len(totals))
        ratios = [1 / total.speedup for total in totals]
        axes.barh([row - 0.2 for row in rows], [1.0] * len(totals), 0.36, color=colours[0])
        axes.barh([row + 0.2 for row in rows], ratios, 0.36, color=colours[1])
        for row, ratio in zip(rows, ratios, strict=True):
            axes.text(ratio + 0.01, row + 0.2, f"{1 / ratio:.2f}{TIMES}", va="center")
        axes.set_yticks(list(rows), [f"{total.tokens:,}" for total in totals])
        axes.set_ylabel("tokens")
        axes.set_xlabel("predicted time, dense = 1")
        axes.set_xlim(0, 1.16)
        axes.invert_yaxis()
        return figure_svg(figure, "Predicted time by token count, relative to dense")


def figure_svg(figure: Figure, title: str) -> str:
    """The figure as SVG text, which takes its ink from the page; `title` names it for readers."""
    buffer = io.StringIO()
    # Without a date, and with ids made from the figure's name, the same report gives the same page.
    with rc_context({"svg.hashsalt": f"{title} {figure.get_figwidth()}"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _themed(buffer.getvalue(), title)


def _themed(svg: str, title: str) -> str:
    """Cut the XML prologue, let the page set size and ink, and name the figure for readers."""
    svg = svg[svg.index("<svg") :]
    # Two figures on one page must not share an id, and nothing refers to those of groups.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]+)"[^>]*>', _svg_tag(title), svg, count=1, flags=re.S)
    return svg.replace(INK, "currentColor").strip()


def _svg_tag(title: str) -> str:
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return rf'<svg {namespaces} viewBox="\1" role="img" aria-label="{title}">'

"""One self-contained HTML page of a profile, from the JSON that `hopsparse profile` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..units import time_text
from .figures import INK, NARROW, PALETTE, STYLE, WIDE, figure_svg

_ROOFLINE = "Roofline: operations on stored entries a second by operations a byte"
_TIMES = "Time of a call by subject"
_LONGEST = 28
_PERCENT = (
    ("SM active", "sm_active"),
    ("tensor pipe", "tensor"),
    ("DRAM", "dram"),
    ("L2", "l2"),
)


def render_profile(document: Mapping[str, Any]) -> str:
    """The HTML of one profile.

    Plots are inlined and there is no script: the file can be mailed.

    Args:
        document: What `hopsparse profile --json` prints.
    """
    environment = Environment(
        loader=PackageLoader(__package__ or "hopsparse.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["micros"] = lambda us: "" if us is None else time_text(us, "µ")
    environment.filters["number"] = lambda value, digits=0: (
        "" if value is None else f"{value:,.{digits}f}"
    )
    rows, ceilings = document["rows"], document["ceilings"]
    placed = [row for row in rows if row["kept_tflops"] and row["bytes"]]
    figures = {
        "roofline": [_roofline(placed, ceilings, width) for width in (WIDE, NARROW)]
        if placed
        else [],
        "times": [_times(rows, width) for width in (WIDE, NARROW)],
    }
    names = ", ".join(row["subject"] for row in rows[:4])
    return environment.get_template("profile.html.j2").render(
        document=document,
        rows=rows,
        phases=document["phases"],
        has_counters=any(row["kernels"] for row in rows),
        percent=_PERCENT,
        figures=figures,
        title=names if len(rows) <= 4 else f"{names} and {len(rows) - 4} more",
    )


def _roofline(
    rows: Sequence[Mapping[str, Any]], ceilings: Mapping[str, Any] | None, width: float
) -> str:
    """Points below the roofs of this card: memory, dense tensor cores, 2:4 tensor cores."""
    points = [(1e6 * row["kept_tflops"] * row["us"] / row["bytes"], row) for row in rows]
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 3.6 if width == WIDE else 3.2), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_yscale("log")
        low = min(0.5, min(x for x, _ in points) / 2)
        high = max(2000.0, 2 * max(x for x, _ in points))
        if ceilings is not None:
            _roofs(axes, ceilings, rows[0]["dtype"], (low, high))
        for index, (x, row) in enumerate(points):
            colour = PALETTE[index % len(PALETTE)]
            name, y = str(row["subject"]), row["kept_tflops"]
            axes.plot([x], [y], marker="o", linestyle="", color=colour, label=name)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        axes.set_xlim(low, high)
        axes.set_xlabel("operations a byte")
        axes.set_ylabel("TFLOP/s, stored entries")
        axes.grid(color=INK, alpha=0.15, linewidth=0.6)
        return figure_svg(figure, _ROOFLINE)


def _roofs(axes: Axes, ceilings: Mapping[str, Any], dtype: str, span: tuple[float, float]) -> None:
    low, high = span
    bandwidth = ceilings["read_tbps"]
    roofs = [("dense", ceilings["dense_tflops"].get(dtype))]
    sparse = ceilings["sparse_tflops"].get(dtype)
    roofs.append(("2:4", None if sparse is None else sparse / 2))
    for (name, roof), style in zip(roofs, ("-", "--"), strict=True):
        if roof is None:
            continue
        ridge = roof / bandwidth
        axes.plot([ridge, high], [roof, roof], color=INK, linestyle=style, linewidth=1)
        above = style == "-"
        place, side = roof * (1.08 if above else 0.92), "bottom" if above else "top"
        axes.text(high, place, f"{name} {roof:,.0f}", ha="right", va=side, fontsize=8)
    top = max(roof for _, roof in roofs if roof is not None) if any(r for _, r in roofs) else 1e3
    axes.plot([low, top / bandwidth], [low * bandwidth, top], color=INK, linewidth=1)
    axes.text(low * 1.1, low * bandwidth * 2.2, f"{bandwidth:.2f} TB/s", fontsize=8)


def _times(rows: Sequence[Mapping[str, Any]], width: float) -> str:
    times = [row["us"] if row["us"] is not None else row["ncu_us"] or 0.0 for row in rows]
    with rc_context(STYLE):
        figure = Figure(figsize=(width, 0.7 + 0.3 * len(rows)), layout="constrained")
        axes = figure.subplots()
        places = range(len(rows))
        colours = [PALETTE[index % len(PALETTE)] for index in places]
        axes.barh(list(places), times, 0.6, color=colours)
        for place, time_us in zip(places, times, strict=True):
            axes.text(time_us, place, f" {time_text(time_us, 'µ')}", va="center", fontsize=8)
        names = [str(row["subject"]) for row in rows]
        axes.set_yticks(
            list(places), [name if len(name) < 30 else name[:27] + "…" for name in names]
        )
        axes.set_xlim(0, 1.25 * (max(times) or 1.0))
        axes.set_xlabel("microseconds")
        axes.invert_yaxis()
        return figure_svg(figure, _TIMES)


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"

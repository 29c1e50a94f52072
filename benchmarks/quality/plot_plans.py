"""Draw measured quality against predicted decode speed: budgets, and one form for all layers.

    PYTHONPATH=src python benchmarks/quality/plot_plans.py --plans plans.jsonl \
        --uniform ablation.jsonl --recovered recovery.jsonl --out docs/assets/smollm2_pareto.svg

Perplexities are those of the anchors in the rows of `plans.py`, `anchors.py` and `recovery.py`;
speeds are in the rows of `plans.py`, predicted. The line is the front as it was predicted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from hopsparse.prune import Recipe
from hopsparse.report.figures import INK, PALETTE, STYLE, WIDE

WINDOWS = 64
HIGHEST = 1.8
STEPS = 150
# Labels closer than this in speed, and in perplexity, would cover each other.
NEAR, LINE = 0.25, 0.03
TICKS = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7)
TEXTS = {"a": ("book", "o"), "b": ("reference text", "s")}


def main() -> None:
    """Read rows, draw, write."""
    options = _options()
    plans = [json.loads(line) for line in options.plans.read_text().splitlines()]
    uniform = [json.loads(line) for line in options.uniform.read_text().splitlines()]
    recovered = [json.loads(line) for line in options.recovered.read_text().splitlines()]
    plain = {key: "#333333" if value == INK else value for key, value in STYLE.items()}
    with rc_context({**plain, "svg.hashsalt": "plans"}):
        figure = Figure(figsize=(WIDE, 0.55 * WIDE), layout="constrained", facecolor="white")
        axes = figure.subplots()
        _front(axes, plans[0]["pareto"])
        speeds = {p["label"]: p["gain"] for p in plans[0]["pareto"]["uniform"]}
        dense = plans[0]
        marks = [
            (speeds[form], row, f"all {form}", PALETTE[4])
            for row in uniform
            if (form := _form_of_default(row)) in speeds
        ]
        marks += [
            (
                speeds[row["options"]["form"]],
                row,
                f"{row['options']['form']}, recovered",
                PALETTE[2],
            )
            for row in recovered
            if _is_default_recovery(row)
        ]
        marks += [
            (row["pareto"]["chosen"]["gain"], row, f"budget {row['budget']:g}", PALETTE[1])
            for row in plans
        ]
        placed: list[tuple[float, float]] = []
        found = [
            (
                [row[f"ppl_{text}"] / dense[f"ppl_{text}_dense"] for text in TEXTS],
                gain,
                label,
                color,
            )
            for gain, row, label, color in marks
        ]
        for ratios, gain, label, color in sorted(found, key=lambda mark: max(mark[0])):
            _point(axes, gain, ratios, label, color, placed)
        _finish(axes, plans[0]["pareto"])
        figure.savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else {})


def _form_of_default(row: dict[str, Any]) -> str | None:
    """The form of all layers, if nothing else in the row differs from the defaults."""
    if row["method"] != "sparsegpt" or row["windows"] != WINDOWS or "start" in row:
        return None
    recipe = row["recipe"]
    plain = Recipe(recipe["pattern"]).to_json() | {"forms": recipe["forms"]}
    form = dict(recipe["forms"]).get("*", recipe["pattern"])
    return form if recipe == plain else None


def _is_default_recovery(row: dict[str, Any]) -> bool:
    """Trained from the default one-shot start, all else default too."""
    given = row["options"]
    plain = given["masks"] == "fixed" and not given["lora_rank"] and given["steps"] == STEPS
    return plain and row["start"] in ("default", given["form"]) and "note" not in row


def _front(axes: Axes, pareto: dict[str, Any]) -> None:
    points = [p for p in pareto["front"] if p["perplexity_ratio"] <= HIGHEST]
    axes.plot(
        [p["gain"] for p in points],
        [p["perplexity_ratio"] for p in points],
        "-",
        color=PALETTE[0],
        linewidth=1.2,
        label="mixed forms, predicted",
    )


def _point(
    axes: Axes,
    gain: float,
    ratios: list[float],
    label: str,
    color: str,
    placed: list[tuple[float, float]],
) -> None:
    """One mark a text, joined, with a label that keeps clear of those that are `placed`."""
    if min(ratios) > HIGHEST:
        return
    axes.plot([gain, gain], ratios, "-", color=color, linewidth=0.8)
    for ratio, (_, mark) in zip(ratios, TEXTS.values(), strict=True):
        axes.plot([gain], [ratio], mark, color=color, markersize=5)
    height = max(ratios)
    while any(abs(gain - x) < NEAR and abs(height - y) < LINE * height for x, y in placed):
        height *= 1 + LINE
    placed.append((gain, height))
    offset = {"xytext": (-6, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
    axes.annotate(label, (gain, height), color=color, ha="right", **offset)


def _finish(axes: Axes, pareto: dict[str, Any]) -> None:
    for name, mark in TEXTS.values():
        axes.plot([], [], mark, color="#555555", linestyle="", label=f"measured, {name}")
    axes.set_yscale("log")
    axes.set_ylim(0.985, HIGHEST)
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    where = f"{pareto['target'].upper()}, batch {pareto['batch']}, context {pareto['context']:,}"
    axes.set_xlabel(f"predicted decode speed at the limits of an {where}; dense 1")
    axes.set_ylabel("perplexity, dense = 1")
    axes.grid(alpha=0.2, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", fontsize=8)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--uniform", type=Path, required=True)
    parser.add_argument("--recovered", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""The training curves of `comm_convergence.py` as a plot: held-out loss by step, one seed.

    PYTHONPATH=src python benchmarks/comm_curves.py comm_convergence.jsonl curves.svg

Above, whole curves; below, the last half of them less dense's, where methods differ by less than a
line is wide. Dark ink on white, so that the file reads alike on every page. Needs the `report`
extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from hopsparse.files import written_whole
from hopsparse.measure import record
from hopsparse.report.figures import INK, PALETTE, STYLE, WIDE

#: What is drawn, and how it is called.
SHOWN = {
    "dense": "dense",
    "int4": "0.1 % and int4",
    "int3.5": "0.1 % and int3.5",
    "none": "0.1 % alone",
    "none without feedback": "0.1 % alone, no feedback",
    "powersgd 2": "PowerSGD rank 2",
}
_INK = "#333333"
Curve = list[tuple[int, float]]


def main() -> None:
    """Read, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    curves = curves_of(options.rows, options.seed)
    if "dense" not in curves:
        parser.error(f"{options.rows}: no row of dense with seed {options.seed}")
    style = {name: _INK if value == INK else value for name, value in STYLE.items()}
    style["svg.hashsalt"] = "comm_curves"  # the same rows give the same file
    with rc_context(style), written_whole(options.svg) as partial:
        drawn(curves).savefig(partial, format="svg", facecolor="white", metadata={"Date": None})


def curves_of(rows: Path, seed: int) -> dict[str, Curve]:
    """Step and loss of every look, by method."""
    own = [row for row in record.read(rows) if row["seed"] == seed and row["method"] in SHOWN]
    found = {row["method"]: [(step, loss) for step, loss in row["curve"]] for row in own}
    return {method: found[method] for method in SHOWN if method in found}


def drawn(curves: dict[str, Curve]) -> Figure:
    """Both panels."""
    figure = Figure(figsize=(WIDE, 5.2), layout="constrained")
    whole, apart = figure.subplots(2, 1)
    dense = dict(curves["dense"])
    last = max(dense)
    for (method, curve), colour in zip(curves.items(), PALETTE, strict=False):
        steps = [step for step, _ in curve]
        whole.plot(steps, [loss for _, loss in curve], color=colour, label=SHOWN[method])
        late = [(step, loss - dense[step]) for step, loss in curve if 2 * step >= last]
        apart.plot([step for step, _ in late], [more for _, more in late], color=colour)
    for axes, title in ((whole, "held-out loss"), (apart, "held-out loss less dense's")):
        axes.set_ylabel(title)
        axes.set_xlabel("step")
        axes.grid(axis="y", color=_INK, alpha=0.15, linewidth=0.6)
    whole.legend(frameon=False, ncols=2)
    return figure


if __name__ == "__main__":
    main()

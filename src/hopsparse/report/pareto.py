"""Quality against predicted speed: the plans of a Pareto front and every uniform form.

All numbers are predicted: perplexity from what each form costs each layer alone, speed from the
roofline model. Nothing here was built or timed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..files import written_whole
from ..models.budget import Problem, ratio_of
from ..plan import Front, Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Perplexities, dense = 1, at which a table names the best plan.
MILESTONES = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
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


@dataclass(frozen=True)
class ParetoPoint:
    """One plan.

    Attributes:
        label: `front`, `chosen`, or the uniform form.
        ratio: Predicted perplexity, dense = 1.
        gain: Dense over plan, by the objective: time, floor time, or bytes of weights.
        value: The objective of the whole step: microseconds, or bytes.
        weight_bytes: Stored weights, head included.
        shares: Layers by form.
    """

    label: str
    ratio: float
    gain: float
    value: float
    weight_bytes: int
    shares: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "label": self.label,
            "perplexity_ratio": self.ratio,
            "gain": self.gain,
            "value": self.value,
            "weight_bytes": self.weight_bytes,
            "layers_by_form": dict(self.shares),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> ParetoPoint:
        """Read what `to_json` wrote."""
        return cls(
            facts["label"],
            facts["perplexity_ratio"],
            facts["gain"],
            facts["value"],
            facts["weight_bytes"],
            facts["layers_by_form"],
        )


@dataclass(frozen=True)
class Pareto:
    """What a model can trade.

    Attributes:
        objective: `time`, `floor` or `bytes`.
        target: The GPU.
        batch: Sequences decoded at once.
        context: Tokens in the cache of each.
        scale: Log-perplexity increase a nat of summed cost.
        front: From the most careful plan to the fastest; each is the best of its own quality.
        uniform: One form for all layers that can take it.
        chosen: The plan that was made, if any.
        budget: Its budget, if any.
    """

    objective: str
    target: str
    batch: int
    context: int
    scale: float
    front: tuple[ParetoPoint, ...]
    uniform: tuple[ParetoPoint, ...]
    chosen: ParetoPoint | None = None
    budget: float | None = None

    def milestones(self, ratios: Sequence[float] = MILESTONES) -> list[ParetoPoint]:
        """The last plan of the front up to each of these perplexities, each plan once."""
        found: list[ParetoPoint] = []
        for limit in ratios:
            within = [point for point in self.front if point.ratio <= limit]
            if within and (not found or within[-1] is not found[-1]):
                found.append(within[-1])
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "objective": self.objective,
            "target": self.target,
            "batch": self.batch,
            "context": self.context,
            "scale": self.scale,
            "measured": False,
            "budget": self.budget,
            "chosen": self.chosen.to_json() if self.chosen else None,
            "front": [point.to_json() for point in self.front],
            "uniform": [point.to_json() for point in self.uniform],
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Pareto:
        """Read what `to_json` wrote."""
        return cls(
            objective=facts["objective"],
            target=facts["target"],
            batch=facts["batch"],
            context=facts["context"],
            scale=facts["scale"],
            front=tuple(map(ParetoPoint.from_json, facts["front"])),
            uniform=tuple(map(ParetoPoint.from_json, facts["uniform"])),
            chosen=ParetoPoint.from_json(facts["chosen"]) if facts["chosen"] else None,
            budget=facts["budget"],
        )


def pareto_of(
    problem: Problem, solution: Solution, *, scale: float = 1.0, budget: float | None = None
) -> Pareto:
    """The front of a solved problem, every uniform form, and the solution itself.

    Args:
        problem: Model, workload, target and objective.
        solution: What `solve_within` found for it.
        scale: The factor that it was solved with.
        budget: The budget that it was solved for.
    """
    uniform = [_point(problem, form, problem.uniform(form), scale) for form in problem.forms]
    return Pareto(
        objective=problem.objective,
        target=problem.target.name,
        batch=problem.workload.batch,
        context=problem.workload.context,
        scale=scale,
        front=tuple(_front(problem, solution.front, scale)),
        uniform=tuple(uniform),
        chosen=_point(problem, "chosen", solution.choice, scale),
        budget=budget,
    )


def share_text(shares: Mapping[str, int]) -> str:
    """How many layers got which form, the most frequent first.

    Example:
        >>> share_text({"dense": 1, "2:4+int8": 3})
        '75 % 2:4+int8, 25 % dense'
    """
    total = sum(shares.values())
    parts = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{100 * count / total:.0f} % {form}" for form, count in parts if count)


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


def _point(problem: Problem, label: str, forms: Mapping[str, str], scale: float) -> ParetoPoint:
    step = problem.step(forms)
    value = step.value(problem.objective)
    return ParetoPoint(
        label=label,
        ratio=ratio_of(problem.cost(forms), scale),
        gain=problem.dense.value(problem.objective) / value,
        value=value,
        weight_bytes=step.weight_bytes,
        shares=Counter(forms.values()),
    )


def _front(problem: Problem, front: Front, scale: float) -> list[ParetoPoint]:
    """The corners, from sums that are known: a step of the whole model for each would be slow."""
    forms = dict(front.start)
    shares = Counter(forms.values())
    first, start = front.points[0], problem.step(forms)
    in_bytes = problem.objective == "bytes"
    rest = start.value(problem.objective) - (first.bytes if in_bytes else first.time_us)
    rest_bytes = start.weight_bytes - first.bytes
    dense = problem.dense.value(problem.objective)
    points = []
    for point in front.points:
        if point.layer:
            shares[forms[point.layer]] -= 1
            shares[point.form] += 1
            forms[point.layer] = point.form
        value = rest + (point.bytes if in_bytes else point.time_us)
        points.append(
            ParetoPoint(
                label="front",
                ratio=ratio_of(point.cost, scale),
                gain=dense / value,
                value=value,
                weight_bytes=rest_bytes + point.bytes,
                shares=+shares,
            )
        )
    return points


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

"""Quality against predicted speed: the plans of a Pareto front and every uniform form.

All numbers are predicted: perplexity from what each form costs each layer alone, speed from the
roofline model. Nothing here was built or timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan import Front, Solution
from .budget import Problem, ratio_of

#: Perplexities, dense = 1, at which a table names the best plan.
MILESTONES = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0)


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

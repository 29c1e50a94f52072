"""From measured costs and predicted times to the fastest plan within a quality budget.

A plan's predicted log-perplexity increase is `scale` times the summed costs of its forms. Costs are
of one layer at a time; `scale` says how they compound, and is fitted to plans that were built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import ArgumentError, UnsupportedError
from ..measure import DecodeStep, PartCost, Workload, decode_step, layer_cost
from ..plan import OBJECTIVES, ModelPlan, Option, Solution, Target, solve
from .sensitivity import Sensitivity

TOLERANCE = 0.1
_AIM = 1 - TOLERANCE / 2
# A measured increase outside of this range of the goal says no more than its nearer end.
_LEAST, _MOST = 1 / 16, 64.0
_EXPONENTS = (0.5, 3.0)

Build = Callable[[ModelPlan], float]


@dataclass(frozen=True)
class Problem:
    """What a plan is made for.

    Attributes:
        sensitivity: What each form costs each layer.
        workload: Batch and context of a decode step.
        target: The GPU.
        objective: `time`, `floor` or `bytes`.
        model: The model, as the user named it.

    Raises:
        ArgumentError: Another objective.
    """

    sensitivity: Sensitivity
    workload: Workload
    target: Target
    objective: str = "time"
    model: str = ""

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ArgumentError(
                f"objective {self.objective!r}", need="one of " + ", ".join(OBJECTIVES), hint="time"
            )

    @cached_property
    def options(self) -> dict[str, list[Option]]:
        """The options of each layer, timed by their floor if that is the objective."""
        known: dict[tuple[tuple[int, int], str], PartCost] = {}
        found: dict[str, list[Option]] = {}
        for name, layer in self.sensitivity.layers.items():
            found[name] = []
            for form, cost in layer.costs.items():
                key = layer.shape, form
                if key not in known:
                    dtype = self.sensitivity.decoder.dtype
                    known[key] = layer_cost(*key, self.workload.batch, self.target, dtype)
                part = known[key]
                time_us = part.floor_us if self.objective == "floor" else part.time_us
                found[name].append(Option(form, time_us, part.bytes, cost))
        return found

    @cached_property
    def dense(self) -> DecodeStep:
        """A decode step of the dense model."""
        return self.step({})

    def step(self, forms: Mapping[str, str]) -> DecodeStep:
        """A decode step with these forms; a layer that is not named is dense."""
        return decode_step(self.sensitivity.decoder, forms, self.workload, self.target)

    def cost(self, forms: Mapping[str, str]) -> float:
        """Summed costs of these forms, in nats a token.

        Raises:
            ArgumentError: A form whose cost was not measured.
        """
        layers = self.sensitivity.layers
        for name, form in forms.items():
            if name not in layers or form not in layers[name].costs:
                raise ArgumentError(
                    f"layer {name} as {form}, whose cost was not measured",
                    need="layers and forms of the measurement",
                    hint=f"--forms with {form}",
                )
        return math.fsum(layers[name].costs[form] for name, form in forms.items())

    def uniform(self, form: str) -> dict[str, str]:
        """One form for every layer that can take it, and the cheapest one for the rest."""
        layers = self.sensitivity.layers.items()
        return {
            name: form if form in layer.costs else min(layer.costs, key=lambda f: layer.costs[f])
            for name, layer in layers
        }

    @property
    def forms(self) -> tuple[str, ...]:
        """All measured forms, in the order in which they appear."""
        layers = self.sensitivity.layers.values()
        return tuple(dict.fromkeys(form for layer in layers for form in layer.costs))


def solve_within(problem: Problem, budget: float, scale: float = 1.0) -> tuple[ModelPlan, Solution]:
    """The best plan whose predicted perplexity is at most `budget` times the dense model's.

    Args:
        problem: Model, workload, target and objective.
        budget: At least 1.
        scale: Log-perplexity increase a nat of summed cost.

    Raises:
        ArgumentError: A budget below 1, or a scale that is not positive.
        UnsupportedError: No plan of these forms is predicted to meet it; it says the best.
    """
    _check(budget, scale)
    minimise = "bytes" if problem.objective == "bytes" else "time_us"
    try:
        solution = solve(problem.options, math.log(budget) / scale, minimise=minimise)
    except UnsupportedError as error:
        least = sum(min(o.cost for o in options) for options in problem.options.values())
        best = ratio_of(least, scale)
        raise UnsupportedError(
            f"a budget of {budget:g} times the dense perplexity; the best that these forms are "
            f"predicted to reach is {best:.4g}: {error.got}",
            need=f"a budget of at least {best:.4g}",
            hint="dense among the forms, or a larger budget",
        ) from None
    return as_plan(problem, solution.choice, budget, scale, solution.gap), solution


def as_plan(
    problem: Problem,
    forms: Mapping[str, str],
    budget: float | None,
    scale: float = 1.0,
    gap: float | None = None,
) -> ModelPlan:
    """These forms as a plan, with what is predicted of it."""
    cost, step, dense = problem.cost(forms), problem.step(forms), problem.dense
    predicted = {
        "perplexity_ratio": ratio_of(cost, scale),
        "speedup": dense.time_us / step.time_us,
        "floor_speedup": dense.floor_us / step.floor_us,
        "time_us": step.time_us,
        "dense_time_us": dense.time_us,
        "floor_us": step.floor_us,
        "dense_floor_us": dense.floor_us,
        "weight_bytes": step.weight_bytes,
        "dense_weight_bytes": dense.weight_bytes,
        "cost_nats": cost,
        "cost_scale": scale,
    }
    if gap is not None:
        predicted["gap_to_bound"] = gap
    return ModelPlan(
        layers=dict(forms),
        model=problem.model,
        target=problem.target.name,
        batch=problem.workload.batch,
        context=problem.workload.context,
        objective=problem.objective,
        budget=budget,
        predicted=predicted,
    )


def ratio_of(cost: float, scale: float) -> float:
    """Predicted perplexity as a multiple of the dense model's; what overflows is 1e304."""
    return math.exp(min(cost * scale, 700.0))


@dataclass(frozen=True)
class Round:
    """A plan that was built.

    Attributes:
        plan: The plan.
        cost: Its summed costs, in nats a token.
        scale: The factor that it was made with.
        ratio: Measured perplexity as a multiple of the dense model's.
    """

    plan: ModelPlan
    cost: float
    scale: float
    ratio: float


@dataclass(frozen=True)
class Outcome:
    """The best plan that met its budget when it was built.

    Attributes:
        plan: The plan; its predicted numbers hold `measured_ratio` too.
        rounds: Every plan that was built, in order.
        scale: The factor as all rounds together say it.
    """

    plan: ModelPlan
    rounds: tuple[Round, ...]
    scale: float


def fit_scale(points: Sequence[tuple[float, float]], goal: float) -> float:
    """The factor from summed costs to log-perplexity increase, where the increase is `goal`.

    Increases grow as a power of the cost, through the two measured points around the goal (or, if
    all are on one side, nearest to it); the power is kept between 0.5 and 3. One point alone scales
    in proportion.

    Args:
        points: Summed cost and measured log-perplexity increase of plans that were built. Costs are
            positive; an increase that is not finite counts as very large.
        goal: Positive.

    Raises:
        ArgumentError: No point with a positive cost, or a goal that is not positive.

    Example:
        >>> fit_scale([(0.1, 0.2)], 0.4)
        2.0
        >>> round(fit_scale([(0.1, 0.1), (0.2, 0.4)], 0.2), 4)  # a square: 0.2 is met at 0.1414
        1.4142
    """
    usable = [(cost, _bounded(rise, goal)) for cost, rise in points if cost > 0]
    if not usable or not goal > 0:
        raise ArgumentError(
            f"{len(usable)} usable points for a goal of {goal}",
            need="a plan with a positive cost, and a positive goal",
            hint="a budget above 1",
        )
    near = sorted(usable, key=lambda point: abs(math.log(point[1] / goal)))
    cost, rise = near[0]
    other = next((p for p in near[1:] if (p[1] > goal) != (rise > goal)), None)
    around = other is not None
    other = other or (near[1] if len(near) > 1 else None)
    if other is None or other[0] == cost:
        return rise / cost
    power = math.log(other[1] / rise) / math.log(other[0] / cost)
    power = min(max(power, _EXPONENTS[0]), _EXPONENTS[1])
    meets = cost * math.exp(math.log(goal / rise) / power)
    low, high = sorted((cost, other[0]))
    if around and not low <= meets <= high:
        meets = math.sqrt(low * high)
    return goal / meets


def meet_budget(
    problem: Problem,
    build: Build,
    budget: float,
    *,
    rounds: int = 3,
    scale: float = 1.0,
) -> Outcome:
    """Solve, build, measure and correct, until a plan is within the budget and within 10 % of it.

    Args:
        problem: Model, workload, target and objective.
        build: Makes what a plan says and returns its perplexity on held-out text, as a multiple of
            the dense model's. That text is part of the calibration, never of an evaluation.
        budget: Allowed perplexity as such a multiple; above 1.
        rounds: Plans that are built, at most.
        scale: The factor to begin with.

    Returns:
        Of the plans that met the budget, the one that the objective likes best.

    Raises:
        ArgumentError: A budget of 1 or less, no rounds, or a scale that is not positive.
        UnsupportedError: No plan that was built met the budget, or none is predicted to; it says
            the best that was reached.
    """
    _check(budget, scale)
    if budget == 1 or rounds < 1:
        raise ArgumentError(
            f"budget {budget:g}, {rounds} rounds",
            need="a budget above 1, and at least one round",
            hint="1.05, 3",
        )
    goal = math.log(budget)
    built: list[Round] = []
    limit = goal / scale
    for _ in range(rounds):
        try:
            plan, solution = _next_plan(problem, budget, limit, built)
        except UnsupportedError:
            if not built:
                raise
            # No form is careful enough: what was built says more than what is predicted.
            break
        if any(plan.layers == earlier.plan.layers for earlier in built):
            break
        # Nothing is pruned: there is nothing to build, and nothing to lose.
        dense = set(plan.layers.values()) == {"dense"}
        built.append(Round(plan, solution.cost, goal / limit, 1.0 if dense else build(plan)))
        rise = _log(built[-1].ratio)
        fastest = solution.step == 0.0
        if rise <= goal and (fastest or rise >= (1 - TOLERANCE) * goal):
            break
        points = [(each.cost, _log(each.ratio)) for each in built]
        if not any(cost > 0 for cost, _ in points):
            break
        limit = _AIM * goal / fit_scale(points, _AIM * goal)
    return _outcome(problem, built, budget)


def _next_plan(
    problem: Problem, budget: float, limit: float, built: Sequence[Round]
) -> tuple[ModelPlan, Solution]:
    """The best plan of this summed cost, but cheaper than those that were too much already."""
    failed = [each.cost for each in built if each.ratio > budget or math.isnan(each.ratio)]
    if failed and limit >= min(failed):
        limit = min(failed) * (1 - 1e-9)
    return solve_within(problem, budget, math.log(budget) / limit)


def _outcome(problem: Problem, built: Sequence[Round], budget: float) -> Outcome:
    met = [each for each in built if each.ratio <= budget]
    if not met:
        best = min(built, key=lambda each: _log(each.ratio))
        raise UnsupportedError(
            f"a budget of {budget:g} times the dense perplexity; the best of {len(built)} plans "
            f"that were built has {best.ratio:.4g}, {best.plan.predicted['speedup']:.2f} x as fast "
            f"as dense",
            need=f"a budget of at least {best.ratio:.4g} for that plan",
            hint="more rounds, more careful forms, or more calibration windows",
        )
    best = min(met, key=lambda each: problem.step(each.plan.layers).value(problem.objective))
    points = [(each.cost, _log(each.ratio)) for each in built]
    known = any(cost > 0 for cost, _ in points)
    scale = fit_scale(points, math.log(budget)) if known else best.scale
    predicted = {**best.plan.predicted, "measured_ratio": best.ratio}
    return Outcome(replace(best.plan, predicted=predicted), tuple(built), scale)


def _log(ratio: float) -> float:
    if math.isnan(ratio) or ratio == math.inf:
        return math.inf
    return math.log(ratio) if ratio > 0 else -math.inf


def _bounded(rise: float, goal: float) -> float:
    return min(max(rise, _LEAST * goal), _MOST * goal)


def _check(budget: float, scale: float) -> None:
    if not (math.isfinite(budget) and budget >= 1):
        raise ArgumentError(
            f"budget {budget}",
            need="perplexity as a multiple of the dense model's, at least 1",
            hint="--quality-budget 1.05",
        )
    if not (math.isfinite(scale) and scale > 0):
        raise ArgumentError(f"scale {scale}", need="a positive number", hint="1")

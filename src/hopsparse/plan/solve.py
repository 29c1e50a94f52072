"""Which option each layer gets: the multiple-choice knapsack by the layers' convex hulls.

Every layer takes exactly one option; the summed cost stays within a budget; the summed value (time
or bytes) is to be small. Walking down the lower convex hulls of all layers, steepest step first,
gives the optimum of the linear relaxation at every budget (P. Sinha and A. Zoltners, The
Multiple-Choice Knapsack Problem, Operations Research 27, 1979). It splits at most one step, so
leaving that step out gives a whole plan that is off the relaxation by less than that step, and
each point between two steps is the best plan of its own cost. What the budget then has left is
filled and exchanged option by option. Nothing is drawn at random; ties go to fewer bytes, then to
the name that sorts first.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, UnsupportedError

_MINIMISED = ("time_us", "bytes")


@dataclass(frozen=True)
class Option:
    """One form that a layer may take.

    Attributes:
        form: Its text, such as `2:4+int8`.
        time_us: Time of the layer in this form.
        bytes: Bytes of its weight.
        cost: What it costs in quality; at least 0, and sums over layers.
    """

    form: str
    time_us: float
    bytes: int
    cost: float


@dataclass(frozen=True)
class Point:
    """A plan on the Pareto front, as the change from the point before it.

    Attributes:
        cost: Summed cost.
        time_us: Summed time.
        bytes: Summed bytes.
        layer: The layer that changed; empty at the first point.
        form: What it became.
    """

    cost: float
    time_us: float
    bytes: int
    layer: str = ""
    form: str = ""


@dataclass(frozen=True)
class Front:
    """The plans at the corners of the relaxation: each is the best of its own cost.

    Attributes:
        start: Form of each layer at the first point.
        points: From the least cost to the least value; costs rise and values fall.
    """

    start: Mapping[str, str]
    points: tuple[Point, ...]

    def choice(self, index: int) -> dict[str, str]:
        """The form of every layer at point `index`, from 0."""
        forms = dict(self.start)
        for point in self.points[1 : index + 1]:
            forms[point.layer] = point.form
        return forms


@dataclass(frozen=True)
class Solution:
    """One option a layer, within the budget.

    Attributes:
        choice: Form of each layer.
        cost: Summed cost, at most the budget.
        time_us: Summed time.
        bytes: Summed bytes.
        value: What was minimised: the time or the bytes.
        bound: No choice within the budget has a smaller value.
        step: Value of the one step that the relaxation splits: before filling, `value - bound` was
            less than this.
        front: All plans at the corners of the relaxation, whatever the budget.
    """

    choice: Mapping[str, str]
    cost: float
    time_us: float
    bytes: int
    value: float
    bound: float
    step: float
    front: Front

    @property
    def gap(self) -> float:
        """How far the value is above the bound, as a part of the bound."""
        return self.value / self.bound - 1 if self.bound > 0 else 0.0


def solve(
    layers: Mapping[str, Sequence[Option]], budget: float, *, minimise: str = "time_us"
) -> Solution:
    """Choose an option for each layer such that the summed cost stays within `budget`.

    Args:
        layers: The options of each layer; at least one each.
        budget: Limit of the summed cost.
        minimise: `time_us` or `bytes`.

    Raises:
        ArgumentError: No layers, a layer without options, a number that is negative or not finite,
            or a form named twice.
        UnsupportedError: Even the least cost of every layer sums to more than the budget.

    Example:
        >>> dense, sparse = Option("dense", 10.0, 100, 0.0), Option("2:4", 6.0, 56, 0.02)
        >>> found = solve({"a": [dense, sparse], "b": [dense, sparse]}, 0.03)
        >>> dict(found.choice), found.time_us, found.bound
        ({'a': '2:4', 'b': 'dense'}, 16.0, 14.0)
    """
    if minimise not in _MINIMISED:
        raise ArgumentError(
            f"minimise={minimise!r}", need="one of " + ", ".join(_MINIMISED), hint="time_us"
        )
    _check(layers, budget)
    hulls = {name: _hull(layers[name], minimise) for name in sorted(layers)}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    least = math.fsum(option.cost for option in chosen.values())
    if least > budget:
        raise _out_of_reach(chosen, least, budget)
    steps = _steps(hulls, minimise)
    front = _front(chosen, steps)
    bound, step = _walk(chosen, steps, budget, minimise)
    _fill(chosen, layers, budget, minimise)
    while _exchange(chosen, layers, budget, minimise):
        _fill(chosen, layers, budget, minimise)
    value = _sum(chosen, minimise)
    return Solution(
        choice={name: chosen[name].form for name in layers},
        cost=_sum(chosen, "cost"),
        time_us=_sum(chosen, "time_us"),
        bytes=sum(option.bytes for option in chosen.values()),
        value=value,
        # Both are rounded sums of the same numbers; the bound may not pass what was found.
        bound=min(bound, value),
        step=step,
        front=front,
    )


@dataclass(frozen=True)
class _Step:
    """From one corner of a layer's hull to the next."""

    name: str
    old: Option
    new: Option
    gain: float
    cost: float

    @property
    def order(self) -> tuple[float, int, str]:
        """Steepest first; then what frees more bytes; then by name."""
        return (-self.gain / self.cost, self.new.bytes - self.old.bytes, self.name)


def _value(option: Option, minimise: str) -> float:
    return float(getattr(option, minimise))


def _sum(chosen: Mapping[str, Option], what: str) -> float:
    return math.fsum(_value(option, what) for option in chosen.values())


def _hull(options: Sequence[Option], minimise: str) -> list[Option]:
    """The lower left convex hull of a layer's options, from the least cost on."""
    hull: list[Option] = []
    for option in sorted(
        options, key=lambda o: (o.cost, _value(o, minimise), o.bytes, o.time_us, o.form)
    ):
        if hull and _value(option, minimise) >= _value(hull[-1], minimise):
            continue
        while len(hull) > 1 and not _turns(hull[-2], hull[-1], option, minimise):
            hull.pop()
        hull.append(option)
    return hull


def _turns(a: Option, b: Option, c: Option, minimise: str) -> bool:
    """Whether the step a to b is steeper than b to c, by the numbers that order the steps."""

    def slope(old: Option, new: Option) -> float:
        return (_value(old, minimise) - _value(new, minimise)) / (new.cost - old.cost)

    return slope(a, b) > slope(b, c)


def _steps(hulls: Mapping[str, list[Option]], minimise: str) -> list[_Step]:
    """All steps of all layers, steepest first; those of one layer stay in their order."""
    steps = [
        _Step(name, old, new, _value(old, minimise) - _value(new, minimise), new.cost - old.cost)
        for name, hull in hulls.items()
        for old, new in itertools.pairwise(hull)
    ]
    return sorted(steps, key=lambda step: step.order)


def _front(start: Mapping[str, Option], steps: Sequence[_Step]) -> Front:
    chosen = dict(start)
    size = sum(option.bytes for option in chosen.values())
    points = [Point(_sum(chosen, "cost"), _sum(chosen, "time_us"), size)]
    for step in steps:
        chosen[step.name] = step.new
        size += step.new.bytes - step.old.bytes
        cost, time_us = _sum(chosen, "cost"), _sum(chosen, "time_us")
        points.append(Point(cost, time_us, size, step.name, step.new.form))
    return Front({name: option.form for name, option in start.items()}, tuple(points))


def _walk(
    chosen: dict[str, Option], steps: Sequence[_Step], budget: float, minimise: str
) -> tuple[float, float]:
    """Take steps while they fit; return the bound of the relaxation and the step it splits."""
    for step in steps:
        if not _fits(chosen, {step.name: step.new}, budget):
            room = max(0.0, budget - _sum(chosen, "cost"))
            part = min(1.0, room / step.cost)
            return _sum(chosen, minimise) - part * step.gain, step.gain
        chosen[step.name] = step.new
    return _sum(chosen, minimise), 0.0


def _fits(chosen: Mapping[str, Option], changes: Mapping[str, Option], budget: float) -> bool:
    # Exactly rounded sums: a plan never passes the budget by the rounding of running totals.
    return math.fsum({**chosen, **changes}[name].cost for name in chosen) <= budget


@dataclass(frozen=True)
class _Move:
    """One layer taking another option; a negative gain makes it more careful."""

    name: str
    option: Option
    gain: float
    cost: float

    @property
    def order(self) -> tuple[float, int, str, str]:
        """Largest gain first; then fewer bytes; then by name."""
        return (-self.gain, self.option.bytes, self.name, self.option.form)


def _moves(
    chosen: Mapping[str, Option], layers: Mapping[str, Sequence[Option]], minimise: str
) -> list[_Move]:
    return sorted(
        (
            _Move(
                name,
                option,
                _value(chosen[name], minimise) - _value(option, minimise),
                option.cost - chosen[name].cost,
            )
            for name, options in layers.items()
            for option in options
            if option is not chosen[name]
        ),
        key=lambda move: move.order,
    )


def _room(chosen: Mapping[str, Option], budget: float) -> float:
    """What is left, and a little more than rounding can take; `_fits` decides."""
    return budget - _sum(chosen, "cost") + 1e-12 * abs(budget)


def _fill(
    chosen: dict[str, Option],
    layers: Mapping[str, Sequence[Option]],
    budget: float,
    minimise: str,
) -> None:
    """Give single layers better options while any fits, the largest gain first."""
    while True:
        room = _room(chosen, budget)
        fitting = (
            move
            for move in _moves(chosen, layers, minimise)
            if move.gain > 0 and move.cost <= room
            if _fits(chosen, {move.name: move.option}, budget)
        )
        move = next(fitting, None)
        if move is None:
            return
        chosen[move.name] = move.option


def _exchange(
    chosen: dict[str, Option],
    layers: Mapping[str, Sequence[Option]],
    budget: float,
    minimise: str,
) -> bool:
    """Make one layer more careful and spend what that frees on another, if the sum gains."""
    moves = _moves(chosen, layers, minimise)
    ups = sorted((m for m in moves if m.gain > 0), key=lambda m: (m.cost, *m.order))
    prices, leaders = [m.cost for m in ups], _leaders(ups)
    room, before = _room(chosen, budget), _sum(chosen, minimise)
    found: list[tuple[float, _Move, _Move]] = []
    for down in (m for m in moves if m.gain <= 0 and m.cost < 0):
        affordable = bisect.bisect_right(prices, room - down.cost)
        if not affordable:
            continue
        up = next((m for m in leaders[affordable - 1] if m.name != down.name), None)
        if up is not None and up.gain + down.gain > 0:
            found.append((up.gain + down.gain, down, up))
    found.sort(key=lambda pair: (-pair[0], pair[1].order, pair[2].order))
    for _, down, up in found:
        changes = {down.name: down.option, up.name: up.option}
        gains = _sum({**chosen, **changes}, minimise) < before
        if gains and _fits(chosen, changes, budget):
            chosen.update(changes)
            return True
    return False


def _leaders(ups: Sequence[_Move]) -> list[list[_Move]]:
    """For each prefix of `ups` its largest gain, and the largest of another layer."""
    leaders: list[list[_Move]] = []
    first: _Move | None = None
    second: _Move | None = None
    for move in ups:
        if first is None or move.order < first.order:
            if first is not None and first.name != move.name:
                second = first
            first = move
        elif move.name != first.name and (second is None or move.order < second.order):
            second = move
        leaders.append([first] if second is None else [first, second])
    return leaders


def _check(layers: Mapping[str, Sequence[Option]], budget: float) -> None:
    if not layers:
        raise ArgumentError("no layers", need="at least one layer", hint="fewer layers to keep")
    if not math.isfinite(budget):
        raise ArgumentError(f"budget {budget}", need="a finite number", hint="0.05")
    for name, options in layers.items():
        forms = [option.form for option in options]
        if not forms or len(set(forms)) < len(forms):
            raise ArgumentError(
                f"layer {name} with the options {', '.join(forms) or 'none'}",
                need="at least one option, each form once",
                hint="dense",
            )
        for option in options:
            for what in ("cost", "time_us", "bytes"):
                number = _value(option, what)
                if not (math.isfinite(number) and number >= 0):
                    raise ArgumentError(
                        f"layer {name}, form {option.form}: {what} {number}",
                        need="a finite number of at least 0",
                        hint="leave the form out",
                    )


def _out_of_reach(chosen: Mapping[str, Option], least: float, budget: float) -> UnsupportedError:
    name = max(sorted(chosen), key=lambda layer: chosen[layer].cost)
    worst = chosen[name]
    return UnsupportedError(
        f"a budget of {budget:.6g}, where the most careful form of every layer costs {least:.6g} "
        f"together, most of it {name} as {worst.form} with {worst.cost:.6g}",
        need=f"a budget of at least {least:.6g}, the best that these forms reach",
        hint="more forms to choose from, such as dense",
    )

"""A small tuning problem in numpy: ways to multiply, of which one is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hopsparse.measure.timing import Timing
from hopsparse.tune import Key, Machine, Steps

Array = np.ndarray
KEY = Key(
    "product", "kernel-text", "24x40 float64, tokens 1-16", Machine("NVIDIA H200", 132, "580")
)


def whole(w: Array, x: Array) -> Array:
    return x @ w.T


def by_rows(w: Array, x: Array) -> Array:
    return np.stack([x @ row for row in w], axis=1)


def by_columns(w: Array, x: Array) -> Array:
    return sum(np.outer(x[:, i], w[:, i]) for i in range(w.shape[1]))


def without_last_column(w: Array, x: Array) -> Array:
    return x[:, :-1] @ w[:, :-1].T


def broken(w: Array, x: Array) -> Array:
    raise RuntimeError("no such instruction")


@dataclass(frozen=True)
class Way:
    """A way to multiply; `us` orders them where a test wants to know the winner."""

    run: Callable[[Array, Array], Array]
    us: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Ready:
    """A way with its inputs."""

    way: Way
    w: Array
    x: Array

    def __call__(self) -> Array:
        return self.way.run(self.w, self.x)


WAYS: dict[str, Way] = {
    "whole": Way(whole, 3.0),
    "rows": Way(by_rows, 2.0),
    "columns": Way(by_columns, 5.0),
    "wrong": Way(without_last_column, 1.0),
    "broken": Way(broken, 1.0),
    "uncompiled": Way(whole, 1.0, "CompileError: oops"),
}


@dataclass
class Numpy:
    """The steps of these products, and what was asked of them.

    Args:
        drift: What times are multiplied by, heat by heat; None times by the clock.
    """

    drift: Sequence[float] | None = (1.0,) * 20
    compiled: list[str] = field(default_factory=list)
    heats: list[list[str]] = field(default_factory=list)
    verified: int = 0

    def steps(self) -> Steps[Way, Ready]:
        rng = np.random.default_rng(0)
        w, x = rng.standard_normal((24, 40)), rng.standard_normal((5, 40))
        exact = (x.astype(np.longdouble) @ w.astype(np.longdouble).T).astype(float)
        # k roundings of the sum of absolute products (Higham, section 3.1), twice over.
        bound = 2 * 40 * np.finfo(float).eps * (np.abs(x) @ np.abs(w).T)

        def compile_(ways: Sequence[Way]) -> Generator[tuple[Way, str], None, None]:
            for way in ways:
                self.compiled.append(way.run.__name__)
                yield way, way.error

        def verify(run: Ready) -> float:
            self.verified += 1
            return float((np.abs(run() - exact) / bound).max())

        def prepare(way: Way) -> Ready:
            return Ready(way, w, x)

        return Steps(compile_, prepare, verify, self.time)

    def time(self, ready: Mapping[str, Ready], seconds: float) -> list[Timing]:
        self.heats.append(list(ready))
        if self.drift is None:
            return [
                Timing(name, tuple(_clock(run) for _ in range(5))) for name, run in ready.items()
            ]
        factor = self.drift[len(self.heats) - 1]
        return [
            Timing(name, tuple(run.way.us * factor * each for each in (0.9, 1.0, 1.2)))
            for name, run in ready.items()
        ]


def _clock(run: Ready) -> float:
    started = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - started)

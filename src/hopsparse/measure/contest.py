"""A 2:4 layer computed in several ways: prepared, checked against float64, and timed together.

A wrong result is never timed. Weights are random, and each call of a way works on its own copy;
x is one tensor for all, as the layer before has just written it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import GpuLostError
from .clock import Contender, Timing, gpu, host_time, ratio, time_side_by_side
from .fault import named, wait_for
from .peers import Product
from .power import Sampler
from .reference import Reference as Reference
from .reference import cold_weights as cold_weights
from .reference import first_and_last as first_and_last
from .reference import largest_excess as largest_excess
from .reference import random_24 as random_24
from .suite import Problem

# Of a weight and a bias: tensors, or what `hopsparse.measure.codes` has in their place.
Prepare = Callable[[Any, Tensor | None], Callable[[Any], Tensor]]


@dataclass(frozen=True)
class Way:
    """One way to compute a layer.

    Attributes:
        name: How tables call it.
        prepare: Makes the product of x [tokens, k] from a 2:4 weight [out, k] and a bias.
        describe: Says what runs for a prepared product and an x; called once, after a first call.
        sums: Of 8 bits, how they are taken, which decides what it is held to: `exact`, `promoted`
            or `fast`.
        roundings: Of 8 bits, how often a result is rounded to its dtype.
    """

    name: str
    prepare: Prepare
    describe: Callable[[Any, Any], str]
    sums: str = ""
    roundings: int = 1

    @classmethod
    def of(cls, peer: Any) -> Way:
        """A peer as a way; see `hopsparse.measure.peers` for its shape.

        Example:
            >>> from hopsparse.measure.peers import CuBLAS
            >>> Way.of(CuBLAS).name
            'cublas'
        """
        return cls(peer.NAME, peer.prepare, peer.describe)


@dataclass(frozen=True)
class Result:
    """What one way did.

    Attributes:
        timing: Its samples, or why there are none.
        excess: Largest error as a part of the derived bound; None where nothing was computed.
        plan: What ran, as the way describes it.
    """

    timing: Timing
    excess: float | None = None
    plan: str = ""


@dataclass(frozen=True)
class Contest:
    """The results of one problem, and the state that the GPU was in meanwhile.

    Attributes:
        results: One for each way, in their order.
        copies: Weights that were rotated.
        watts: Mean power over all of the timing, or None.
        sm_mhz: Median clock, or None.
        celsius: Highest temperature, or None.
        limits: What held clocks down, or None.
    """

    results: tuple[Result, ...]
    copies: int
    watts: float | None
    sm_mhz: float | None
    celsius: float | None
    limits: tuple[str, ...] | None


def as_rows(problem: Problem, contest: Contest) -> list[dict[str, Any]]:
    """What a contest found, one flat row of JSON values for each way.

    `us` is the median of one call, `q1_us` and `q3_us` its quartiles; `tflops` counts the dense
    product. `ratio` is the time of the way over that of the first way, `ratio_low` and
    `ratio_high` its interval. Clock and power are of the whole contest, as its ways take turns.
    """
    shared = {
        **asdict(problem),
        "copies": contest.copies,
        "watts": contest.watts,
        "sm_mhz": contest.sm_mhz,
        "celsius": contest.celsius,
        "limits": None if contest.limits is None else list(contest.limits),
    }
    first = contest.results[0].timing
    return [
        {**shared, **_row(problem, result), **_ratio(result.timing, first)}
        for result in contest.results
    ]


def _ratio(timing: Timing, first: Timing) -> dict[str, float | None]:
    known = timing.samples_us and first.samples_us
    found = ratio(timing, first) if known else None
    return {
        "ratio": found.value if found else None,
        "ratio_low": found.low if found else None,
        "ratio_high": found.high if found else None,
    }


def _row(problem: Problem, result: Result) -> dict[str, Any]:
    timing = result.timing
    low, high = timing.quartiles_us
    known = bool(timing.samples_us)
    finite = result.excess is not None and math.isfinite(result.excess)
    return {
        "contender": timing.name,
        "plan": result.plan,
        "us": timing.us if known else None,
        "q1_us": low if known else None,
        "q3_us": high if known else None,
        "tflops": problem.flops / timing.us / 1e6 if known else None,
        "samples": len(timing.samples_us),
        "calls_per_sample": timing.calls_per_sample,
        "excess": result.excess if finite else None,
        "error": timing.error,
    }


@dataclass
class Layer:
    """The copies of one random 2:4 layer, prepared in every way.

    Attributes:
        ways: The contenders; ratios are to the first.
        weights: [out, k] each, zeros in place.
        products: By way: one product a copy, or the reason why it cannot be prepared.
    """

    ways: Sequence[Way]
    weights: list[Any]
    products: list[list[Product] | str] = field(default_factory=list)

    @classmethod
    def random(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        ways: Sequence[Way],
        *,
        device: torch.device | int | None = None,
        seed: int = 0,
    ) -> Layer:
        """Draw weights, as many as it takes to defeat the L2 cache, and prepare them.

        Args:
            shape: [out, k], k in whole groups of 4.
            dtype: bfloat16 or float16.
            ways: The contenders.
            device: GPU; the current one if left out.
            seed: Of the weights.

        Raises:
            UnsupportedError: There is no GPU.
            GpuLostError: A kernel of a way failed; it names the way.
        """
        where = gpu(device)
        generator = torch.Generator(where).manual_seed(seed)
        layer = cls(ways, cold_weights(shape, dtype, generator))
        layer.products = [prepared(way, layer.weights) for way in ways]
        return layer

    def contest(self, tokens: int, *, seed: int = 1, **timing: Any) -> Contest:
        """Check every way on random x [tokens, k], and time those that are right.

        Args:
            tokens: Rows of x.
            seed: Of x.
            timing: Options of `time_side_by_side`.

        Raises:
            GpuLostError: A kernel of a way failed; it names the way. Nothing more can be measured.
        """
        results, running = self.checked(tokens, seed=seed)
        with torch.no_grad(), Sampler(self.device) as seen:
            timings = time_side_by_side(list(running.values()), device=self.device, **timing)
        for index, found in zip(running, timings, strict=True):
            results[index] = replace(results[index], timing=found)
        return Contest(
            tuple(results), len(self.weights), seen.watts, seen.sm_mhz, seen.celsius, seen.limits
        )

    def checked(self, tokens: int, *, seed: int = 1) -> tuple[list[Result], dict[int, Contender]]:
        """Results without samples, one for each way, and what may be timed, by number of the way.

        Raises:
            GpuLostError: A kernel of a way failed; it names the way.
        """
        x = self._inputs(tokens, seed)
        excess = self._excess_on(x)
        results = [
            _checked(way, products, x, partial(excess, way), self.device)
            for way, products in zip(self.ways, self.products, strict=True)
        ]
        running = {
            index: Contender(self.ways[index].name, [partial(each, x) for each in products])
            for index, products in enumerate(self.products)
            if not results[index].timing.error and not isinstance(products, str)
        }
        return results, running

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.weights[0].device
        return device

    def host_us(self, way: int, tokens: int, *, calls: int = 500) -> float:
        """Microseconds that the host needs for one eager call of a way that a contest timed."""
        products = self.products[way]
        assert not isinstance(products, str), products
        with torch.no_grad():
            return 1e6 * host_time(partial(products[0], self._inputs(tokens, 1)), calls)

    def _excess_on(self, x: Any) -> Callable[[Way, list[Product]], float]:
        """What says how wrong the products of a way are for x."""
        references = first_and_last(x, self.weights)

        def excess(way: Way, products: list[Product]) -> float:
            return largest_excess(lambda index: products[index](x), references, x)

        return excess

    def _inputs(self, tokens: int, seed: int) -> Any:
        weight = self.weights[0]
        generator = torch.Generator(weight.device).manual_seed(seed)
        return torch.randn(
            tokens, weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype
        )


def prepared(way: Way, weights: list[Any]) -> list[Product] | str:
    """The products of a way with each weight, or why it has none."""
    try:
        with named(way.name, wait_for(weights[0].device)):
            return [way.prepare(weight, None) for weight in weights]
    except GpuLostError:
        raise
    except Exception as error:
        return _words(error)


def _checked(
    way: Way,
    products: list[Product] | str,
    x: Any,
    excess_of: Callable[[list[Product]], float],
    device: torch.device,
) -> Result:
    """A result without samples: with an error, unless the way computes what it should."""
    if isinstance(products, str):
        return Result(Timing(way.name, error=products))
    try:
        with torch.no_grad(), named(way.name, wait_for(device)):
            excess = excess_of(products)
            plan = way.describe(products[0], x)
    except GpuLostError:
        raise
    except Exception as error:
        return Result(Timing(way.name, error=_words(error)))
    if not excess <= 1:
        wrong = f"wrong: an error of {excess:.3g} times the bound, so it was not timed"
        return Result(Timing(way.name, error=wrong), excess, plan)
    return Result(Timing(way.name), excess, plan)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

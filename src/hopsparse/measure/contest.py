"""A 2:4 layer computed in several ways: prepared, checked against float64, and timed together.

A wrong result is never timed. Weights are random, and each call of a way works on its own copy;
x is one tensor for all, as the layer before has just written it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import GpuLostError
from .clock import Contender, Timing, copies_to_defeat_l2, gpu, host_time, ratio, time_side_by_side
from .error import product_bound
from .fault import named, wait_for
from .peers import Product
from .power import Sampler
from .suite import Problem

Prepare = Callable[[Tensor, Tensor | None], Product]

# Checked are one row and one column of every such block, all along: no tile of a kernel is as
# small, so that none goes unseen.
_BLOCK = 64
_STORED_BITS_A_WEIGHT = 9  # 2:4 in 16 bits: half the values, and an eighth of their bits again


@dataclass(frozen=True)
class Way:
    """One way to compute a layer.

    Attributes:
        name: How tables call it.
        prepare: Makes the product of x [tokens, k] from a 2:4 weight [out, k] and a bias.
        describe: Says what runs for a prepared product and an x; called once, after a first call.
    """

    name: str
    prepare: Prepare
    describe: Callable[[Any, Tensor], str]

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
    weights: list[Tensor]
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
        layer.products = [_prepared(way, layer.weights) for way in ways]
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
        weight, x = self.weights[0], self._inputs(tokens, seed)
        references = first_and_last(x, self.weights)
        results = [
            _checked(way, products, x, references)
            for way, products in zip(self.ways, self.products, strict=True)
        ]
        del references
        running = {
            index: Contender(self.ways[index].name, [partial(each, x) for each in products])
            for index, products in enumerate(self.products)
            if not results[index].timing.error and not isinstance(products, str)
        }
        with torch.no_grad(), Sampler(weight.device) as seen:
            timings = time_side_by_side(list(running.values()), device=weight.device, **timing)
        for index, found in zip(running, timings, strict=True):
            results[index] = replace(results[index], timing=found)
        return Contest(
            tuple(results), len(self.weights), seen.watts, seen.sm_mhz, seen.celsius, seen.limits
        )

    def host_us(self, way: int, tokens: int, *, calls: int = 500) -> float:
        """Microseconds that the host needs for one eager call of a way that a contest timed."""
        products = self.products[way]
        assert not isinstance(products, str), products
        with torch.no_grad():
            return 1e6 * host_time(partial(products[0], self._inputs(tokens, 1)), calls)

    def _inputs(self, tokens: int, seed: int) -> Tensor:
        weight = self.weights[0]
        generator = torch.Generator(weight.device).manual_seed(seed)
        return torch.randn(
            tokens, weight.shape[1], generator=generator, device=weight.device, dtype=weight.dtype
        )


def cold_weights(
    shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """Random 2:4 weights, as many as it takes to defeat the L2 cache of the generator's GPU."""
    count = cold_count(shape[0] * shape[1] * _STORED_BITS_A_WEIGHT // 8, generator.device)
    return [random_24(shape, dtype, generator) for _ in range(count)]


def cold_count(stored_bytes: int, device: torch.device) -> int:
    """How many copies of so many bytes defeat the L2 cache of a GPU; 64 at most."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return copies_to_defeat_l2(stored_bytes, l2_bytes, most=64)


def random_24(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal numbers, of which the two largest of four are kept; on the generator's device.

    Example:
        >>> weight = random_24((2, 8), torch.float16, torch.Generator().manual_seed(0))
        >>> (weight.view(-1, 4) != 0).sum(1).tolist()
        [2, 2, 2, 2]
    """
    groups = torch.randn(
        shape[0], shape[1] // 4, 4, generator=generator, device=generator.device, dtype=dtype
    )
    largest = groups.abs().topk(2, dim=-1).indices
    kept = torch.zeros_like(groups).scatter_(-1, largest, groups.gather(-1, largest))
    return kept.view(shape)


class Reference:
    """Some rows and some columns of a product in float64, chosen so that they cross every tile.

    Attributes:
        out: Rows of the weight.

    Args:
        x: [tokens, k].
        weight: [out, k].
        seed: Of the choice.

    Example:
        >>> x, weight = torch.ones(3, 4), torch.ones(2, 4)
        >>> Reference(x, weight).excess(x @ weight.T)
        0.0
    """

    def __init__(self, x: Tensor, weight: Tensor, *, seed: int = 2) -> None:
        self.out = weight.shape[0]
        generator = torch.Generator().manual_seed(seed)
        self._rows = _one_of_each_block(x.shape[0], generator).to(x.device)
        self._columns = _one_of_each_block(weight.shape[0], generator).to(x.device)
        self._by_row = _exact(x[self._rows], weight)
        self._by_column = _exact(x, weight[self._columns])

    def excess(self, y: Tensor) -> float:
        """Largest error of y [tokens, out] as a part of its bound; infinite if y is not finite."""
        if not bool(torch.isfinite(y).all()):
            return float("inf")
        seen = ((y[self._rows], self._by_row), (y[:, self._columns], self._by_column))
        return max(
            float(((part.double() - exact).abs() / bound).max()) for part, (exact, bound) in seen
        )


def first_and_last(x: Tensor, weights: Sequence[Tensor]) -> dict[int, Reference]:
    """References of the first weight, 0, and of the last, -1.

    Of both, because whoever remembers the first would read it from the cache.
    """
    return {index: Reference(x, weights[index]) for index in (0, -1)}


def largest_excess(
    run: Callable[[int], Tensor], references: Mapping[int, Reference], x: Tensor
) -> float:
    """The largest excess of the products that `run` makes of x and the weights of `references`.

    Example:
        >>> x, weights = torch.ones(3, 4), [torch.ones(2, 4), torch.zeros(2, 4)]
        >>> largest_excess(lambda i: x @ weights[i].T, first_and_last(x, weights), x)
        0.0
    """
    worst = 0.0
    for index, reference in references.items():
        # Where the allocator will likely put the result: what is not written shows.
        torch.full((x.shape[0], reference.out), float("nan"), dtype=x.dtype, device=x.device)
        worst = max(worst, reference.excess(run(index)))
    return worst


def _prepared(way: Way, weights: list[Tensor]) -> list[Product] | str:
    try:
        with named(way.name, wait_for(weights[0].device)):
            return [way.prepare(weight, None) for weight in weights]
    except GpuLostError:
        raise
    except Exception as error:
        return _words(error)


def _checked(
    way: Way, products: list[Product] | str, x: Tensor, references: dict[int, Reference]
) -> Result:
    """A result without samples: with an error, unless the way computes what it should."""
    if isinstance(products, str):
        return Result(Timing(way.name, error=products))
    try:
        with torch.no_grad(), named(way.name, wait_for(x.device)):
            excess = largest_excess(lambda index: products[index](x), references, x)
            plan = way.describe(products[0], x)
    except GpuLostError:
        raise
    except Exception as error:
        return Result(Timing(way.name, error=_words(error)))
    if not excess <= 1:
        wrong = f"wrong: an error of {excess:.3g} times the bound, so it was not timed"
        return Result(Timing(way.name, error=wrong), excess, plan)
    return Result(Timing(way.name), excess, plan)


def _exact(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    exact = x.double() @ weight.double().T
    return exact, product_bound(x, weight, torch.float32, x.dtype)


def _one_of_each_block(count: int, generator: torch.Generator) -> Tensor:
    """One index of every `_BLOCK`, at random."""
    starts = torch.arange(0, count, _BLOCK)
    sizes = (count - starts).clamp(max=_BLOCK)
    return starts + (torch.rand(len(starts), generator=generator) * sizes).long()


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

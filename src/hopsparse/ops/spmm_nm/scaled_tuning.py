"""spmm_nm_scaled as the tuner sees it: tiles of codes, and how one is run, checked and timed.

A tile is checked on small whole numbers and powers of two as scales, whose sums are exact in every
tensor core, and timed on codes as they are in a model: how many bits change decides the power.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ...compiler import KernelCache
from ...formats.nm import NM
from ...measure.clock import Contender, gpu, time_side_by_side
from ...measure.contest import Reference, cold_count, largest_excess, random_24
from ...measure.fault import wait_for
from ...measure.timing import Timing
from ...plan import KernelSpec
from ...tune import Ranking, Show, Steps, Store, machine_of, tune
from .cost import Problem
from .kernel import Config, Numbers, spec_of_numbers, stores_directly
from .scaled import Scaling, spmm_nm_scaled
from .scaled_dispatch import GROUP
from .scaled_plan import candidates_scaled, scaled_key, scaled_versions
from .tuning import measured_problem

_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_DEVIATIONS = 4.0  # of normal numbers, whose largest of a row is the largest code
_STORED_BITS_A_WEIGHT = 5  # 2:4 in 8 bits: half the values, and 2 bits of index for each


def named_scaled_candidates(
    problem: Problem, numbers: Numbers, sm_count: int, configs: Sequence[Config] | None = None
) -> dict[str, Config]:
    """What is timed, by the names in tuning results; the first is the cost model's choice."""
    stands = measured_problem(problem)
    return scaled_versions(numbers, candidates_scaled(stands, numbers, sm_count, configs=configs))


def tune_scaled(
    problem: Problem,
    numbers: Numbers,
    *,
    device: torch.device | int | None = None,
    configs: Sequence[Config] | None = None,
    budget_s: float = 60.0,
    show: Show = lambda *step: None,
) -> Ranking:
    """Measure the tiles of codes for the class of a problem; `choose_scaled` gives the fastest.

    Where torch.distributed is initialised, every rank calls it: see `hopsparse.tune.tune`.

    Args:
        problem: Sizes, all positive; k in whole groups of 4.
        numbers: As `numbers_for` makes them.
        device: GPU to measure on; the current one if left out.
        configs: The tiles; None is all of `eight_bit`.
        budget_s: Seconds for verifying and timing.
        show: Is told how far it is.

    Returns:
        What is known of the class by names of `named_scaled_candidates`, also from earlier runs.

    Raises:
        UnsupportedError: There is no GPU, or it is no H100 or H200.
    """
    from ...launch import device_facts
    from .scaled_device import forget_scaled_launches

    where = gpu(device)
    device_facts(where.index).require(KernelSpec.arch)
    machine = machine_of(where.index)
    try:
        return tune(
            Store.default(),
            scaled_key(problem, numbers, machine),
            named_scaled_candidates(problem, numbers, machine.sm_count, configs),
            CodesLayer(measured_problem(problem), numbers, where).steps(),
            budget_s=budget_s,
            show=show,
        )
    finally:
        # Launches that were planned before go by the cost model.
        forget_scaled_launches()


@dataclass(frozen=True)
class Ready:
    """One tile with its inputs.

    Attributes:
        checked: Runs it on whole numbers.
        timed: Run it on codes, each on its own copy of w.
    """

    checked: Callable[[], Tensor]
    timed: list[Callable[[], Tensor]]


@dataclass(frozen=True)
class Codes:
    """Arguments of a product, and what they stand for.

    Attributes:
        w: [out, k].
        x: [tokens, k].
        scaling: Scales.
        wide_w: [out, k] in bfloat16, exact.
        wide_x: [tokens, k] in bfloat16, exact.
    """

    w: NM
    x: Tensor
    scaling: Scaling
    wide_w: Tensor
    wide_x: Tensor


@dataclass
class CodesLayer:
    """A random 2:4 layer of codes, as many times as it takes to defeat the L2 cache.

    Attributes:
        problem: Sizes.
        numbers: As `numbers_for` makes them.
        device: The GPU, for `steps`; whole numbers are made anywhere.
    """

    problem: Problem
    numbers: Numbers
    device: torch.device

    def steps(self) -> Steps[Config, Ready]:
        """How the tuner takes a candidate; tensors are made when the first is prepared."""
        wait = wait_for(self.device)
        return Steps(self.compiled, self._prepared, self._excess, self._timed, wait)

    def compiled(self, configs: Sequence[Config]) -> Generator[tuple[Config, str], None, None]:
        """Compile tiles, and give each as soon as it is, with its error or ""."""
        direct = stores_directly(self.problem.out, self.numbers.out)
        specs = {
            spec_of_numbers(config, self.numbers, "none", False, direct): config
            for config in configs
        }
        with closing(KernelCache.default().compile_all(specs)) as running:
            for built in running:
                yield specs[built.spec], "" if built.error is None else str(built.error)

    @cached_property
    def whole(self) -> Codes:
        """Whole numbers of at most 2, of which no sum rounds, and powers of two as scales."""
        w, x = (each.clamp(-2, 2).round() for each in self._normal())
        dtype, shape = _DTYPES[self.numbers.w], (self.problem.out, self._groups)
        scale = self._power_of_two(*shape)
        each = self._power_of_two(self.problem.tokens, 1)
        columns = scale if shape[1] == 1 else scale.repeat_interleave(GROUP, 1)[:, : w.shape[1]]
        scaling = Scaling(w=scale, x=each, sums=self._sums)
        wide = (w * columns).bfloat16(), (x * each).bfloat16()
        return Codes(NM.from_dense(w.to(dtype)), x.to(dtype), scaling, *wide)

    @property
    def _groups(self) -> int:
        return -(-self.problem.k // GROUP) if self.numbers.grouped else 1

    @property
    def _sums(self) -> str:
        return "promoted" if self.numbers.promoted else "fast"

    def _normal(self) -> tuple[Tensor, Tensor]:
        """Weights [out, k], of which two of four are kept, and x [tokens, k], in float32."""
        generator = torch.Generator(self.device).manual_seed(0)
        p = self.problem
        w = random_24((p.out, p.k), torch.bfloat16, generator).float()
        return w, torch.randn(p.tokens, p.k, generator=generator, device=self.device)

    def _power_of_two(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1)
        drawn = torch.randint(-1, 2, shape, generator=generator, device=self.device)
        return torch.exp2(drawn.float())

    def _prepared(self, config: Config) -> Ready:
        x, weights, scaling = self._tensors
        whole = self.whole
        run = partial(spmm_nm_scaled, config=config)
        return Ready(
            partial(run, whole.w, whole.x, whole.scaling),
            [partial(run, each, x, scaling) for each in weights],
        )

    def _excess(self, ready: Ready) -> float:
        with torch.no_grad():
            run = ready.checked
            return largest_excess(lambda _: run(), self._references, self.whole.wide_x)

    @cached_property
    def _references(self) -> dict[int, Reference]:
        return {0: Reference(self.whole.wide_x, self.whole.wide_w)}

    def _timed(self, ready: Mapping[str, Ready], seconds: float) -> list[Timing]:
        contenders = [Contender(name, each.timed) for name, each in ready.items()]
        with torch.no_grad():
            return time_side_by_side(contenders, budget_s=seconds, device=self.device)

    @cached_property
    def _tensors(self) -> tuple[Tensor, list[NM], Scaling]:
        dtype, (out, k) = _DTYPES[self.numbers.w], (self.problem.out, self.problem.k)
        w, x = (codes_of(each, dtype) for each in self._normal())
        first, scale = NM.from_dense(w), self._power_of_two(out, self._groups)
        count = cold_count(out * k * _STORED_BITS_A_WEIGHT // 8, self.device)
        copies = [
            NM(first.shape, first.values.clone(), first.meta.clone(), first.pattern)
            for _ in range(count - 1)
        ]
        scaling = Scaling(w=scale, x=self._power_of_two(x.shape[0], 1), sums=self._sums)
        return x, [first, *copies], scaling


def codes_of(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Normal numbers as codes, four deviations the largest; zeros stay.

    Example:
        >>> codes_of(torch.tensor([0.0, 1.0, -9.0]), torch.int8).tolist()
        [0, 32, -127]
    """
    largest = _LARGEST[dtype]
    values = (normal.float() * (largest / _DEVIATIONS)).clamp(-largest, largest)
    return values.round().to(dtype) if dtype == torch.int8 else values.to(dtype)

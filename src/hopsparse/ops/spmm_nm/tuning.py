"""spmm_nm as the tuner sees it: candidates of a problem, and how one is run, checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...compiler import KernelCache
from ...formats.nm import NM
from ...measure.clock import Contender, gpu, time_side_by_side
from ...measure.contest import Reference, cold_weights, first_and_last, largest_excess
from ...measure.fault import wait_for
from ...measure.timing import Timing
from ...plan import KernelSpec
from ...tune import Machine, Ranking, Show, Steps, Store, machine_of, token_class, tune
from .cost import Problem
from .kernel import Config, Numbers, spec_of_numbers, stores_directly
from .op import run_kernel
from .plan import CANDIDATES, DENSE, candidates, key_of, versions

Calls = list[Callable[[], Tensor]]
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def measured_problem(problem: Problem) -> Problem:
    """The problem that stands for all token counts of the class of `problem`.

    Example:
        >>> measured_problem(Problem(300, 4096, 4096)).tokens
        512
    """
    return replace(problem, tokens=token_class(problem.tokens).measured)


def named_candidates(
    problem: Problem, dtype: str, sm_count: int, configs: Sequence[Config] = CANDIDATES
) -> dict[str, Config | None]:
    """What is timed, by the names in tuning results; None is the dense product.

    The first is the cost model's choice, and the dense product the second, so that however little
    time there is, both are known.
    """
    ordered = candidates(measured_problem(problem), sm_count, configs)
    first, *rest = versions(dtype, ordered).items()
    return dict([first, (DENSE, None), *rest])


def tune_problem(
    problem: Problem,
    dtype: str,
    *,
    device: torch.device | int | None = None,
    configs: Sequence[Config] = CANDIDATES,
    budget_s: float = 60.0,
    show: Show = lambda *step: None,
) -> Ranking:
    """Measure the tiles and the dense product for the class of a problem.

    From then on `choose` gives the fastest tile, and `dense_win` whether layers run dense instead.

    Where torch.distributed is initialised, every rank calls it: see `hopsparse.tune.tune`.

    Args:
        problem: Sizes, all positive; k in whole groups of 4.
        dtype: Of x and w, `bfloat16` or `float16`.
        device: GPU to measure on; the current one if left out.
        configs: The tiles.
        budget_s: Seconds for verifying and timing.
        show: Is told how far it is.

    Returns:
        What is known of the class by names of `named_candidates`, also from earlier runs.

    Raises:
        UnsupportedError: There is no GPU, it is no H100 or H200, or a CUDA graph is being captured.
    """
    from .device import forget_launches

    where, machine = gpu_to_tune(device)
    stands = measured_problem(problem)
    try:
        return tune(
            Store.default(),
            key_of(problem, dtype, machine),
            named_candidates(problem, dtype, machine.sm_count, configs),
            Layer(stands, dtype, where).steps(),
            budget_s=budget_s,
            show=show,
        )
    finally:
        # Launches that were planned before go by the cost model.
        forget_launches()


def gpu_to_tune(device: torch.device | int | None) -> tuple[torch.device, Machine]:
    """The GPU that is measured on, and what its results are kept under.

    Args:
        device: A GPU; None is the current one.

    Raises:
        UnsupportedError: There is no GPU, it is no H100 or H200, or a CUDA graph is being captured.
    """
    from ...launch import device_facts

    where = gpu(device)
    device_facts(where.index).require(KernelSpec.arch)
    return where, machine_of(where.index)


def compiled(
    configs: Sequence[Config], problem: Problem, numbers: Numbers
) -> Generator[tuple[Config, str], None, None]:
    """Compile the plain products of tiles, and give each as soon as it is, with its error or ""."""
    direct = stores_directly(problem.out, numbers.out)
    specs = {spec_of_numbers(each, numbers, "none", False, direct): each for each in configs}
    with closing(KernelCache.default().compile_all(specs)) as running:
        for built in running:
            yield specs[built.spec], "" if built.error is None else str(built.error)


def timed(ready: Mapping[str, Calls], seconds: float, device: torch.device) -> list[Timing]:
    """Time calls side by side, by their names; each call of a list works on its own weight."""
    contenders = [Contender(name, calls) for name, calls in ready.items()]
    with torch.no_grad():
        return time_side_by_side(contenders, budget_s=seconds, device=device)


@dataclass
class Layer:
    """A random 2:4 layer, as many times as it takes to defeat the L2 cache.

    Attributes:
        problem: Sizes.
        dtype: `bfloat16` or `float16`.
        device: The GPU.
    """

    problem: Problem
    dtype: str
    device: torch.device

    def steps(self) -> Steps[Config | None, Calls]:
        """How the tuner takes a candidate; tensors are made when the first is prepared."""
        wait = wait_for(self.device)
        return Steps(self._compiled, self._prepared, self._excess, self._timed, wait)

    def _compiled(
        self, configs: Sequence[Config | None]
    ) -> Generator[tuple[Config | None, str], None, None]:
        if None in configs:
            yield None, ""
        numbers = Numbers(self.dtype, self.dtype, self.dtype)
        tiles = [config for config in configs if config is not None]
        yield from compiled(tiles, self.problem, numbers)

    def _prepared(self, config: Config | None) -> Calls:
        x, weights, packed = self._tensors
        if config is None:
            return [partial(F.linear, x, weight) for weight in weights]
        return [partial(run_kernel, each, x, None, config=config) for each in packed]

    def _excess(self, calls: Calls) -> float:
        with torch.no_grad():
            return largest_excess(lambda index: calls[index](), self._references, self._tensors[0])

    @cached_property
    def _references(self) -> dict[int, Reference]:
        return first_and_last(*self._tensors[:2])

    def _timed(self, ready: Mapping[str, Calls], seconds: float) -> list[Timing]:
        return timed(ready, seconds, self.device)

    @cached_property
    def _tensors(self) -> tuple[Tensor, list[Tensor], list[NM]]:
        shape, dtype = (self.problem.out, self.problem.k), _DTYPES[self.dtype]
        generator = torch.Generator(self.device).manual_seed(0)
        weights = cold_weights(shape, dtype, generator)
        x = torch.randn(
            self.problem.tokens, shape[1], generator=generator, device=self.device, dtype=dtype
        )
        return x, weights, [NM.from_dense(weight) for weight in weights]

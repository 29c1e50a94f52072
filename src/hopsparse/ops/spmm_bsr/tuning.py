"""spmm_bsr as the tuner sees it: the tiles of a pattern, and how one is run, checked and timed.

What is fastest depends on where a weight has its blocks: every pattern is tuned for itself, and is
found again by its digest. The cost model says which few of all tiles are worth a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...compiler import KernelCache
from ...errors import ArgumentError, UnsupportedError
from ...formats.bsr import BSR
from ...launch import holding
from ...measure.clock import Contender, gpu, time_side_by_side
from ...measure.fault import wait_for
from ...measure.reference import Reference, cold_copies, first_and_last, largest_excess
from ...measure.timing import Timing
from ...plan import KernelSpec, Target
from ...tune import Ranking, Show, Steps, Store, machine_of, token_class, tune
from .choose import DENSE, Tile, by_model, key_of, predicted_by_tile, versions
from .grains import counts_of, digest, grains_for
from .op import spmm_bsr
from .plan import Problem, doubted_us, spec_of

Call = Callable[[], Tensor]

#: Tiles that a search times: those that are predicted to be fastest.
FEW = 8
# Tiles that are predicted to take longer than this many times the fastest are left out.
_HOPELESS = 2.5
# Every pattern is tuned for itself, so a search is short: a second for five tiles.
_ROUNDS, _MIN_MS = 15, 2.0
_LARGEST = 2  # of the whole numbers that a tile is checked on


@dataclass(frozen=True, eq=False)
class Candidates:
    """What is timed for a weight.

    Attributes:
        by_name: Tiles by the names in tuning results, the model's choice first; None is the dense
            product, second.
        predicted_us: Device time by name, of tiles.
        choice: What the model chooses.
    """

    by_name: Mapping[str, Tile | None]
    predicted_us: Mapping[str, float]
    choice: Tile


def named_candidates(
    w: BSR, problem: Problem, target: Target, *, few: int = FEW, also: Iterable[Tile] = ()
) -> Candidates:
    """The tiles that are worth a measurement, in any grain that w can be cut into.

    Args:
        w: [out, k], on any device.
        problem: Sizes.
        target: The GPU.
        few: At most so many tiles, 1 or more.
        also: Tiles that are timed in any case.

    Raises:
        ArgumentError: `few` is below 1.
        UnsupportedError: Blocks that no kernel takes.

    Example:
        >>> from ...plan import TARGETS
        >>> w = BSR.from_dense(torch.eye(4096, dtype=torch.bfloat16), (64, 64))
        >>> found = named_candidates(w, Problem(2048, 4096, 4096), TARGETS["h200"], few=2)
        >>> [name.split()[0].rstrip(",") for name in found.by_name]
        ['64x256x1x64_s5', 'dense', 'mma_256x128_s6_c2']
    """
    if few < 1:
        raise ArgumentError(f"few={few}", need="1 or more", hint=f"few={FEW}")
    counts = {grain: counts_of(w, grain) for grain in grains_for(w.block)}
    if not counts:
        raise UnsupportedError(
            f"spmm_bsr: blocks of {w.block[0]} x {w.block[1]} to tune",
            need="blocks of a multiple of 16 columns",
            hint="BSR.from_dense(w.to_dense(), (64, 64))",
        )
    dtype = _name(w.dtype)
    timed = predicted_by_tile(counts, problem, target)
    choice = by_model(counts, w.block, problem, dtype, target).config
    ordered = sorted(timed, key=lambda tile: doubted_us(tile, timed[tile]))
    best = timed[ordered[0]]
    worth = [tile for tile in ordered if tile != choice and timed[tile] <= _HOPELESS * best]
    tiles = dict.fromkeys((choice, *worth[: few - 1], *(tile for tile in also if tile in timed)))
    names = versions(dtype, tiles)
    first, *rest = names.items()
    return Candidates(
        dict([first, (DENSE, None), *rest]),
        {name: timed[tile] for name, tile in names.items()},
        choice,
    )


def tune_weight(
    w: BSR,
    tokens: int,
    *,
    few: int = FEW,
    also: Iterable[Tile] = (),
    budget_s: float = 30.0,
    show: Show = lambda *step: None,
) -> Ranking:
    """Measure the most promising tiles and the dense product for the pattern of a weight.

    From then on `spmm_bsr` and layers run the fastest of them for all weights of this pattern and
    all token counts of the class, dense included. Every tile is checked on whole numbers, whose
    product has to be exact, and on the values of w within the bound, before it is timed.

    Where torch.distributed is initialised, every rank calls it: see `hopsparse.tune.tune`.

    Args:
        w: [out, k], bfloat16 or float16, on the GPU to measure on.
        tokens: Rows of x; the largest count of its class is measured.
        few: At most so many tiles are timed, those that are predicted to be fastest.
        also: Tiles that are timed beside them.
        budget_s: Seconds for verifying and timing.
        show: Is told how far it is.

    Returns:
        What is known of the class by names of `named_candidates`, also from earlier runs.

    Raises:
        ArgumentError: No tokens, or `few` is below 1.
        UnsupportedError: w is not on an H100 or H200, has values or blocks that no kernel takes, or
            a CUDA graph is being captured.
    """
    from .device import forget_launches, target_of

    where = _gpu_of(w)
    problem = Problem(token_class(tokens).measured, *w.shape)
    found = named_candidates(w, problem, target_of(where.index), few=few, also=also)
    key = key_of(digest(w), problem, _name(w.dtype), machine_of(where.index))
    try:
        return tune(
            Store.default(),
            key,
            found.by_name,
            Pattern(w, problem.tokens).steps(),
            budget_s=budget_s,
            show=show,
        )
    finally:
        # What was decided before goes by the cost model.
        forget_launches()


def _gpu_of(w: BSR) -> torch.device:
    from ...launch import device_facts

    if not w.values.is_cuda or w.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(
            f"spmm_bsr: a weight of {_name(w.dtype)} on {w.values.device.type} to tune",
            need="bfloat16 or float16 on an H100 or H200",
            hint='w.to("cuda")',
        )
    where = gpu(w.values.device)
    device_facts(where.index).require(KernelSpec.arch)
    return where


@dataclass(frozen=True)
class Runnable:
    """One way with its inputs.

    Attributes:
        timed: Its products, each of its own copy of the weight.
        exact: That of whole numbers; None where sums may be rounded on their way.
    """

    timed: list[Call]
    exact: Call | None = None


@dataclass
class Pattern:
    """A weight as many times as it takes to defeat the L2 cache, and whole numbers in its place.

    Attributes:
        w: [out, k], on the GPU.
        tokens: Rows of x.
    """

    w: BSR
    tokens: int

    def steps(self) -> Steps[Tile | None, Runnable]:
        """How the tuner takes a candidate; tensors are made when the first is prepared."""
        device = self.w.values.device
        return Steps(self._compiled, self._prepared, self._excess, self._timed, wait_for(device))

    def _compiled(
        self, tiles: Sequence[Tile | None]
    ) -> Generator[tuple[Tile | None, str], None, None]:
        if None in tiles:
            yield None, ""
        dtype, out = _name(self.w.dtype), self.w.shape[0]
        specs = {spec_of(tile, out, dtype): tile for tile in tiles if tile is not None}
        with closing(KernelCache.default().compile_all(specs)) as running:
            for built in running:
                yield specs[built.spec], "" if built.error is None else str(built.error)

    def _prepared(self, tile: Tile | None) -> Runnable:
        if tile is None:
            # cuBLAS may add parts that were rounded to 16 bits.
            return Runnable([partial(F.linear, self.x, each) for each in self._decoded])
        run = partial(spmm_bsr, config=tile)
        return Runnable(
            [partial(run, each, self.x) for each in self.copies],
            partial(run, self.whole, self.whole_x),
        )

    def _excess(self, ready: Runnable) -> float:
        with torch.no_grad():
            if ready.exact is not None and not torch.equal(ready.exact(), self._whole_product):
                return float("inf")
            timed = ready.timed
            return largest_excess(lambda index: timed[index](), self._references, self.x)

    def _timed(self, ready: Mapping[str, Runnable], seconds: float) -> list[Timing]:
        contenders = [Contender(name, each.timed) for name, each in ready.items()]
        # Copies that graphs read are kept for as long as they are replayed, and no longer.
        with torch.no_grad(), holding():
            return time_side_by_side(
                contenders,
                rounds=_ROUNDS,
                min_ms=_MIN_MS,
                budget_s=seconds,
                device=self.w.values.device,
            )

    @cached_property
    def copies(self) -> list[BSR]:
        """The weight, and its negative last: whoever remembers the first is found out."""
        stored = max(1, self.w.values.numel())
        count = cold_copies((stored, 1), 8 * self.w.values.element_size(), self.w.values.device)
        same = [self._with(self.w.values.clone()) for _ in range(count - 1)]
        return [*same, self._with(0 - self.w.values)]

    @cached_property
    def whole(self) -> BSR:
        """Small integers where w has anything, so that padding stays zero."""
        generator = torch.Generator(self.w.values.device).manual_seed(1)
        numbers = torch.randint(
            -_LARGEST,
            _LARGEST + 1,
            self.w.values.shape,
            generator=generator,
            device=self.w.values.device,
        )
        return self._with(torch.where(self.w.values != 0, numbers, 0).to(self.w.dtype))

    @cached_property
    def x(self) -> Tensor:
        """Normal numbers, [tokens, k]."""
        shape, where = (self.tokens, self.w.shape[1]), self.w.values.device
        generator = torch.Generator(where).manual_seed(2)
        return torch.randn(shape, generator=generator, dtype=self.w.dtype, device=where)

    @cached_property
    def whole_x(self) -> Tensor:
        """Small integers, [tokens, k]."""
        shape, where = (self.tokens, self.w.shape[1]), self.w.values.device
        generator = torch.Generator(where).manual_seed(3)
        numbers = torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=generator, device=where)
        return numbers.to(self.w.dtype)

    @cached_property
    def _decoded(self) -> list[Tensor]:
        # Two are enough: each is larger than the cache wherever a dense product is worth timing.
        count = max(2, min(len(self.copies), _most_dense(self.w)))
        return [each.to_dense() for each in (*self.copies[: count - 1], self.copies[-1])]

    @cached_property
    def _whole_product(self) -> Tensor:
        """Exact in float32, rounded once."""
        return (self.whole_x.float() @ self.whole.to_dense().float().T).to(self.w.dtype)

    @cached_property
    def _references(self) -> dict[int, Reference]:
        return first_and_last(self.x, self._decoded)

    def _with(self, values: Tensor) -> BSR:
        return BSR(self.w.shape, values, self.w.indices, self.w.indptr, self.w.block)


def _most_dense(w: BSR) -> int:
    """How many decoded weights 8 GiB hold."""
    return (8 << 30) // (w.shape[0] * w.shape[1] * w.values.element_size())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

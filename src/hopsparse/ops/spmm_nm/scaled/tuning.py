"""spmm_nm_scaled as the tuner sees it: tiles of codes, and how one is run, checked and timed.

A tile is checked twice: on small integers, whose sums are exact, with powers of two as scales; and
on the codes that it is timed on, under the bound of how sums are taken. Those are as they are in a
model, because how many bits change decides the power.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ....formats.nm import NM
from ....formats.quantized import pack_nibbles
from ....measure.coded_contest import CodedReference
from ....measure.codes import (
    CodedInput,
    CodedWeight,
    integer_input,
    integer_weight,
    random_input,
    random_weight,
)
from ....measure.contest import Reference, largest_excess
from ....measure.fault import wait_for
from ....measure.reference import cold_copies
from ....measure.timing import Timing
from ....tune import Ranking, Show, Steps, Store, tune
from ..cost import Problem
from ..kernel import Config, Numbers
from ..tuning import compiled, gpu_to_tune, measured_problem, timed
from .dispatch import GROUP
from .op import Scaling, spmm_nm_scaled
from .plan import candidates_scaled, scaled_key, scaled_versions, sums_of

_DTYPES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_LARGEST_INT4, _WIDENED = 7.0, 2.0**9
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
        UnsupportedError: There is no GPU, it is no H100 or H200, or a CUDA graph is being captured.
    """
    from .device import forget_scaled_launches

    where, machine = gpu_to_tune(device)
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
        return compiled(configs, self.problem, self.numbers)

    @cached_property
    def whole(self) -> Codes:
        """Small integers, of which no sum rounds as these are taken, and powers of two as scales.

        Where sums are promoted it would, were they not.
        """
        sums = self._summed
        w = integer_weight(self.first, sums)
        scale, x = self._group_scales(w), integer_input(self.input, sums)
        assert scale is not None
        assert x.scale is not None
        grouped = self.numbers.grouped
        columns = scale.repeat_interleave(GROUP, 1)[:, : self.problem.k] if grouped else scale
        wide = (w.codes.float() * columns).bfloat16(), (x.codes.float() * x.scale).bfloat16()
        return Codes(NM.from_dense(w.codes), self._stored(x), self._scaling(scale, x), *wide)

    @property
    def _summed(self) -> str:
        """How sums are taken, in the words of `hopsparse.measure.codes`."""
        sums = sums_of(self.numbers)
        return "promoted" if sums == "grouped" else sums

    def _scaling(self, of_w: Tensor | None, x: CodedInput) -> Scaling:
        promoted = self.numbers.promoted or self.numbers.grouped
        return Scaling(w=of_w, x=x.scale, sums="promoted" if promoted else "fast")

    def _group_scales(self, w: CodedWeight) -> Tensor | None:
        """Scales of w: its own, or a power of two for each 128 columns."""
        if not self.numbers.grouped:
            return w.scale
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (self.problem.out, -(-self.problem.k // GROUP))
        drawn = torch.randint(-1, 2, shape, generator=generator, device=self.device)
        return torch.exp2(drawn.float())

    @cached_property
    def first(self) -> CodedWeight:
        """The weight that is timed, of which there are copies."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (self.problem.out, self.problem.k)
        return random_weight(shape, _DTYPES[self.numbers.w], "rows", generator)

    @cached_property
    def input(self) -> CodedInput:
        """What it is timed on, in the dtype of w."""
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (self.problem.tokens, self.problem.k)
        if self.numbers.x != "int4":
            return random_input(shape, _DTYPES[self.numbers.w], "rows", generator)
        values = torch.randn(shape, generator=generator, device=self.device)
        scale = values.abs().amax(1, keepdim=True) / _LARGEST_INT4
        return CodedInput((values / scale).round().to(torch.float8_e4m3fn), scale)

    def _stored(self, x: CodedInput) -> Tensor:
        """Codes of x as the operator takes them: of 4 bits two a byte."""
        if self.numbers.x != "int4":
            return x.codes
        nibbles = pack_nibbles(x.codes.to(torch.int8)).view(torch.int8)
        return nibbles.view(x.codes.shape[0], -1)

    @property
    def copies(self) -> int:
        """How many weights defeat the L2 cache."""
        shape = (self.problem.out, self.problem.k)
        return cold_copies(shape, _STORED_BITS_A_WEIGHT, self.device)

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
            whole = largest_excess(lambda _: run(), self._whole_reference, self.whole.wide_x)
            if self.numbers.grouped:
                return whole
            y = ready.timed[0]()
            return max(whole, self._reference.excess(y, self._summed))

    @cached_property
    def _whole_reference(self) -> dict[int, Reference]:
        return {0: Reference(self.whole.wide_x, self.whole.wide_w)}

    @cached_property
    def _reference(self) -> CodedReference:
        x = self.input
        if self.numbers.x == "int4":
            # As the kernel widens them: a tensor core cuts what is so small otherwise.
            assert x.scale is not None
            codes = (x.codes.float() / _WIDENED).to(x.codes.dtype)
            x = CodedInput(codes, x.scale * _WIDENED)
        return CodedReference(x, self.first)

    def _timed(self, ready: Mapping[str, Ready], seconds: float) -> list[Timing]:
        return timed({name: each.timed for name, each in ready.items()}, seconds, self.device)

    @cached_property
    def _tensors(self) -> tuple[Tensor, list[NM], Scaling]:
        first, x = NM.from_dense(self.first.codes), self.input
        copies = [
            NM(first.shape, first.values.clone(), first.meta.clone(), first.pattern)
            for _ in range(self.copies - 1)
        ]
        return self._stored(x), [first, *copies], self._scaling(self._group_scales(self.first), x)

"""spmm_nm_int4 as the tuner sees it: tiles of 4 bits, and how one is run, checked and timed.

A tile is checked twice, as scaled/tuning.py has it: on whole numbers, whose sums are exact, with
powers of two as scales; and on what it is timed on, under the bound of how sums are taken.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from ....formats.nm import NM
from ....formats.quantized import Quantized
from ....measure.codes import CodedInput, integer_input, random_input
from ....measure.contest import Reference, largest_excess
from ....measure.fault import wait_for
from ....measure.grouped_reference import GroupedReference
from ....measure.reference import cold_copies, random_24
from ....measure.timing import Timing
from ....quant import quantize_matrix
from ....tune import Ranking, Show, Steps, Store, tune
from ..cost import Problem
from ..kernel import Config, Numbers
from ..scaled.tuning import Ready
from ..tuning import compiled, gpu_to_tune, measured_problem, timed
from .op import spmm_nm_int4
from .plan import Kind, candidates_int4, int4_key, int4_versions

_STORED_BITS_A_WEIGHT = 3  # 2:4 in 4 bits: half the values, and 2 bits of index for each
_WIDENED = 2.0**-9  # E4M3 that the kernel multiplies for a code of 1


def named_int4_candidates(
    problem: Problem, numbers: Numbers, sm_count: int, configs: Sequence[Config] | None = None
) -> dict[str, Config]:
    """What is timed, by the names in tuning results; the first is the cost model's choice."""
    stands = measured_problem(problem)
    return int4_versions(numbers, candidates_int4(stands, numbers, sm_count, configs=configs))


def tune_int4(
    problem: Problem,
    kind: Kind,
    *,
    device: torch.device | int | None = None,
    configs: Sequence[Config] | None = None,
    budget_s: float = 60.0,
    show: Show = lambda *step: None,
) -> Ranking:
    """Measure the tiles of 4-bit weights for the class of a problem; `choose_int4` gives the best.

    Where torch.distributed is initialised, every rank calls it: see `hopsparse.tune.tune`.

    Args:
        problem: Sizes, all positive; k in whole groups of 4.
        kind: Groups of w, and dtype of x. Groups of 64 and of 128 share a result.
        device: GPU to measure on; the current one if left out.
        configs: The tiles; None is all of `four_bit`.
        budget_s: Seconds for verifying and timing.
        show: Is told how far it is.

    Returns:
        What is known of the class by names of `named_int4_candidates`, also from earlier runs.

    Raises:
        UnsupportedError: There is no GPU, it is no H100 or H200, or a CUDA graph is being captured.
    """
    from .device import forget_int4_launches

    where, machine = gpu_to_tune(device)
    try:
        return tune(
            Store.default(),
            int4_key(problem, kind.numbers, machine),
            named_int4_candidates(problem, kind.numbers, machine.sm_count, configs),
            Int4Layer(measured_problem(problem), kind, where).steps(),
            budget_s=budget_s,
            show=show,
        )
    finally:
        # Launches that were planned before go by the cost model.
        forget_int4_launches()


@dataclass(frozen=True)
class Factors:
    """Arguments of a product, and what they stand for.

    Attributes:
        w: [out, k].
        x: [tokens, k], with scales where it is of codes.
        wide_w: [out, k] in 16 bits, exact.
        wide_x: [tokens, k] in 16 bits, exact.
    """

    w: Quantized
    x: CodedInput
    wide_w: Tensor
    wide_x: Tensor


@dataclass
class Int4Layer:
    """A random 2:4 layer of 4-bit codes, as many times as it takes to defeat the L2 cache.

    Attributes:
        problem: Sizes.
        kind: Groups of w, and dtype of x.
        device: The GPU, for `steps`; whole numbers are made anywhere.
    """

    problem: Problem
    kind: Kind
    device: torch.device

    def steps(self) -> Steps[Config, Ready]:
        """How the tuner takes a candidate; tensors are made when the first is prepared."""
        wait = wait_for(self.device)
        return Steps(self.compiled, self._prepared, self._excess, self._timed, wait)

    def compiled(self, configs: Sequence[Config]) -> Generator[tuple[Config, str], None, None]:
        """Compile tiles, and give each as soon as it is, with its error or ""."""
        return compiled(configs, self.problem, self.kind.numbers)

    @cached_property
    def whole(self) -> Factors:
        """Whole numbers, every code of 4 bits among them, and powers of two as scales."""
        dtype, shape = self.kind.logical, (self.problem.out, self.problem.k)
        generator = torch.Generator(self.device).manual_seed(3)
        draw = partial(torch.randint, generator=generator, device=self.device)
        codes = draw(-8, 8, shape, dtype=torch.int8) * (self._dense != 0)
        scales = torch.exp2(draw(-1, 2, self.first.scales.shape).float()).bfloat16()
        w = Quantized.of(NM.from_dense(codes), scales, self.first.scheme, dtype)
        # Few bits each: a tensor core cuts none of a group's sum in 8-bit floats.
        x = integer_input(self.input, "fast")
        wide_x = x.codes.float() if x.scale is None else x.codes.float() * x.scale
        return Factors(w, x, w.to_dense(), wide_x.to(dtype))

    @cached_property
    def first(self) -> Quantized:
        """The weight that is timed, of which there are copies."""
        return quantize_matrix(self._dense, f"2:4+{self.kind.scheme}")

    @cached_property
    def input(self) -> CodedInput:
        """What it is timed on; codes have a scale a token."""
        generator = torch.Generator(self.device).manual_seed(1)
        shape, dtype = (self.problem.tokens, self.problem.k), self.kind.x_dtype
        if self.kind.numbers.grouped:
            return random_input(shape, dtype, "rows", generator)
        return CodedInput(torch.randn(shape, generator=generator, device=self.device, dtype=dtype))

    @property
    def copies(self) -> int:
        """How many weights defeat the L2 cache."""
        shape = (self.problem.out, self.problem.k)
        return cold_copies(shape, _STORED_BITS_A_WEIGHT, self.device)

    @property
    def _dense(self) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(0)
        return random_24((self.problem.out, self.problem.k), self.kind.logical, generator)

    def _prepared(self, config: Config) -> Ready:
        whole, x = self.whole, self.input
        run = partial(spmm_nm_int4, config=config)
        return Ready(
            partial(run, whole.w, whole.x.codes, whole.x.scale),
            [partial(run, each, x.codes, x.scale) for each in self._weights],
        )

    def _excess(self, ready: Ready) -> float:
        with torch.no_grad():
            run = ready.checked
            whole = largest_excess(lambda _: run(), self._whole_reference, self.whole.wide_x)
            return max(whole, self.reference.excess(ready.timed[0]()))

    @cached_property
    def _whole_reference(self) -> dict[int, Reference]:
        return {0: Reference(self.whole.wide_x, self.whole.wide_w)}

    @cached_property
    def reference(self) -> Reference | GroupedReference:
        """What the timed product must be, of the first weight."""
        w, x = self.first, self.input
        if not self.kind.numbers.grouped:
            return Reference(x.codes, w.to_dense())
        codes, scales = w.codes().to_dense().float(), w.scales.float()
        if x.codes.dtype.is_floating_point:
            codes, scales = codes * _WIDENED, scales / _WIDENED
        return GroupedReference(x, codes, scales, self.kind.group)

    def _timed(self, ready: Mapping[str, Ready], seconds: float) -> list[Timing]:
        return timed({name: each.timed for name, each in ready.items()}, seconds, self.device)

    @cached_property
    def _weights(self) -> list[Quantized]:
        parts = self.first.parts()
        copies = [
            self.first.with_parts({name: part.clone() for name, part in parts.items()})
            for _ in range(self.copies - 1)
        ]
        return [self.first, *copies]

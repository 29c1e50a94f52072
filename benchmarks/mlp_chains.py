"""The SwiGLU MLP block in 8 bits as chains of kernels, ours and those of peers, and their checks.

A chain is four stages: x to codes; gate and up; what lies between to codes; down. Each is compared
with float64 from what the stage before it gave, under the bounds of measure/error.py, so that no
error hides behind another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from quantize_rows import chain_of
from torch import Tensor
from torch.nn import functional as F

from hopsparse.errors import GpuLostError
from hopsparse.measure import coded_peers
from hopsparse.measure.coded_contest import CodedReference
from hopsparse.measure.codes import LARGEST, CodedInput, CodedWeight, random_weight
from hopsparse.measure.contest import Way
from hopsparse.measure.error import (
    PROMOTED_COLUMNS,
    fp8_sum_bound,
    gamma,
    gated_bound,
    rounded_bound,
    swiglu_bound,
    unit_roundoff,
)
from hopsparse.measure.reference import one_of_each_block
from hopsparse.ops import Scaling, interleave_gate_up, pack_nm, quantize_rows, spmm_nm_scaled
from hopsparse.ops.spmm_nm.scaled.op import plan_scaled

KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_ROWS_AT_LEAST = 8  # compared of every problem, however few blocks of tokens it has


@dataclass(frozen=True)
class Weights:
    """The three layers of a block, 2:4, in codes with a scale for each row.

    Attributes:
        gate: [intermediate, hidden].
        up: As gate.
        down: [hidden, intermediate].
    """

    gate: CodedWeight
    up: CodedWeight
    down: CodedWeight

    @classmethod
    def random(
        cls, hidden: int, intermediate: int, dtype: torch.dtype, generator: torch.Generator
    ) -> Weights:
        """Normal numbers, scaled so that activations stay near 1, as those of models do."""

        def layer(out: int, k: int) -> CodedWeight:
            made = random_weight((out, k), dtype, "rows", generator)
            assert made.scale is not None
            return replace(made, scale=made.scale * k**-0.5)

        wide = (intermediate, hidden)
        return cls(layer(*wide), layer(*wide), layer(hidden, intermediate))

    @property
    def stored_bytes(self) -> int:
        """Packed: half of the codes, and 2 bits for each."""
        return sum(each.codes.numel() for each in (self.gate, self.up, self.down)) * 5 // 8

    def joined(self, how: Callable[[Tensor, Tensor], Tensor]) -> CodedWeight:
        """Gate and up as one layer."""
        codes = how(self.gate.codes.view(torch.int8), self.up.codes.view(torch.int8))
        assert self.gate.scale is not None
        assert self.up.scale is not None
        return CodedWeight(codes.view(self.gate.codes.dtype), how(self.gate.scale, self.up.scale))


def halves(gate: Tensor, up: Tensor) -> Tensor:
    """All rows of gate, then all of up."""
    return torch.cat([gate, up])


@dataclass(frozen=True)
class Stages:
    """What each stage of a chain gave.

    Attributes:
        x: Codes of the inputs.
        inner: [tokens, intermediate], or gate and up side by side; None where it is codes at once.
        codes: Of what lies between.
        y: [tokens, hidden].
    """

    x: CodedInput
    inner: Tensor | None
    codes: CodedInput
    y: Tensor


@dataclass(frozen=True)
class Chain:
    """One way to compute a block; a call gives [tokens, hidden] in bfloat16.

    Attributes:
        name: In tables.
        rounds: x to codes.
        first: Gate and up, of codes.
        between: To codes; None where `first` gives them.
        last: Down, of codes.
        folds: Whether `first` applies SwiGLU.
        sums: How products are summed: `exact`, `promoted` or `fast`.
        roundings: How often a product is rounded to its dtype.
        step: What a code of `first` stands for, where it gives codes: float32 [1].
    """

    name: str
    rounds: Callable[[Tensor], CodedInput]
    first: Callable[[CodedInput], Tensor]
    between: Callable[[Tensor], CodedInput] | None
    last: Callable[[CodedInput], Tensor]
    folds: bool
    sums: str
    roundings: int = 1
    step: Tensor | None = None

    def stages(self, x: Tensor) -> Stages:
        """All that it computes of x [tokens, hidden]."""
        coded = self.rounds(x)
        inner = self.first(coded)
        if self.between is None:
            codes = CodedInput(inner)
            return Stages(coded, None, codes, self.last(codes))
        codes = self.between(inner)
        return Stages(coded, inner, codes, self.last(codes))

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the block."""
        return self.stages(x).y


def rounds_by_us(dtype: torch.dtype, gate: str | None = None) -> Callable[[Tensor], CodedInput]:
    """`quantize_rows`, behind a gate or not."""
    return lambda x: CodedInput(*quantize_rows(x, dtype, gate=gate))


def rounds_by_compile(
    dtype: torch.dtype, gate: str | None = None
) -> Callable[[Tensor], CodedInput]:
    """What torch.compile makes of the same in torch."""
    compiled = _compiled(KINDS[dtype])
    return lambda x: CodedInput(*compiled(x, {"gate": gate}))


@cache
def _compiled(kind: str) -> Any:
    """One for all copies of a block: torch compiles a function for few callers, then no more."""
    return torch.compile(chain_of(kind), dynamic=False)


def our_chains(weights: Weights, sums: str, step: Tensor) -> list[Chain]:
    """SwiGLU in the first product; the same with codes as its result; and in the quantiser.

    Args:
        weights: The block.
        sums: `exact`, `promoted` or `fast`.
        step: float32 [1], what a code stands for in the second.
    """
    dtype = weights.gate.codes.dtype
    how = "promoted" if sums == "exact" else sums
    folded, side, down = (
        (pack_nm(each.codes), each.scale)
        for each in (weights.joined(interleave_gate_up), weights.joined(halves), weights.down)
    )

    def product(of: Any, x: CodedInput, scale: Tensor | None = None, **more: Any) -> Tensor:
        packed, of_w = of
        out = more.pop("out", None)
        scaling = Scaling(of_w, x.scale if scale is None else scale, out, how)
        return spmm_nm_scaled(packed, x.codes, scaling, **more)

    last, rounds = partial(product, down), rounds_by_us(dtype)
    name = "hopsparse" + ("" if sums == "exact" else f"_{sums}")
    fold = partial(product, folded, act="swiglu")
    to_codes = partial(fold, out=float(step), out_dtype=dtype)
    of_codes = partial(product, down, scale=step)
    gated = rounds_by_us(dtype, "halves")
    return [
        Chain(name, rounds, fold, rounds, last, True, sums),
        Chain(f"{name}_static", rounds, to_codes, None, of_codes, True, sums, step=step),
        Chain(f"{name}_gate", rounds, partial(product, side), gated, last, False, sums),
    ]


def described(weights: Weights, tokens: int, sums: str) -> str:
    """What our products run, as `plan_scaled` says it."""
    dtype = weights.gate.codes.dtype
    how = Scaling(sums="promoted" if sums == "exact" else sums)
    words = []
    for of, act in ((weights.joined(interleave_gate_up), "swiglu"), (weights.down, None)):
        packed = pack_nm(of.codes)
        x = packed.values.new_empty((), dtype=dtype).expand(tokens, packed.shape[1])
        words.append(plan_scaled(packed, x, how, act=act).why)
    return " | ".join(words)


def peer_chains(weights: Weights, *, compiled: bool = True) -> list[Chain]:
    """Every peer that can run here with our quantiser, which gates too.

    Args:
        weights: The block.
        compiled: Each once more with what torch.compile makes of rounding and gate.
    """
    dtype, found = weights.gate.codes.dtype, []
    glues = {"": rounds_by_us} | ({"_compile": rounds_by_compile} if compiled else {})
    for way in coded_peers.coded_ways(dtype):
        try:
            first, last = _products(way, weights)
        except GpuLostError:
            raise
        except Exception as error:
            first = last = partial(_refuse, error)
        shared = (False, way.sums, way.roundings)
        for glue, by in glues.items():
            rounds, between = by(dtype), by(dtype, "halves")
            found.append(Chain(way.name + glue, rounds, first, between, last, *shared))
    return found


def _products(way: Way, weights: Weights) -> tuple[Any, Any]:
    return way.prepare(weights.joined(halves), None), way.prepare(weights.down, None)


def _refuse(error: Exception, x: CodedInput) -> Tensor:
    """What a peer that takes no such weight says wherever it is called."""
    raise error


class Check:
    """Some rows and columns of a block, in float64.

    Args:
        x: [tokens, hidden].
        weights: The block.
    """

    def __init__(self, x: Tensor, weights: Weights) -> None:
        self._x, self._weights = x, weights
        generator = torch.Generator().manual_seed(3)
        rows = one_of_each_block(len(x), generator)
        few = torch.arange(min(len(x), _ROWS_AT_LEAST))
        self.rows = torch.unique(torch.cat([rows, few])).to(x.device)

    def excess(self, chain: Chain) -> float:
        """Largest error of any stage of a chain, as a part of its bound."""
        found, weights = chain.stages(self._x), self._weights
        exact = torch.zeros(1, dtype=torch.float64, device=self._x.device)
        worst = [self._rounded(self._x[self.rows].double(), exact, found.x)]
        if chain.folds:
            worst.append(self._folded(found, chain))
        else:
            assert found.inner is not None
            side = CodedReference(found.x, weights.joined(halves))
            worst.append(side.excess(found.inner, chain.sums, chain.roundings))
            worst.append(self._rounded(*self._gated(found.inner), found.codes))
        if chain.folds and found.inner is not None:
            worst.append(self._rounded(found.inner[self.rows].double(), exact, found.codes))
        down = weights.down
        if chain.step is not None:
            down = replace(down, input_scale=chain.step)
        last = CodedReference(found.codes, down)
        worst.append(last.excess(found.y, chain.sums, chain.roundings))
        return max(worst)

    def rms_error(self, chain: Chain) -> float:
        """How far a chain is off the block in float64 without codes of activations."""
        gate, up, down = (
            each.codes.double() * each.scale.double()  # type: ignore[union-attr]
            for each in (self._weights.gate, self._weights.up, self._weights.down)
        )
        x = self._x[self.rows].double()
        exact = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return float((chain(self._x)[self.rows].double() - exact).norm() / exact.norm())

    def _rounded(self, values: Tensor, off: Tensor, coded: CodedInput) -> float:
        """Codes of rows that are off by so much: the nearest, and the largest is the largest."""
        assert coded.scale is not None
        scale, dtype = coded.scale[self.rows].double(), coded.codes.dtype
        peak, most = values.abs().amax(1, keepdim=True) / scale, LARGEST[dtype]
        slack = off / scale
        codes = coded.codes.view(torch.int8)[self.rows].view(dtype).double()
        error = (values / scale).clamp(-most, most) - codes
        nearest = error.abs() / (rounded_bound((values / scale).clamp(-most, most), dtype) + slack)
        top = slack.amax() + gamma(4, torch.float32) * most
        return max(float(nearest.max()), float(((peak - most).abs() / top).max()))

    def _gated(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        """silu(gate) * up of rows of [tokens, 2 intermediate], and how far float32 may be off."""
        gate, up = inner[self.rows].double().chunk(2, dim=1)
        values = F.silu(gate) * up
        return values, gated_bound(gate) * values.abs()

    def _folded(self, found: Stages, chain: Chain) -> float:
        """Error of SwiGLU in the product: results of 16 bits, or codes."""
        gate, up = (self._side(found.x, each, chain.sums) for each in self._sides)
        right = F.silu(gate[0]) * up[0]
        slack = swiglu_bound(gate[0], up[0], gate[1], up[1])
        if found.inner is not None:
            bound = slack + unit_roundoff(found.inner.dtype) * (right.abs() + slack)
            return float(((found.inner[self.rows].double() - right).abs() / bound).max())
        assert chain.step is not None
        dtype, step = found.codes.codes.dtype, chain.step.double()
        most = LARGEST[dtype]
        values = (right / step).clamp(-most, most)
        codes = found.codes.codes.view(torch.int8)[self.rows].view(dtype).double()
        return float(((values - codes).abs() / (rounded_bound(values, dtype) + slack / step)).max())

    @property
    def _sides(self) -> tuple[CodedWeight, CodedWeight]:
        return self._weights.gate, self._weights.up

    def _side(self, x: CodedInput, weight: CodedWeight, sums: str) -> tuple[Tensor, Tensor]:
        """Gate or up of some rows from codes, and how far a float32 result may be off."""
        assert x.scale is not None
        assert weight.scale is not None
        codes = x.codes.view(torch.int8)[self.rows].view(x.codes.dtype).double()
        w = weight.codes.double()
        scale = x.scale[self.rows].double() * weight.scale.double().T
        exact, off = codes @ w.T, torch.zeros(1, dtype=torch.float64, device=w.device)
        if sums != "exact":
            off = fp8_sum_bound(codes, w, batch=PROMOTED_COLUMNS if sums == "promoted" else None)
        right = exact * scale
        return right, off * scale + gamma(3, torch.float32) * (right.abs() + off * scale)

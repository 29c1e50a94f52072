"""A 2:4 layer of 8-bit codes in a contest: prepared in several ways, checked, timed together.

Each way is checked twice before it is timed. Random codes, those that are timed, are compared with
float64 under the bound of how the way takes its sums. Then small integers must come out bit for
bit: signed ones where sums are exact or fast; odd positive ones, whose sum soon has more bits than
a tensor core keeps, where they are said to be promoted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..errors import ArgumentError
from .clock import gpu
from .codes import (
    CodedInput,
    CodedWeight,
    check_codes,
    integer_input,
    integer_weight,
    random_input,
    random_weight,
)
from .contest import Layer, Way, prepared
from .error import PROMOTED_COLUMNS, fp8_sum_bound, scaled_bound
from .peers import Product
from .reference import cold_copies, one_of_each_block
from .suite import CodedProblem, Problem

_STORED_BITS_A_WEIGHT = 5  # 2:4 in 8 bits: half the values, and an eighth of 8 bits


class CodedReference:
    """Some rows and columns of a product of codes in float64, as `reference.Reference` has them.

    Attributes:
        out: Rows of the weight.

    Args:
        x: [tokens, k].
        weight: [out, k].
        seed: Of the choice.

    Example:
        >>> x = CodedInput(torch.ones(3, 4, dtype=torch.int8))
        >>> weight = CodedWeight(torch.ones(2, 4, dtype=torch.int8))
        >>> CodedReference(x, weight).excess(torch.full((3, 2), 4.0), "exact")
        0.0
    """

    def __init__(self, x: CodedInput, weight: CodedWeight, *, seed: int = 2) -> None:
        self.out = weight.codes.shape[0]
        generator, device = torch.Generator().manual_seed(seed), weight.device
        rows = one_of_each_block(x.codes.shape[0], generator).to(device)
        columns = one_of_each_block(self.out, generator).to(device)
        of_w = weight.scale if weight.scale is None else weight.scale.view(-1)
        self._parts = (
            _Part(rows, None, x, weight, of_w),
            _Part(None, columns, x, weight, of_w),
        )

    def excess(self, y: Tensor, sums: str, roundings: int = 1) -> float:
        """Largest error of y [tokens, out] as a part of its bound; infinite if y is not finite.

        Args:
            y: The product.
            sums: How they were taken: `exact`, `promoted` or `fast`.
            roundings: How often y was rounded to its dtype.
        """
        if not bool(torch.isfinite(y).all()):
            return float("inf")
        return max(part.excess(y, sums, roundings) for part in self._parts)

    def equals(self, y: Tensor) -> bool:
        """Whether y is the nearest number of its dtype wherever it is looked at."""
        return all(part.equals(y) for part in self._parts)


class _Part:
    """Some rows or some columns of a product."""

    def __init__(
        self,
        rows: Tensor | None,
        columns: Tensor | None,
        x: CodedInput,
        weight: CodedWeight,
        of_w: Tensor | None,
    ) -> None:
        self._rows, self._columns = rows, columns
        self._x = _taken(x.codes, rows).double()
        self._w = _taken(weight.codes, columns).double()
        self._sums = self._x @ self._w.T
        self._errors: dict[str, Tensor] = {}
        scale = torch.ones(1, dtype=torch.float64, device=weight.device)
        if weight.input_scale is not None:
            scale = scale * weight.input_scale.double()
        if x.scale is not None:
            scale = scale * (x.scale if rows is None else x.scale[rows]).double()
        if of_w is not None:
            each = of_w if columns is None or len(of_w) == 1 else of_w[columns]
            scale = scale * each.double()
        self._scale = scale

    def excess(self, y: Tensor, sums: str, roundings: int) -> float:
        if sums not in self._errors:
            self._errors[sums] = _sum_error(self._x, self._w, sums)
        bound = scaled_bound(self._sums, self._errors[sums], self._scale, y.dtype, roundings)
        return float(((self._seen(y).double() - self._sums * self._scale).abs() / bound).max())

    def equals(self, y: Tensor) -> bool:
        return torch.equal(self._seen(y), (self._sums * self._scale).to(y.dtype))

    def _seen(self, y: Tensor) -> Tensor:
        return y[self._rows] if self._columns is None else y[:, self._columns]


@dataclass
class CodedLayer(Layer):
    """The copies of one random 2:4 layer of codes, prepared in every way.

    Attributes:
        dtype: int8 or float8_e4m3fn.
        scaling: One of `SCALINGS`.
        exact: By way: its product with small integers, or the reason why it has none.
    """

    dtype: torch.dtype = torch.int8
    scaling: str = "none"
    exact: list[list[Product] | str] = field(default_factory=list)

    @classmethod
    def drawn(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        scaling: str,
        ways: Sequence[Way],
        *,
        device: torch.device | int | None = None,
        seed: int = 0,
    ) -> CodedLayer:
        """Draw weights, as many as it takes to defeat the L2 cache, and prepare them.

        Args:
            shape: [out, k], k in whole groups of 4.
            dtype: int8 or float8_e4m3fn.
            scaling: One of `SCALINGS`.
            ways: The contenders; each says how it takes sums.
            device: GPU; the current one if left out.
            seed: Of the weights.

        Raises:
            ArgumentError: Another dtype or scaling.
            UnsupportedError: There is no GPU.
            GpuLostError: A kernel of a way failed; it names the way.
        """
        check_codes(dtype, scaling)
        where = gpu(device)
        generator = torch.Generator(where).manual_seed(seed)
        count = cold_copies(shape, _STORED_BITS_A_WEIGHT, where)
        weights = [random_weight(shape, dtype, scaling, generator) for _ in range(count)]
        layer = cls(ways, list(weights), [prepared(way, weights) for way in ways], dtype, scaling)
        layer.exact = [prepared(way, [layer.integer_weights[way.sums]]) for way in ways]
        return layer

    @cached_property
    def integer_weights(self) -> dict[str, CodedWeight]:
        """Weights of small integers in the places of the first one, for each kind of sums."""
        return {
            sums: integer_weight(self.weights[0], sums)
            for sums in dict.fromkeys(way.sums for way in self.ways)
        }

    def _excess_on(self, x: CodedInput) -> Callable[[Way, list[Product]], float]:
        references = {index: CodedReference(x, self.weights[index]) for index in (0, -1)}
        shape = (x.codes.shape[0], self.weights[0].codes.shape[0])

        def excess(way: Way, products: list[Product]) -> float:
            worst = 0.0
            for index, reference in references.items():
                # Where the allocator will likely put the result: what is not written shows.
                torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.device)
                y = products[index](x)
                worst = max(worst, reference.excess(y, way.sums, way.roundings))
            return worst if self._is_exact(way, x) else float("inf")

        return excess

    def _is_exact(self, way: Way, x: CodedInput) -> bool:
        """Whether a way multiplies small integers, as many as x has, bit for bit.

        Who rounds twice is held to two roundings of exact sums: of what is in between, a library
        may keep more.
        """
        found = self.exact[list(self.ways).index(way)]
        if isinstance(found, str):
            raise ArgumentError(
                f"{way.name} took random codes, and refuses integers: {found}",
                need="a product of any codes",
                hint="another peer",
            )
        integers = integer_input(x, way.sums)
        y = found[0](integers)
        reference = CodedReference(integers, self.integer_weights[way.sums])
        if way.roundings == 1:
            return reference.equals(y)
        return reference.excess(y, "exact", way.roundings) <= 1

    def _inputs(self, tokens: int, seed: int) -> CodedInput:
        generator = torch.Generator(self.device).manual_seed(seed)
        k = self.weights[0].codes.shape[1]
        return random_input((tokens, k), self.dtype, self.scaling, generator)


def layer_for(problem: Problem, ways: Sequence[Way]) -> Layer:
    """A random layer of the sides, dtype and scaling of a problem, prepared in every way.

    Raises:
        UnsupportedError: There is no GPU.
        GpuLostError: A kernel of a way failed; it names the way.
    """
    shape, dtype = (problem.out, problem.k), problem.torch_dtype
    if isinstance(problem, CodedProblem):
        return CodedLayer.drawn(shape, dtype, problem.scaling, ways)
    return Layer.random(shape, dtype, ways)


def _taken(codes: Tensor, index: Tensor | None) -> Tensor:
    """Rows of codes; torch does not index all 8-bit floats."""
    return codes if index is None else codes.view(torch.int8)[index].view(codes.dtype)


def _sum_error(x: Tensor, w: Tensor, sums: str) -> Tensor:
    if sums == "exact":
        return torch.zeros(1, dtype=torch.float64, device=x.device)
    return fp8_sum_bound(x, w, batch=PROMOTED_COLUMNS if sums == "promoted" else None)

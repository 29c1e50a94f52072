"""What users have today for a product of 8-bit codes: cuBLAS and cuSPARSELt at their strongest.

A peer of 8 bits has the shape of those in `peers`, with a `CodedWeight` and a `CodedInput` where
those have tensors. Results are bfloat16, but int32 sums where cuBLAS leaves int8 without scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError
from .codes import CodedInput, CodedWeight
from .contest import Way
from .cusparselt import (
    Algorithm,
    check_available,
    fastest,
    multiplied,
    padded,
    why_unavailable,
)
from .rescale import rescale

CodedProduct = Callable[[CodedInput], Tensor]

# torch._int_mm wants more than 16 rows; 32 is the next that its kernels align to.
_LEAST_INT8_TOKENS = 32


def coded_ways(dtype: torch.dtype, *, split_k: bool = False) -> list[Way]:
    """The peers that can run here, as contenders.

    Args:
        dtype: Of the codes: int8 or float8_e4m3fn.
        split_k: Let cuSPARSELt try slices of k with its best algorithms, too.

    Raises:
        ArgumentError: Another dtype.

    Example:
        >>> [(way.name, way.sums) for way in coded_ways(torch.float8_e4m3fn)][0]
        ('cublas', 'fast')
    """
    if dtype not in _DENSE:
        raise ArgumentError(
            f"peers of 8 bits for {dtype}",
            need=" or ".join(map(str, _DENSE)),
            hint="torch.float8_e4m3fn",
        )
    dense, sums = _DENSE[dtype]
    ways = [Way(dense.NAME, dense.prepare, dense.describe, sums)]
    if why_unavailable() is None:
        sparse = CodedCuSPARSELt
        prepare = partial(sparse.prepare, split_k=split_k)
        # Scales of tokens are multiplied in a pass of its own, over results of 16 bits.
        ways.append(Way(sparse.NAME, prepare, sparse.describe, sums, roundings=2))
    return ways


class ScaledMM:
    """The dense product of E4M3, `torch._scaled_mm`, with sums that stay in the tensor cores."""

    NAME = "cublas"

    @staticmethod
    def prepare(weight: CodedWeight, bias: Tensor | None = None) -> CodedProduct:
        """Make the product of codes [tokens, k] for a weight [out, k], multiples of 16.

        Example:
            >>> codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
            >>> ScaledMM.prepare(CodedWeight(codes))(CodedInput(codes))[0, 0].item()
            16.0
        """
        one = torch.ones(1, device=weight.device)
        of_w = one if weight.scale is None else weight.scale.t().contiguous()
        static = one if weight.input_scale is None else weight.input_scale
        return partial(_scaled_mm, weight.codes.t(), of_w, static)

    @staticmethod
    def describe(product: CodedProduct, x: CodedInput) -> str:
        """What runs; cuBLAS chooses for itself."""
        return "dense, fast sums" + (", scales of rows" if x.scale is not None else "")


class IntMM:
    """The dense product of int8, `torch._int_mm`, and one kernel for scales."""

    NAME = "cublas"

    @staticmethod
    def prepare(weight: CodedWeight, bias: Tensor | None = None) -> CodedProduct:
        """Make the product of codes [tokens, k] for a weight [out, k], multiples of 8.

        Without scales the result is its int32 sums: a user who wants others has another kernel.

        Example:
            >>> codes = torch.ones(16, 16, dtype=torch.int8)
            >>> IntMM.prepare(CodedWeight(codes))(CodedInput(codes))[0, 0].item()
            16
        """
        return partial(_int_mm, weight.codes.t(), scales_of_columns(weight))

    @staticmethod
    def describe(product: CodedProduct, x: CodedInput) -> str:
        """What runs; cuBLAS chooses for itself."""
        scaled = x.scale is not None or product.args[1] is not None  # type: ignore[attr-defined]
        return "dense, then a kernel for scales" if scaled else "dense, int32 sums"


class CodedCuSPARSELt:
    """The 2:4 product of cuSPARSELt by the algorithm that is fastest for the problem."""

    NAME = "cusparselt"

    @staticmethod
    def prepare(
        weight: CodedWeight, bias: Tensor | None = None, *, split_k: bool = False
    ) -> FastestCoded:
        """Compress a weight; the algorithm is chosen at the first call, once a problem.

        Args:
            weight: [out, k] on a GPU, 2:4, int8 or float8_e4m3fn.
            bias: Not read.
            split_k: Try slices of k with the best algorithms too.

        Raises:
            UnsupportedError: There is no GPU or no cuSPARSELt, or no algorithm takes the problem.
        """
        check_available()
        columns = scales_of_columns(weight)
        return FastestCoded(torch._cslt_compress(weight.codes), len(weight.codes), columns, split_k)

    @staticmethod
    def describe(product: FastestCoded, x: CodedInput) -> str:
        """The algorithm that was chosen, and whether a kernel for scales comes behind it."""
        by = product.algorithm(x)
        behind = x.scale is not None or (product.columns is not None and not by.alpha)
        return f"{by}{', then a kernel for scales' if behind else ''}"


@dataclass(frozen=True, eq=False)
class FastestCoded:
    """A compressed weight of codes, multiplied by the algorithm that measured fastest.

    Attributes:
        packed: What `torch._cslt_compress` made.
        out: Rows of the weight.
        columns: float32 [out], what the sums of each are multiplied by, or None.
        split_k: Whether slices of k are tried.
    """

    packed: Tensor
    out: int
    columns: Tensor | None
    split_k: bool

    def __call__(self, x: CodedInput) -> Tensor:
        """Multiply codes [tokens, k]; returns bfloat16 [tokens, out]."""
        return self.run(x, self.algorithm(x))

    def algorithm(self, x: CodedInput) -> Algorithm:
        """The fastest algorithm for as many tokens as x has; measured once a problem."""
        tokens, k = x.codes.shape
        scales = (self.columns is not None, x.scale is not None)
        problem = (self.out, padded(tokens), k, x.codes.dtype, *scales, self.split_k)
        return fastest(self, x, x.codes, problem)

    def run(self, x: CodedInput, by: Algorithm) -> Tensor:
        """Multiply codes [tokens, k] by one algorithm."""
        alpha = self.columns if by.alpha else None
        y = multiplied(self.packed, x.codes, by, alpha=alpha, out_dtype=torch.bfloat16)
        columns = None if by.alpha else self.columns
        return y if x.scale is None and columns is None else rescale(y, x.scale, columns)

    def forms(self, number: int) -> tuple[Algorithm, ...]:
        """An id without scales of columns, and with them where there are some."""
        plain = Algorithm(number)
        return (plain,) if self.columns is None else (plain, Algorithm(number, alpha=True))


def scales_of_columns(weight: CodedWeight) -> Tensor | None:
    """What the sums of each out-feature are multiplied by before x is seen: float32 [out] or None.

    One number is repeated: what cuSPARSELt takes as one number it has the host read, which no
    CUDA graph can capture.

    Example:
        >>> codes, half = torch.ones(3, 4, dtype=torch.int8), torch.tensor([0.5])
        >>> scales_of_columns(CodedWeight(codes, half, half))
        tensor([0.2500, 0.2500, 0.2500])
    """
    if weight.scale is None:
        return None
    scale = weight.scale.view(-1)
    if weight.input_scale is not None:
        scale = scale * weight.input_scale
    return scale.expand(len(weight.codes)).contiguous()


def _scaled_mm(w: Tensor, of_w: Tensor, static: Tensor, x: CodedInput) -> Tensor:
    of_x = static if x.scale is None else x.scale
    return torch._scaled_mm(x.codes, w, of_x, of_w, out_dtype=torch.bfloat16, use_fast_accum=True)


def _int_mm(w: Tensor, columns: Tensor | None, x: CodedInput) -> Tensor:
    tokens = len(x.codes)
    missing = max(0, _LEAST_INT8_TOKENS - tokens)
    codes = F.pad(x.codes, (0, 0, 0, missing)) if missing else x.codes
    sums = torch._int_mm(codes, w)[:tokens]
    return sums if columns is None and x.scale is None else rescale(sums, x.scale, columns)


_DENSE: dict[torch.dtype, tuple[type[IntMM] | type[ScaledMM], str]] = {
    torch.int8: (IntMM, "exact"),
    torch.float8_e4m3fn: (ScaledMM, "fast"),
}

"""What users have today for y = x @ w.T + bias: cuBLAS, and cuSPARSELt in its strongest form.

A peer has `NAME`; `available()`, which says why it cannot run here; `prepare(weight, bias)`, which
makes a function of x; and `describe(product, x)`, which says what that runs. `benchmarks/rivals`
has more of them in the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cusparselt import Algorithm as Algorithm
from .cusparselt import check_available, fastest, multiplied, padded, why_unavailable

# Of x [tokens, k]: a tensor, or what `hopsparse.measure.codes` has in its place.
Product = Callable[[Any], Tensor]


class CuBLAS:
    """The dense product, as `torch.nn.functional.linear` runs it."""

    NAME = "cublas"

    @staticmethod
    def available() -> str | None:
        """None: torch always has it."""
        return None

    @staticmethod
    def prepare(weight: Tensor, bias: Tensor | None = None) -> Product:
        """Make the product of x [tokens, k] for a weight [out, k] and a bias [out] or None.

        Example:
            >>> CuBLAS.prepare(torch.ones(2, 4))(torch.ones(1, 4))
            tensor([[4., 4.]])
        """
        return partial(_linear, weight, bias)

    @staticmethod
    def describe(product: Product, x: Tensor) -> str:
        """What runs; cuBLAS chooses for itself."""
        return "dense"


class CuSPARSELt:
    """The 2:4 product of cuSPARSELt by the algorithm that is fastest for the problem."""

    NAME = "cusparselt"

    @staticmethod
    def available() -> str | None:
        """Why it cannot run here, or None."""
        return why_unavailable()

    @staticmethod
    def prepare(weight: Tensor, bias: Tensor | None = None, *, split_k: bool = False) -> Fastest:
        """Compress a weight; the algorithm is chosen at the first call, once a problem.

        Args:
            weight: [out, k] on a GPU, 2:4, bfloat16 or float16.
            bias: [out] or None.
            split_k: Try slices of k with the best algorithms too.

        Raises:
            UnsupportedError: See `available`, or no algorithm takes the problem.
        """
        check_available()
        return Fastest(torch._cslt_compress(weight), weight.shape[0], bias, split_k)

    @staticmethod
    def describe(product: Fastest, x: Tensor) -> str:
        """The algorithm that was chosen for as many tokens."""
        return str(product.algorithm(x))


PEERS = (CuBLAS, CuSPARSELt)


@dataclass(frozen=True, eq=False)
class Fastest:
    """A compressed weight, multiplied by the algorithm that measured fastest.

    Attributes:
        packed: What `torch._cslt_compress` made.
        out: Rows of the weight.
        bias: [out] or None.
        split_k: Whether slices of k are tried.
    """

    packed: Tensor
    out: int
    bias: Tensor | None
    split_k: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, k]; returns [tokens, out]."""
        return self.run(x, self.algorithm(x))

    def algorithm(self, x: Tensor) -> Algorithm:
        """The fastest algorithm for as many tokens as x has; measured once a problem."""
        problem = (self.out, padded(len(x)), x.shape[1], x.dtype, self.bias is not None)
        return fastest(self, x, x, (*problem, self.split_k))

    def run(self, x: Tensor, by: Algorithm) -> Tensor:
        """Multiply x [tokens, k] by one algorithm."""
        return multiplied(self.packed, x, by, bias=self.bias)

    def forms(self, number: int) -> tuple[Algorithm, ...]:
        """How an algorithm id can be called."""
        return (Algorithm(number),)


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias)

"""PyTorch's 2:4 tensor class, as its users call it: no algorithm is chosen for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

NAME = "torch_class"


def available() -> str | None:
    """Why it cannot run here, or None."""
    return None if torch.cuda.is_available() else "no GPU"


def prepare(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Make the product of x [tokens, k] for a 2:4 weight [out, k] on a GPU."""
    with warnings.catch_warnings():
        # It says once that the class is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        stored = torch.sparse.to_sparse_semi_structured(weight)
    return lambda x: F.linear(x, stored, bias)


def describe(product: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """What runs: the class takes the default algorithm of cuSPARSELt."""
    return "default algorithm"

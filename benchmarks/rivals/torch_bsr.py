"""PyTorch's own block-sparse product: `linear` by a tensor in BSR layout, a Triton kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

NAME = "torch_bsr"


def available() -> str | None:
    """Why it cannot run here, or None."""
    return None if torch.cuda.is_available() else "no GPU"


def prepare(
    weight: Tensor, bias: Tensor | None = None, *, block: int = 64
) -> Callable[[Tensor], Tensor]:
    """Make the product of x [tokens, k] for a weight [out, k] on a GPU, stored in square blocks."""
    with warnings.catch_warnings():
        # It says once that the layout is in beta.
        warnings.simplefilter("ignore", UserWarning)
        stored = weight.to_sparse_bsr((block, block))
    return lambda x: F.linear(x, stored, bias)


def describe(product: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """What runs: torch has tables of tuned settings by shape, and a default beside them."""
    return "torch's own choice"

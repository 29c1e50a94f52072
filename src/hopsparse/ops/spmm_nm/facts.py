"""What a launch of spmm_nm is told beside its sizes and tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .kernel import Config


@dataclass(frozen=True)
class Epilogue:
    """What happens to a sum before it is stored; what a kernel is compiled for.

    Attributes:
        out_dtype: Dtype of y.
        activation: One of `kernel.ACTIVATIONS`.
        has_residual: Whether something is added at the end.
    """

    out_dtype: torch.dtype
    activation: str = "none"
    has_residual: bool = False


@dataclass(frozen=True)
class Scales:
    """Of an 8-bit product: where they lie, and how they are laid out.

    Attributes:
        w: Address of float32 [out, groups].
        x: Address of float32 [tokens] or [1].
        groups: Scales of a row of w.
        x_step: 1 where each token has its own, else 0.
        out_multiplier: Of a result in 8 bits.
        w_shift: 2 to it columns share a scale of w of 4 bits.
    """

    w: int = 0
    x: int = 0
    groups: int = 1
    x_step: int = 0
    out_multiplier: float = 1.0
    w_shift: int = 0


@dataclass(frozen=True)
class Experts:
    """Of a product with several weights: whose tokens end where.

    Attributes:
        ends: Address of int32 [count].
        count: Weights.
    """

    ends: int = 0
    count: int = 0


@dataclass(frozen=True)
class PlainCall:
    """All of a call but its tensors, where sums are taken in one way.

    Attributes:
        activation: One of `kernel.ACTIVATIONS`.
        out_dtype: Of the result.
        config: The tile; None chooses one.
    """

    activation: str
    out_dtype: torch.dtype
    config: Config | None = None

"""Inputs of a quantized layer, as its scheme computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Quantized
from ..quant import fake_inputs, round_inputs


def rounded(x: Tensor, form: Quantized, scale: Tensor | None) -> Tensor:
    """The inputs that a scheme computes with; gradients pass through.

    Args:
        x: [..., in_features].
        form: The weight; its tensors are not read.
        scale: `input_scale` of the layer, where its scheme is static.
    """
    fits = x.ndim > 0 and x.shape[-1] == form.shape[1] and x.dtype == form.dtype
    if not fits or form.scheme.activations == "none":
        return x  # What does not fit is refused where it is multiplied.
    scale = scale if form.scheme.static else None
    if scale is not None and scale.device != x.device:
        return x
    seen = torch.is_grad_enabled() and x.requires_grad
    return (fake_inputs if seen else round_inputs)(x, form.scheme, scale)

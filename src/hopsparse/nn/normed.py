"""A layer behind an RMSNorm: norm and rounding in one launch, where the layer multiplies codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..formats import Quantized
from ._codes import product_of_codes, put_together, takes_codes
from .sparse_linear import SparseLinear


def rms_eps(norm: nn.Module) -> float | None:
    """The number that a norm adds to the mean square; None if it is no plain RMSNorm.

    Example:
        >>> rms_eps(nn.RMSNorm(8, eps=1e-5)), rms_eps(nn.LayerNorm(8))
        (1e-05, None)
    """
    if not type(norm).__name__.endswith("RMSNorm") or set(norm._parameters) != {"weight"}:
        return None
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if type(eps) is float else None


def after_norm(layer: SparseLinear, x: Tensor, norm: nn.Module) -> Tensor:
    """What `layer(norm(x))` is, in a launch less where the layer rounds its inputs in a kernel.

    There, what the norm gives is not rounded to 16 bits before it is rounded to 8 or 4.

    Args:
        layer: The layer.
        x: [..., in_features], as the layer takes it.
        norm: An RMSNorm, as `rms_eps` knows them.

    Returns:
        [..., out_features].

    Example:
        >>> layer = SparseLinear.from_linear(nn.Linear(8, 2, bias=False), "csr")
        >>> after_norm(layer, torch.ones(3, 8), nn.RMSNorm(8)).shape
        torch.Size([3, 2])
    """
    form, eps, weight = layer._form, rms_eps(norm), norm._parameters.get("weight")
    if eps is not None and weight is not None and isinstance(form, Quantized):
        learns = torch.is_grad_enabled() and weight.requires_grad
        fits = form.scheme.activations != "none" and weight.dtype == x.dtype and not learns
        if (
            fits
            and not torch.is_autocast_enabled(x.device.type)
            and takes_codes(form, x, layer.bias)
        ):
            w = put_together(layer, form)
            return product_of_codes(w, x, layer.bias, layer.act, (weight, eps))
    y: Tensor = layer(norm(x))
    return y

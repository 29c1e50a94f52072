"""A layer behind an RMSNorm: norm and rounding in one launch, or the norm at least in one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..formats import Quantized
from ._codes import product_of_codes, put_together, takes_codes
from .sparse_linear import SparseLinear

# Those that multiply by their weight as it is: Gemma's adds 1 to it.
_NORMS = ("RMSNorm", "LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def rms_eps(norm: nn.Module) -> float | None:
    """The number that a norm adds to the mean square; None if it is no plain RMSNorm.

    Example:
        >>> rms_eps(nn.RMSNorm(8, eps=1e-5)), rms_eps(nn.LayerNorm(8))
        (1e-05, None)
    """
    if type(norm).__name__ not in _NORMS or set(norm._parameters) != {"weight"}:
        return None
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if type(eps) is float else None


def after_norm(layer: SparseLinear, x: Tensor, norm: nn.Module) -> Tensor:
    """What `layer(norm(x))` is, in a launch less where the layer rounds its inputs in a kernel.

    There, what the norm gives is not rounded to 16 bits before it is rounded to 8 or 4. Elsewhere
    on a GPU the norm is one launch of torch, which rounds once, behind its weight.

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
    learns = weight is not None and torch.is_grad_enabled() and weight.requires_grad
    if eps is not None and weight is not None and isinstance(form, Quantized):
        fits = form.scheme.activations != "none" and weight.dtype == x.dtype and not learns
        if (
            fits
            and not torch.is_autocast_enabled(x.device.type)
            and takes_codes(form, x, layer.bias)
        ):
            w = put_together(layer, form)
            return product_of_codes(w, x, layer.bias, layer.act, (weight, eps))
    y: Tensor = layer(norm(x) if learns or not x.is_cuda else _in_one_launch(norm, x))
    return y


def _in_one_launch(norm: nn.Module, x: Tensor) -> Tensor:
    """[..., features]; norms of transformers launch each operation, unless they are compiled."""
    eps, weight = rms_eps(norm), norm._parameters.get("weight")
    asis = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
    if eps is None or weight is None or weight.dtype != x.dtype or asis:
        y: Tensor = norm(x)
        return y
    return F.rms_norm(x, weight.shape, weight, eps)

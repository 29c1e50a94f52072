"""What quantize_rows means, in torch: `hopsparse.quant` on float32 values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...formats.quantized import pack_nibbles
from ...formats.scheme import Scheme
from ...quant.grid import to_codes
from ...quant.inputs import input_scales

_GRIDS = {"int4_in_e4m3": "int4"}  # kinds that are other codes, spelled otherwise


def quantize_rows(
    x: Tensor,
    kind: str,
    *,
    scale: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> list[Tensor]:
    """Codes, scales and, with a residual, sums, of arguments that were checked; on any device.

    Args:
        x: [..., k], or [..., 2 k] where there is a gate.
        kind: "int8", "fp8", "int4" or "int4_in_e4m3".
        scale: float32 [1] or None.
        norm: [k] or None.
        eps: Added to the mean square.
        gate: "halves", "interleaved" or None.
        residual: As x, or None.
    """
    values, sums = x.contiguous().float(), []
    if residual is not None:
        values = values + residual.float()
        sums = [values.to(x.dtype)]
    if norm is not None:
        values = normalised(values, norm, eps)
    if gate is not None:
        values = gated(values, gate)
    scales = row_scales(values, _GRIDS.get(kind, kind), scale)
    return [codes_of(values, scales, kind), scales, *sums]


def normalised(values: Tensor, norm: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32: [..., k]."""
    mean = values.square().mean(-1, keepdim=True)
    return values * torch.rsqrt(mean + eps) * norm.float()


def gated(values: Tensor, gate: str) -> Tensor:
    """silu(gate) * up in float32: [..., 2 k] -> [..., k]."""
    if gate == "halves":
        gates, ups = values.chunk(2, dim=-1)
    else:
        gates, ups = values[..., ::2], values[..., 1::2]
    return F.silu(gates) * ups


def row_scales(values: Tensor, kind: str, scale: Tensor | None) -> Tensor:
    """float32 [..., 1]; NaN for a row whose codes cannot say that it is not finite."""
    if values.shape[-1] == 0:
        found = values.new_ones((*values.shape[:-1], 1)) if scale is None else scale
        return _positive(found).expand(*values.shape[:-1], 1).contiguous()
    if scale is None:
        return _positive(input_scales(values, Scheme("int8", 0, kind)))
    static = _positive(scale).expand(*values.shape[:-1], 1)
    if kind == "fp8":
        return static.contiguous()
    return torch.where(values.isfinite().all(-1, keepdim=True), static, torch.nan)


def codes_of(values: Tensor, scales: Tensor, kind: str) -> Tensor:
    """[..., k], or [..., k / 2] of int4. What has no scale is NaN in E4M3, and 0 in integers."""
    grid = _GRIDS.get(kind, kind)
    codes = to_codes(torch.where(values.isfinite(), values, torch.nan), scales, grid)
    if kind == "fp8":
        # The sign of a NaN is that of the processor.
        return codes.masked_fill_(codes.isnan(), torch.nan).to(torch.float8_e4m3fn)
    whole = codes.nan_to_num_(0.0).to(torch.int8)
    if kind == "int8":
        return whole
    if kind != "int4":
        return whole.to(torch.float8_e4m3fn)
    return pack_nibbles(whole).view(torch.int8).view(*whole.shape[:-1], whole.shape[-1] // 2)


def _positive(scales: Tensor) -> Tensor:
    """Zero, negative numbers and infinity are no scales."""
    return torch.where((scales > 0) & scales.isfinite(), scales, torch.nan)

"""Quantized 2:4 layers on an H100 or H200: codes are multiplied, not decoded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hopsparse.formats import NMPattern, Quantized
from hopsparse.formats.quantized import unpack_nibbles
from hopsparse.measure.error import (
    PROMOTED_COLUMNS,
    finish_bound,
    fp8_sum_bound,
    gamma,
    product_bound,
    scaled_bound,
    unit_roundoff,
)
from hopsparse.nn import SparseLinear
from hopsparse.ops import quantize_rows
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix


def defined(w: Quantized, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer means in float64, and how far bfloat16 results may be off."""
    kind, none = w.scheme.activations, torch.zeros(1)
    if kind == "none":
        dense = w.to_dense()
        right = x.double() @ dense.double().T + bias.double()
        return right, product_bound(x, dense, torch.float32, torch.bfloat16, bias)
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, kind)
    codes, scales = quantize_rows(x, dtype)
    if kind == "int4":
        codes = unpack_nibbles(codes.view(torch.uint8), x.shape)
    wide, rows = w.to_dense(torch.float32), codes.float()
    sums = rows.double() @ wide.double().T
    if w.scheme.weights == "int8" or kind == "int8":
        groups = wide.shape[1] // (w.scheme.group or wide.shape[1])
        off = gamma(groups + 1, torch.float32) * (rows.abs() @ wide.abs().T).double()
    else:
        # 4-bit inputs are multiplied with the exponent of 8, whatever they are.
        aligned = torch.full_like(rows, 8.0).copysign(rows) if kind == "int4" else rows
        off = fp8_sum_bound(aligned, wide, batch=w.scheme.group or PROMOTED_COLUMNS)
    scaled = scaled_bound(sums, off, scales.double(), torch.float32)
    right = sums * scales.double() + bias.double()
    size = (sums * scales.double()).abs() + bias.double().abs()
    end = finish_bound(size, right, none, torch.bfloat16)
    return right, scaled * (1 + unit_roundoff(torch.bfloat16)) + end


@pytest.mark.parametrize(
    "scheme", ["int8", "fp8", "fp8/int4", "int4:32", "int4:64", "int4:128/int8", "int4:128/fp8"]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_multiplies_codes(scheme: str, has_bias: bool, device: torch.device) -> None:
    dense = magnitude(torch.randn(264, 576).bfloat16(), NMPattern(2, 4))
    bias = torch.randn(264).bfloat16() if has_bias else None
    w, x = quantize_matrix(dense, f"2:4+{scheme}"), torch.randn(33, 576).bfloat16()
    layer, on_gpu = SparseLinear(w, bias).to(device), x.to(device)
    with torch.no_grad():
        y = layer(on_gpu)
        assert layer.plan(on_gpu).name == "kernel"  # outside, a bias would take a gradient
        assert torch.equal(layer(on_gpu.view(3, 11, 576)).view(33, 264), y)
    assert layer._decoded is None
    assert y.dtype == torch.bfloat16
    right, bound = defined(w, x, torch.zeros(264).bfloat16() if bias is None else bias)
    assert ((y.double().cpu() - right).abs() <= bound).all()


def test_with_a_gradient_to_keep_it_decodes(device: torch.device) -> None:
    dense = magnitude(torch.randn(64, 128).bfloat16(), NMPattern(2, 4))
    layer = SparseLinear(quantize_matrix(dense, "2:4+int8")).to(device)
    x = torch.randn(5, 128, device=device).bfloat16().requires_grad_()
    assert layer.plan(x).name == "dense"
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("scheme", ["fp8", "int4:128/int8"])
def test_a_compiled_layer_multiplies_codes(scheme: str, device: torch.device) -> None:
    torch.compiler.reset()
    dense = magnitude(torch.randn(64, 256).bfloat16(), NMPattern(2, 4))
    layer = SparseLinear(quantize_matrix(dense, f"2:4+{scheme}")).to(device)
    x = torch.randn(5, 256, device=device).bfloat16()
    with torch.no_grad():
        expected = layer(x)
        made = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert torch.equal(made(x), expected)

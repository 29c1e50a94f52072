"""Quantized 2:4 layers on an H100 or H200: codes are multiplied, not decoded."""

from __future__ import annotations

import pytest
import torch

from hopsparse.formats import NMPattern
from hopsparse.nn import SparseLinear
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix


@pytest.mark.parametrize(
    "scheme", ["int8", "fp8", "fp8/int4", "int4:64", "int4:128/int8", "int4:128/fp8"]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_multiplies_codes(scheme: str, has_bias: bool, device: torch.device) -> None:
    dense = magnitude(torch.randn(264, 576).bfloat16(), NMPattern(2, 4))
    bias = torch.randn(264).bfloat16() if has_bias else None
    layer = SparseLinear(quantize_matrix(dense, f"2:4+{scheme}"), bias)
    x = torch.randn(2, 33, 576).bfloat16()
    with torch.no_grad():
        right = layer(x).double()
        moved = layer.to(device)
        on_gpu = x.to(device)
        y = moved(on_gpu)
        assert moved.plan(on_gpu).name == "kernel"  # outside, a bias would take a gradient
    assert moved._decoded is None
    assert y.dtype == torch.bfloat16
    # On the CPU codes times scales are rounded to bfloat16 before they are multiplied.
    error = (y.double().cpu() - right).norm() / right.norm()
    assert error < 2**-7


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

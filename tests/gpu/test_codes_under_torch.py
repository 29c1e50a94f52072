"""Products of codes on an H100 or H200 where torch differentiates, maps or records the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hopsparse.formats import NM, Quantized
from hopsparse.ops import Scaling, spmm_nm_int4, spmm_nm_scaled
from hopsparse.ops.spmm_nm.int4.op import plan_int4
from hopsparse.ops.spmm_nm.scaled.op import plan_scaled
from hopsparse.quant import quantize_matrix

OUT, K, TOKENS = 128, 512, 5


def kept(device: torch.device) -> Tensor:
    dense = torch.randint(-7, 8, (OUT, K), device=device)
    dense.view(OUT, -1, 4)[..., 1::2] = 0
    return dense


@pytest.fixture
def eight(device: torch.device) -> tuple[NM, Tensor]:
    x = torch.randint(-8, 9, (TOKENS, K), device=device)
    return NM.from_dense(kept(device).to(torch.int8)), x.to(torch.int8)


@pytest.fixture
def four(device: torch.device) -> tuple[Quantized, Tensor]:
    """Scales of 1, so that all is exact."""
    scales = torch.ones(OUT, K // 128, device=device)
    w = quantize_matrix(kept(device).bfloat16(), "2:4+int4:128", scales)
    return w, torch.randint(-2, 3, (TOKENS, K), device=device).bfloat16()


def test_a_tangent_is_kept_and_a_map_is_the_batch(
    eight: tuple[NM, Tensor], four: tuple[Quantized, Tensor]
) -> None:
    (w8, x8), (w4, x4) = eight, four

    def shifted(bias: Tensor) -> Tensor:
        return spmm_nm_scaled(w8, x8, bias=bias, out_dtype=torch.float32)

    bias = torch.zeros(OUT, device=x8.device)
    assert plan_scaled(w8, x8).name == plan_int4(w4, x4).name == "kernel"
    _, tangent = torch.func.jvp(shifted, (bias,), (torch.ones_like(bias),))
    assert torch.equal(tangent, torch.ones_like(tangent))
    _, moved = torch.func.jvp(lambda x: spmm_nm_int4(w4, x), (x4,), (x4,))
    assert torch.equal(moved.bfloat16(), spmm_nm_int4(w4, x4))
    batch = torch.stack([x8, x8.flip(0)])
    assert torch.equal(
        torch.vmap(lambda x: spmm_nm_scaled(w8, x))(batch), spmm_nm_scaled(w8, batch)
    )
    rows = torch.stack([x4, x4.flip(0)])
    assert torch.equal(torch.vmap(lambda x: spmm_nm_int4(w4, x))(rows), spmm_nm_int4(w4, rows))


@pytest.mark.parametrize("compiled", [False, True])
def test_4_bit_weights_pass_gradients_to_what_is_added(
    compiled: bool, four: tuple[Quantized, Tensor]
) -> None:
    w, x = four

    def called(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return spmm_nm_int4(w, x, bias=bias, residual=residual)

    run: Any = torch.compile(called, backend="aot_eager", fullgraph=True) if compiled else called
    terms = (x, x.new_zeros(OUT), x.new_zeros(TOKENS, OUT))
    for learns in range(3):
        inputs = [each.detach().requires_grad_(place == learns) for place, each in enumerate(terms)]
        run(*inputs).sum().backward()
        grads = (w.to_dense().sum(0).expand(TOKENS, K), x.new_full((OUT,), TOKENS))
        expected = (*grads, x.new_ones(TOKENS, OUT))[learns]
        assert torch.equal(inputs[learns].grad, expected)


def test_whoever_records_sees_the_operator_and_replays_it(
    eight: tuple[NM, Tensor], four: tuple[Quantized, Tensor]
) -> None:
    (w8, x8), (w4, x4) = eight, four
    scale = torch.rand(TOKENS, 1, device=x8.device)
    for function, x, name in (
        (lambda x: spmm_nm_scaled(w8, x, Scaling(x=scale)), x8, "spmm_nm_scaled"),
        (lambda x: spmm_nm_int4(w4, x), x4, "spmm_nm_int4"),
    ):
        graph = make_fx(function)(x)
        assert name in str(graph.code)
        assert torch.equal(graph(x.flip(0)), function(x.flip(0)))


def test_parts_that_are_not_contiguous_are_decoded(
    eight: tuple[NM, Tensor], four: tuple[Quantized, Tensor]
) -> None:
    (w8, x8), (w4, x4) = eight, four

    def apart(part: Tensor) -> Tensor:
        return torch.stack([part, part], -1)[..., 0]

    w = NM(w8.shape, apart(w8.values), w8.meta, w8.pattern)
    assert "not contiguous" in plan_scaled(w, x8).why
    assert torch.equal(spmm_nm_scaled(w, x8), spmm_nm_scaled(w8, x8))
    quantized = w4.with_parts({name: apart(part) for name, part in w4.parts().items()})
    assert "not contiguous" in plan_int4(quantized, x4).why
    assert torch.equal(spmm_nm_int4(quantized, x4), spmm_nm_int4(w4, x4))

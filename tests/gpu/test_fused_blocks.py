"""Layers that add to the residual stream, and norms in one launch, on an H100 or H200."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hopsparse.formats import NM, NMPattern
from hopsparse.graphs import capture
from hopsparse.measure.error import unit_roundoff
from hopsparse.nn import SparseLinear, after_norm, plus_residual
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix

ROUND = unit_roundoff(torch.bfloat16)


def layer_of(form: str, rows: int, k: int, device: torch.device) -> SparseLinear:
    dense = magnitude(torch.randn(rows, k, device=device).bfloat16() / k**0.5, NMPattern(2, 4))
    matrix = NM.from_dense(dense) if form == "2:4" else quantize_matrix(dense, form)
    return SparseLinear(matrix).to(device).requires_grad_(False)


@pytest.mark.parametrize("form", ["2:4", "2:4+fp8", "2:4+int8", "2:4+int4:64", "2:4+int4:128/int8"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 333])
def test_a_sum_in_the_kernel_is_that_of_torch_but_for_a_rounding(
    form: str, tokens: int, device: torch.device
) -> None:
    """Unfused, the product is rounded and the sum is; fused, the sum alone."""
    layer = layer_of(form, 576, 512, device)
    x = torch.randn(tokens, 512, device=device).bfloat16()
    residual = torch.randn(tokens, 576, device=device).bfloat16()
    with torch.no_grad():
        found, made = plus_residual(layer, x, residual), layer(x)
        right = residual.double() + made.double()
        # Both run one tile, so that sums have the same bits. The rounding of the product is in one
        # of them alone; then each rounds its sum.
        bound = 2 * ROUND * made.double().abs() + ROUND * right.abs() * (1 + ROUND)
        assert ((found.double() - right).abs() <= bound + 1e-30).all()
        assert torch.equal(
            plus_residual(layer, x[None], residual[None]), found[None]
        )  # leading dimensions


@pytest.mark.parametrize("form", ["2:4", "2:4+fp8"])
def test_small_numbers_are_exact(form: str, device: torch.device) -> None:
    dense = magnitude(torch.randint(-2, 3, (128, 64), device=device).bfloat16(), NMPattern(2, 4))
    matrix = (
        NM.from_dense(dense)
        if form == "2:4"
        else quantize_matrix(dense, form, torch.ones(128, 1, device=device))
    )
    layer = SparseLinear(matrix).requires_grad_(False)
    # 1.75 is 448 by a power of two, and so are quarters codes of E4M3: nothing is rounded.
    x = torch.randint(-7, 8, (9, 64), device=device).bfloat16() / 4
    x[:, 0] = 1.75
    residual = torch.randint(-4, 5, (9, 128), device=device).bfloat16()
    with torch.no_grad():
        found = plus_residual(layer, x, residual)
        right = residual.double() + x.double() @ dense.double().T
    assert torch.equal(found, right.bfloat16())


def test_strides_and_other_dtypes_fall_back_or_copy(device: torch.device) -> None:
    layer = layer_of("2:4", 128, 256, device)
    x = torch.randn(5, 256, device=device).bfloat16()
    wide = torch.randn(5, 256, device=device).bfloat16()
    with torch.no_grad():
        strided = wide[:, ::2]
        assert torch.equal(
            plus_residual(layer, x, strided), plus_residual(layer, x, strided.contiguous())
        )
        floats = strided.float()
        assert torch.equal(plus_residual(layer, x, floats), floats + layer(x))
    learning = strided.clone().requires_grad_()
    plus_residual(layer, x, learning).sum().backward()
    assert torch.equal(learning.grad, torch.ones_like(learning))


@pytest.mark.parametrize("form", ["2:4", "2:4+fp8"])
def test_a_graph_adds_what_is_there_at_its_replay(form: str, device: torch.device) -> None:
    layer = layer_of(form, 256, 256, device)

    def step(x: Tensor, residual: Tensor) -> Tensor:
        return plus_residual(layer, x, residual)

    x, residual = (torch.randn(8, 256, device=device).bfloat16() for _ in range(2))
    run = capture(step, (x, residual))
    assert run.recordings[0].early >= 1
    for _ in range(3):
        x, residual = (torch.randn(8, 256, device=device).bfloat16() for _ in range(2))
        with torch.no_grad():
            assert torch.equal(run(x, residual), step(x, residual))


def test_a_norm_of_16_bits_is_near_that_of_transformers(device: torch.device) -> None:
    """Three roundings of transformers, and one here; then the same product of both."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(512, eps=1e-5).to(device, torch.bfloat16).requires_grad_(False)
    norm.weight.uniform_(0.5, 2)
    layer = SparseLinear(NM.from_dense(torch.eye(512, device=device).bfloat16()))
    layer.requires_grad_(False)
    x = torch.randn(33, 512, device=device).bfloat16()
    with torch.no_grad():
        found = after_norm(layer, x, norm).double()
        wide = x.double()
        mean = wide.square().mean(-1, keepdim=True)
        right = wide * (mean + 1e-5).rsqrt() * norm.weight.double()
    # float32 in between: sums of 512 squares, a root, two products.
    assert ((found - right).abs() <= (ROUND + 520 * 2.0**-24) * right.abs()).all()


@pytest.mark.parametrize("form", ["2:4", "2:4+fp8"])
def test_a_whole_model_is_as_near_to_float32_as_the_unfused_one(
    form: str, device: torch.device
) -> None:
    import hopsparse

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    pattern, _, scheme = form.partition("+")
    hopsparse.sparsify(model, hopsparse.Recipe(pattern, "magnitude", scheme=scheme or None))
    model.eval().requires_grad_(False)
    texts = torch.randint(0, 256, (3, 40))
    exact = nn.Module.float(copy.deepcopy(model))(texts).logits
    model, texts = model.to(device), texts.to(device)
    with torch.no_grad():
        right = model(texts).logits.float().cpu()
        done = hopsparse.fuse_blocks(model)
        assert len(done.adding) == 6
        found = model(texts).logits.float().cpu()
        done.undo()
        assert torch.equal(model(texts).logits.float().cpu(), right)
    # It rounds less often, so that it is no farther from float32; a tenth is left to chance.
    off, off_before = ((each - exact).square().mean().sqrt() for each in (found, right))
    assert off <= 1.1 * off_before


@pytest.mark.parametrize("form", ["2:4", "2:4+fp8"])
def test_chunks_and_steps_in_graphs_say_what_they_say_without(
    form: str, device: torch.device
) -> None:
    import hopsparse

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model = model.to(torch.bfloat16)
    pattern, _, scheme = form.partition("+")
    hopsparse.sparsify(model, hopsparse.Recipe(pattern, "magnitude", scheme=scheme or None))
    model = model.to(device).eval().requires_grad_(False)
    texts = torch.randint(0, 256, (3, 240), device=device)
    rows: list[list[Tensor]] = []
    for captured in (True, False):
        with hopsparse.accelerate(model, batch=3, max_tokens=240, chunks=(32, 128)) as run:
            if not captured:
                run._graph = lambda chunk, run=run: run._counted  # type: ignore[method-assign]
            rows.append([])
            for prompt in (200, 7, 160, 33):  # 128, 64 and a part; a part; 128 and 32; 32 and 1
                rows[-1].append(run.prefill(texts[:, :prompt]))
                for at in range(prompt, prompt + 20):
                    rows[-1].append(run.step(texts[:, at : at + 1]))
            if captured:
                assert run._graphs[1].recordings[0].early >= 2 * 4
    for found, right in zip(*rows, strict=True):
        assert torch.equal(found, right)

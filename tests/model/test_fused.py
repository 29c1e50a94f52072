"""Blocks whose layers became one product: the same text, and the same weights when undone."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse import fuse_blocks
from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import NM, NMPattern, Quantized
from hopsparse.models.fused import GatedMLP, RowsOf, SharedInput
from hopsparse.models.joined import join, part, why_apart
from hopsparse.nn import SparseLinear, after_norm, rms_eps
from hopsparse.ops import interleave_gate_up
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix
from tests.helpers.tiny_models import tiny_llama, tiny_qwen3

FORMS = ["2:4", "2:4+int8", "2:4+fp8", "2:4+int8/int8:static", "2:4+int4:64", "2:4+int4:128/int8"]


def layer(rows: int, form: str, *, bias: bool = False, k: int = 64) -> SparseLinear:
    """Small integers, of which every sum is exact."""
    dense = magnitude(torch.randint(-3, 4, (rows, k)).float(), NMPattern(2, 4))
    offset = torch.randint(-3, 4, (rows,)).float() if bias else None
    if form == "2:4":
        return SparseLinear(NM.from_dense(dense), offset).requires_grad_(False)
    scale = torch.ones(1) if form.endswith("static") else None
    matrix = quantize_matrix(dense, form, input_scale=scale)
    return SparseLinear(matrix, offset).requires_grad_(False)


def biases_of(layers: list[SparseLinear]) -> list[nn.Parameter | None]:
    return [each.bias for each in layers]


def parts_of(each: SparseLinear) -> dict[str, Tensor]:
    return {name: tensor.view(torch.uint8) for name, tensor in each.state_dict().items()}


def assert_same(found: SparseLinear, right: SparseLinear) -> None:
    assert repr(found) == repr(right)
    wanted = parts_of(right)
    for name, tensor in parts_of(found).items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(128, 64, 64), (24, 8, 8)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_joined_rows_are_those_of_the_layers(form: str, sizes: tuple[int, ...], bias: bool) -> None:
    layers = [layer(rows, form, bias=bias) for rows in sizes]
    assert why_apart(layers) is None
    whole, x = join(layers), torch.randint(-3, 4, (5, 64)).float()
    assert type(whole.matrix) is type(layers[0].matrix)
    assert torch.equal(whole.to_dense(), torch.cat([each.to_dense() for each in layers]))
    torch.testing.assert_close(whole(x), torch.cat([each(x) for each in layers], -1))
    for found, right in zip(part(whole, sizes, biases_of(layers)), layers, strict=True):
        assert_same(found, right)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [64, 24])
def test_joined_gate_and_up_end_in_swiglu(form: str, rows: int) -> None:
    gate, up = layer(rows, form, bias=True), layer(rows, form, bias=True)
    whole, x = join([gate, up], gate_up=True), torch.randint(-3, 4, (5, 64)).float()
    right = interleave_gate_up(gate.to_dense(), up.to_dense())
    assert torch.equal(whole.to_dense(), right)
    torch.testing.assert_close(whole(x), nn.functional.silu(gate(x)) * up(x))
    parts = part(whole, [rows, rows], biases_of([gate, up]), gate_up=True)
    for found, alone in zip(parts, (gate, up), strict=True):
        assert_same(found, alone)


def test_one_product_serves_calls_that_share_an_input() -> None:
    layers = [layer(rows, "2:4") for rows in (16, 8, 8)]
    shared = SharedInput(join(layers), [16, 8, 8], None)
    parts, runs = [RowsOf(shared, which) for which in range(3)], []
    shared.linear.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(2):
        x = torch.randint(-3, 4, (5, 64)).float()
        for each, alone in zip(parts, layers, strict=True):
            assert torch.equal(each(x), alone(x))
    assert len(runs) == 2
    assert shared._under_way == {}
    # Other orders, inputs that changed, and only some of the layers.
    assert torch.equal(parts[1](x), layers[1](x))
    x += 1
    assert torch.equal(parts[0](x), layers[0](x))
    assert torch.equal(parts[0](x), layers[0](x))
    y = x.clone()
    assert torch.equal(parts[2](y), layers[2](y))
    assert len(list(nn.Sequential(*parts).parameters())) == 0
    assert len(nn.Sequential(*parts).state_dict()) == 2


def test_a_compiler_sees_one_product() -> None:
    layers = [layer(rows, "2:4") for rows in (16, 8, 8)]
    shared = SharedInput(join(layers), [16, 8, 8], None)
    model = nn.ModuleList(RowsOf(shared, which) for which in range(3))
    seen: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "call" in node.op)
        return graph.forward

    def fn(x: Tensor) -> list[Tensor]:
        return [each(x) for each in model]

    x = torch.randint(-3, 4, (5, 64)).float()
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    for found, alone in zip(compiled(x), layers, strict=True):
        assert torch.equal(found, alone(x))
    assert sum(name == "split" for name in seen) == 1


def sparse(model: Any, form: str) -> Any:
    pattern, _, scheme = form.partition("+")
    hopsparse.sparsify(model, hopsparse.Recipe(pattern, "magnitude", scheme=scheme or None))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("form", ["2:4", "2:4+int8", "2:4+fp8"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_a_fused_model_says_the_same_and_comes_back(make: Any, form: str) -> None:
    model = sparse(make().float(), form)
    tokens = torch.randint(0, 200, (2, 17))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    modules = [type(each) for each in model.modules()]
    logits, text = model(tokens).logits, said(model)
    done = fuse_blocks(model)
    assert len(done.fused) == 5 * 3
    assert done.left == {}
    assert sum(isinstance(each, GatedMLP) for each in model.modules()) == 3
    torch.testing.assert_close(model(tokens).logits, logits)
    assert said(model) == text
    assert len(model.state_dict()) < len(before)
    done.undo()
    done.undo()
    assert [type(each) for each in model.modules()] == modules
    for name, each in model.state_dict().items():
        assert torch.equal(each.view(torch.uint8), before[name].view(torch.uint8)), name
    assert torch.equal(model(tokens).logits, logits)


def said(model: Any) -> list[int]:
    start = torch.tensor([[5, 6, 7]])
    found: list[int] = model.generate(start, max_new_tokens=40, do_sample=False)[0].tolist()
    return found


def test_what_does_not_go_together_is_left_and_named() -> None:
    model = sparse(tiny_llama(), "2:4")
    first, second = (model.model.layers[i] for i in (0, 1))
    first.self_attn.q_proj = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    first.mlp.act_fn = nn.GELU()
    second.mlp.up_proj.register_forward_hook(lambda *_: None)
    second.self_attn.v_proj = SparseLinear(
        quantize_matrix(second.self_attn.v_proj.to_dense(), "2:4+int8")
    )
    done, prefix = fuse_blocks(model), "model.layers."
    why = {names.removeprefix(prefix)[:6]: told for names, told in done.left.items()}
    assert why == {
        "0.self": "one is a Linear",
        "0.mlp.": "the activation between them is no SiLU",
        "1.self": "they differ in form, dtype, device or bias",
        "1.mlp.": "one has hooks, or an activation of its own",
    }
    assert all(name.startswith("model.layers.2") for name in done.fused)
    assert len(done.fused) == 5


def test_who_listens_or_learns_is_left_alone() -> None:
    model = sparse(tiny_llama(), "2:4")
    blocks = model.model.layers
    blocks[0].mlp.register_forward_hook(lambda *_: None)
    blocks[1].mlp.act_fn.register_forward_pre_hook(lambda *_: None)
    query = blocks[2].self_attn.q_proj
    values = nn.Parameter(query.values)
    del query.values
    query.register_parameter("values", values)
    blocks[2].mlp.gate_proj.register_full_backward_hook(lambda *_: None)
    done, prefix = fuse_blocks(model), "model.layers."
    assert {names.removeprefix(prefix)[:6]: told for names, told in done.left.items()} == {
        "0.mlp.": "the module around them has hooks",
        "1.mlp.": "the module around them has hooks",
        "2.self": "one is trained",
        "2.mlp.": "one has hooks, or an activation of its own",
    }


def test_a_failure_midway_gives_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, joined = sparse(tiny_llama(), "2:4"), []

    def fails(layers: Any, **words: Any) -> SparseLinear:
        joined.append(1)
        if len(joined) == 4:
            raise MemoryError
        return join(layers, **words)

    monkeypatch.setattr("hopsparse.models.fused.join", fails)
    before = [type(each) for each in model.modules()]
    with pytest.raises(MemoryError):
        fuse_blocks(model)
    assert [type(each) for each in model.modules()] == before
    monkeypatch.undo()
    assert len(fuse_blocks(model).fused) == 5 * 3


def test_threads_have_results_of_their_own() -> None:
    layers = [layer(rows, "2:4") for rows in (16, 8, 8)]
    shared = SharedInput(join(layers), [16, 8, 8], None)
    parts = [RowsOf(shared, which) for which in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def serve(seed: int) -> bool:
        right = True
        for number in range(100):
            x = torch.full((1, 64), float(seed * 100 + number))
            wanted = [each(x) for each in layers]
            right &= all(torch.equal(a(x), b) for a, b in zip(parts, wanted, strict=True))
        return right

    try:
        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(serve, range(3)))
    finally:
        sys.setswitchinterval(before)
    assert copy.deepcopy(shared)._under_way == {}


def test_norms_that_multiply_by_more_than_their_weight_are_not_known() -> None:
    class GemmaRMSNorm(nn.RMSNorm):
        pass

    assert rms_eps(GemmaRMSNorm(8, eps=1e-6)) is None
    assert rms_eps(nn.RMSNorm(8, eps=1e-6)) == 1e-6


def test_static_scales_of_their_own_stay_apart() -> None:
    layers = [layer(64, "2:4+int8/int8:static") for _ in range(2)]
    layers[1].get_buffer("input_scale").mul_(2)
    assert why_apart(layers) == "their inputs have scales of their own"
    assert why_apart([layer(64, "2:4"), SparseLinear.from_linear(nn.Linear(64, 8), "csr")]) == (
        "one is stored as csr"
    )


def test_what_cannot_be_fused_is_refused(tmp_path: Path) -> None:
    model = sparse(tiny_llama(), "2:4")
    with pytest.raises(ArgumentError, match="in training mode"):
        fuse_blocks(model.train())
    done = fuse_blocks(model.eval())
    with pytest.raises(ArgumentError, match="fused already"):
        fuse_blocks(model)
    with pytest.raises(UnsupportedError, match=r"blocks are fused.*undo\(\)"):
        hopsparse.save(model, tmp_path / "out")
    done.undo()
    hopsparse.save(model, tmp_path / "out")
    with pytest.raises(UnsupportedError, match="model type"):
        fuse_blocks(nn.Sequential(nn.Linear(2, 2)))
    with torch.device("meta"):
        from transformers import LlamaConfig, LlamaForCausalLM

        empty = LlamaForCausalLM(LlamaConfig(**model.config.to_diff_dict())).eval()
    with pytest.raises(ArgumentError, match="without weights"):
        fuse_blocks(empty)


def test_a_norm_goes_into_the_rounding_behind_it() -> None:
    """On a CPU both run apart; the layer then sees what the norm gave."""
    norm, x = nn.RMSNorm(64, eps=1e-5), torch.randn(5, 64)
    for form in ("2:4", "2:4+int8"):
        one = layer(64, form)
        assert torch.equal(after_norm(one, x, norm), one(norm(x)))
    model = sparse(tiny_llama().float(), "2:4+int8")
    fuse_blocks(model)
    block = model.model.layers[0]
    assert isinstance(block.input_layernorm, nn.Identity)
    assert isinstance(block.mlp.norm, nn.Module)
    assert isinstance(block.self_attn.q_proj.shared.linear.matrix, Quantized)


@pytest.mark.parametrize("under", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_autocast_does_not_reach_what_is_joined(scheme: str | None, under: torch.dtype) -> None:
    model = tiny_llama()
    hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude", scheme=scheme))
    model.requires_grad_(False)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with torch.autocast("cpu", under):
        fused = fuse_blocks(model)
        assert fused.fused
        fused.undo()
    for name, each in model.state_dict().items():
        assert torch.equal(each.contiguous().view(torch.uint8), before[name].view(torch.uint8))

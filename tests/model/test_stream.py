"""Blocks whose last layers add to the residual stream: the same text, whoever looks on."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse import fuse_blocks
from hopsparse.formats import NM, NMPattern
from hopsparse.models import stream
from hopsparse.models.stream import PlusResidual, why_apart_from_stream
from hopsparse.nn import SparseLinear, plus_residual, uses_of
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix
from tests.helpers.tiny_models import tiny_llama, tiny_qwen3

TOKENS = torch.arange(9)[None]


def sparse(make: Any = tiny_llama, form: str = "2:4") -> Any:
    model = make().float()
    pattern, _, scheme = form.partition("+")
    hopsparse.sparsify(model, hopsparse.Recipe(pattern, "magnitude", scheme=scheme or None))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("form", ["2:4", "2:4+int8"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_every_block_adds_in_its_last_layers(
    make: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sparse(make, form)
    right = model(TOKENS).logits
    kinds = [type(each) for each in model.model.layers]
    done = fuse_blocks(model)
    assert len(done.adding) == 2 * 3
    assert done.not_adding == {}
    added = []
    operator = stream.plus_residual
    monkeypatch.setattr(stream, "plus_residual", lambda *a: added.append(1) or operator(*a))
    torch.testing.assert_close(model(TOKENS).logits, right)
    assert len(added) == 2 * 3
    assert all(isinstance(a, b) for a, b in zip(model.model.layers, kinds, strict=True))
    states = model(TOKENS, output_hidden_states=True).hidden_states
    assert len(states) == 4
    done.undo()
    assert [type(each) for each in model.model.layers] == kinds
    assert done.adding == []
    plain = model(TOKENS, output_hidden_states=True).hidden_states
    for found, wanted in zip(states, plain, strict=True):
        torch.testing.assert_close(found, wanted)


def test_copies_and_compiled_calls_say_the_same() -> None:
    model = sparse()
    right = model(TOKENS, use_cache=False).logits
    fuse_blocks(model)
    fused = model(TOKENS, use_cache=False).logits
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(each) for each in made.modules()] == [type(each) for each in model.modules()]
        assert torch.equal(made(TOKENS, use_cache=False).logits, fused)
    torch.testing.assert_close(fused, right)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(TOKENS, use_cache=False).logits, right)
    torch._dynamo.reset()


def test_a_block_that_fails_leaves_nothing_to_add() -> None:
    model = sparse()
    fuse_blocks(model)
    block, x = model.model.layers[0], torch.randn(1, 3, 32)
    with pytest.raises(TypeError):
        block(x)  # Attention wants positions.
    end = block.self_attn.o_proj
    assert isinstance(end, PlusResidual)
    assert torch.equal(end(x), end.linear(x))


def test_who_calls_a_block_with_places_gets_what_transformers_does() -> None:
    model = sparse()
    layers = model.model.layers
    x = torch.randn(1, 3, 32)
    positions = model.model.rotary_emb(x, torch.arange(3)[None])
    right = layers[0](x, None, position_embeddings=positions)
    fuse_blocks(model)
    torch.testing.assert_close(layers[0](x, None, position_embeddings=positions), right)
    torch.testing.assert_close(layers[0](x, position_embeddings=positions), right)


def test_what_keeps_a_layer_apart_is_told() -> None:
    model = sparse()
    blocks = model.model.layers
    blocks[0].self_attn.o_proj.register_forward_hook(lambda *_: None)
    blocks[0].mlp.down_proj = nn.Linear(64, 32)
    blocks[1].mlp.register_forward_hook(lambda *_: None)
    blocks[2].mlp.down_proj.act = "relu"
    right = model(TOKENS).logits
    done = fuse_blocks(model)
    assert {name[13:]: why for name, why in done.not_adding.items()} == {
        "0.self_attn.o_proj": "it, or what is around it, has hooks",
        "0.mlp.down_proj": "it is a Linear",
        "1.mlp.down_proj": "it, or what is around it, has hooks",
        "2.mlp.down_proj": "it has an activation of its own",
    }
    torch.testing.assert_close(model(TOKENS).logits, right)
    other = nn.ModuleDict({"self_attn": nn.Module()})
    assert why_apart_from_stream(other, "self_attn.o_proj", uses_of(other)) == (
        "a ModuleDict may do something else with it"
    )


@pytest.mark.parametrize("form", ["2:4", "2:4+int8", "2:4+int4:64", "csr"])
def test_a_sum_on_a_cpu_is_that_of_torch(form: str) -> None:
    dense = magnitude(torch.randint(-3, 4, (16, 64)).float(), NMPattern(2, 4))
    if form == "csr":
        linear = nn.Linear(64, 16, bias=False)
        linear.weight = nn.Parameter(dense, requires_grad=False)
        layer = SparseLinear.from_linear(linear, "csr")
    elif form == "2:4":
        layer = SparseLinear(NM.from_dense(dense))
    else:
        layer = SparseLinear(quantize_matrix(dense, form))
    x, residual = torch.randn(5, 64), torch.randn(5, 16)
    found: Tensor = plus_residual(layer, x, residual)
    assert torch.equal(found, residual + layer(x))


class Adapted(nn.Module):
    """As an adapter of low rank puts itself in the place of a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.up(self.down(x))
        return y


@pytest.mark.parametrize("name", ["self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_adapters_on_top_are_applied_and_named(name: str) -> None:
    model = sparse()
    for block in model.model.layers:
        home, _, last = name.rpartition(".")
        setattr(block.get_submodule(home), last, Adapted(block.get_submodule(name)))
    model.eval().requires_grad_(False)
    right = model(TOKENS).logits
    done = fuse_blocks(model)
    told = {**done.left, **done.not_adding}
    assert len(told) == 3
    assert set(told.values()) <= {"one is a Adapted", "it is a Adapted"}
    torch.testing.assert_close(model(TOKENS).logits, right)
    done.undo()
    torch.testing.assert_close(model(TOKENS).logits, right)


def test_a_model_that_is_spread_over_devices_is_left_where_it_is() -> None:
    """device_map of transformers puts its own forward on every module that it moves inputs for."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = sparse()
    right = model(TOKENS).logits
    for block in model.model.layers:
        for module in (block, *block.modules()):
            if "hf_hook" not in vars(module):
                hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    done = fuse_blocks(model)
    assert (done.fused, done.adding) == ([], [])
    assert len(done.left) == len(done.not_adding) == 6
    torch.testing.assert_close(model(TOKENS).logits, right)


def test_tied_embeddings_stay_tied() -> None:
    model = sparse()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fuse_blocks(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight

"""Outliers move from inputs into weights, and the model computes the same to the last bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hopsparse import Recipe, sparsify
from hopsparse.formats import parse_scheme
from hopsparse.models.rules import family_of
from hopsparse.models.smooth import powers_of_two, smooth_block
from hopsparse.prune import capture_inputs
from hopsparse.quant import round_inputs, round_weight

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_with_outliers(kind: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    block = model.model.layers[0]
    with torch.no_grad():
        block.input_layernorm.weight[3] = 60.0
        block.post_attention_layernorm.weight[5] = 60.0
        block.mlp.up_proj.weight[7] *= 60
    return model.to(dtype).eval()


def windows() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return list(torch.randint(0, 64, (4, 16), generator=draw).split(2))


def lost_by_rounding(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, float]:
    """What int8 costs the layers of the first block, summed over those that share an input.

    The squared distance of outputs, relative in every channel, whose scale smoothing changes.
    """
    block, lost = model.model.layers[0], {}

    def look(name: str, layer: torch.nn.Linear, args: tuple[torch.Tensor]) -> None:
        x, weight, scheme = args[0].float(), layer.weight.float(), parse_scheme("int8")
        exact = x @ weight.T
        moved = round_inputs(x, scheme) @ round_weight(weight, scheme).T - exact
        lost[name] = float((moved.norm(dim=(0, 1)) / exact.norm(dim=(0, 1))).square().sum())

    takers = family_of("llama").scales
    handles = [
        block.get_submodule(name).register_forward_pre_hook(partial(look, name))
        for _, names in takers
        for name in names
    ]
    model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return {maker: sum(lost[name] for name in names) for maker, names in takers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.no_grad()
def test_nothing_changes_but_the_range_of_the_inputs(kind: str, dtype: torch.dtype) -> None:
    model = model_with_outliers(kind, dtype)
    ids = windows()
    expected = model(ids[0], use_cache=False).logits
    block = model.model.layers[0]
    before = lost_by_rounding(model, ids[0])
    inner = capture_inputs(lambda w: model(w, use_cache=False), block, ids)
    recipe = Recipe("2:4", scheme="int8")
    smooth_block(block, "model.layers.0", inner, recipe, family_of(kind))
    assert torch.equal(model(ids[0], use_cache=False).logits, expected)
    after = lost_by_rounding(model, ids[0])
    assert all(after[name] < 0.7 * before[name] for name in before), (before, after)


@pytest.mark.parametrize("scheme", ["fp8", "int4:64", "int8/none", None])
def test_inputs_without_a_grid_of_equal_steps_stay_as_they_are(scheme: str | None) -> None:
    model = model_with_outliers("llama", torch.float32)
    before = copy.deepcopy(model.state_dict())
    block = model.model.layers[0]
    inner = capture_inputs(lambda w: model(w, use_cache=False), block, windows())
    recipe = Recipe("2:4", scheme=scheme)
    smooth_block(block, "model.layers.0", inner, recipe, family_of("llama"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_factors_are_powers_of_two_and_dead_channels_keep_theirs() -> None:
    layer = torch.nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.weight[:, 4] = 0
    factors = powers_of_two(torch.tensor([64.0, 1.0, 4.0, 0.0, 9.0, 1e-30]), [layer], 0.5)
    assert torch.equal(factors, factors.log2().round().exp2())
    assert factors[0] > factors[2] > factors[1]
    assert factors[3] == factors[4] == 1
    assert torch.isfinite(factors).all()


@torch.no_grad()
def test_a_smoothed_model_in_int8_is_nearer_to_the_dense_one() -> None:
    dense = model_with_outliers("llama", torch.float32)
    ids = windows()
    lost = {}
    for smooth in (False, True):
        model = copy.deepcopy(dense)
        form = {"*": "dense+int8"}
        sparsify(model, Recipe(forms=form, smooth=smooth, method="magnitude"), ids)
        gap = model(ids[0], use_cache=False).logits - dense(ids[0], use_cache=False).logits
        lost[smooth] = float(gap.norm())
    assert lost[True] < 0.8 * lost[False]

"""Channels inside decoder blocks are permuted without changing what the blocks compute."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hopsparse import Recipe, sparsify
from hopsparse.formats import NMPattern
from hopsparse.models._watch import watch_inputs
from hopsparse.models.permute import permute_block
from hopsparse.models.rules import family_of
from hopsparse.prune import Activations, capture_inputs, kept_importance

SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)).eval()


def qwen() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()


def windows() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return list(torch.randint(0, 64, (4, 16), generator=draw).split(2))


def order_of(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Which row of `old` each row of `new` is; rows are distinct."""
    same = (new.unsqueeze(1) == old.unsqueeze(0)).all(-1)
    assert torch.equal(same.sum(0), torch.ones(len(old), dtype=torch.int64))
    return same.int().argmax(1)


def check_moves(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> None:
    """Rows of what makes channels moved as columns of what takes them: sums of the same terms."""
    now, path = model.state_dict(), "model.layers.0"
    order = order_of(now[f"{path}.mlp.up_proj.weight"], before[f"{path}.mlp.up_proj.weight"])
    for name in ("gate_proj.weight", "gate_proj.bias", "up_proj.bias"):
        if f"{path}.mlp.{name}" in now:
            assert torch.equal(now[f"{path}.mlp.{name}"], before[f"{path}.mlp.{name}"][order])
    taken = before[f"{path}.mlp.down_proj.weight"][:, order]
    assert torch.equal(now[f"{path}.mlp.down_proj.weight"], taken)
    attention, width = f"{path}.self_attn", SIZES["hidden_size"] // SIZES["num_attention_heads"]
    order = order_of(now[f"{attention}.v_proj.weight"], before[f"{attention}.v_proj.weight"])
    assert torch.equal(now[f"{attention}.v_proj.bias"], before[f"{attention}.v_proj.bias"][order])
    heads = order.view(-1, width)
    assert torch.equal(heads // width, torch.arange(len(heads)).unsqueeze(1).expand_as(heads))
    sharers = SIZES["num_attention_heads"] // len(heads)
    inside = (heads % width).repeat_interleave(sharers, 0)
    columns = (torch.arange(len(inside)).unsqueeze(1) * width + inside).flatten()
    taken = before[f"{attention}.o_proj.weight"][:, columns]
    assert torch.equal(now[f"{attention}.o_proj.weight"], taken)


def kept(block: torch.nn.Module, inner: Activations) -> dict[str, float]:
    """The part of the importance of each taker that 2:4 keeps."""
    rows: dict[str, list[torch.Tensor]] = {"self_attn.o_proj": [], "mlp.down_proj": []}
    watch_inputs(block, list(rows), inner, lambda name, seen: rows[name].append(seen))
    squares = {name: torch.cat(seen).square().sum(0) for name, seen in rows.items()}
    weights = {name: block.get_submodule(name).weight.square() for name in rows}
    return {n: kept_importance(weights[n] * squares[n], NMPattern(2, 4)) for n in rows}


@pytest.mark.parametrize("make", [llama, qwen])
@torch.no_grad()
def test_a_model_computes_the_same_and_keeps_more(make: object) -> None:
    torch.manual_seed(0)
    model = make()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
        if "gate_proj.weight" in name or "v_proj.weight" in name:
            parameter[:8] *= 6  # strong channels beside one another
    ids = windows()
    before = copy.deepcopy(model.state_dict())
    inner = capture_inputs(lambda w: model(w, use_cache=False), model.model.layers[0], ids)
    family, block = family_of(model.config.model_type), model.model.layers[0]
    kept_before = kept(block, inner)
    permute_block(block, "model.layers.0", inner, Recipe("2:4"), family)
    kept_now = kept(block, inner)
    assert all(kept_now[name] > kept_before[name] for name in kept_now)
    moved = [n for n, t in model.state_dict().items() if not torch.equal(t, before[n])]
    assert moved
    assert all(".0." in name for name in moved)
    assert not any("q_proj" in name or "k_proj" in name or "norm" in name for name in moved)
    check_moves(model, before)


def test_sparsify_permutes_when_told_to() -> None:
    torch.manual_seed(1)
    model = llama()
    twin = copy.deepcopy(model)
    plain = sparsify(model, Recipe("2:4"), windows())
    spread = sparsify(twin, Recipe("2:4", permute=True), windows())
    assert [r.name for r in plain] == [r.name for r in spread]
    assert all(r.density == 0.5 for r in spread)
    rows = (m.model.layers[0].mlp.down_proj.to_dense() for m in (model, twin))
    assert not torch.equal(*rows)


def test_a_taker_that_stays_dense_moves_nothing() -> None:
    model = llama()
    before = copy.deepcopy(model.state_dict())
    inner = capture_inputs(lambda w: model(w, use_cache=False), model.model.layers[0], windows())
    recipe = Recipe("unstructured:0.5")
    family = family_of("llama")
    permute_block(model.model.layers[0], "model.layers.0", inner, recipe, family)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_taker_that_the_pattern_does_not_fit_moves_nothing() -> None:
    """The MLP is 50 wide, so that 2:4 leaves down as it is; heads of 8 are permuted."""
    config = LlamaConfig(**SIZES | {"intermediate_size": 50})
    model = LlamaForCausalLM(config).eval()
    before = copy.deepcopy(model.state_dict())
    inner = capture_inputs(lambda w: model(w, use_cache=False), model.model.layers[0], windows())
    family, path = family_of("llama"), "model.layers.0"
    permute_block(model.model.layers[0], path, inner, Recipe("2:4"), family)
    assert not torch.equal(
        model.state_dict()[f"{path}.self_attn.o_proj.weight"],
        before[f"{path}.self_attn.o_proj.weight"],
    )
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items() if ".mlp." in n)

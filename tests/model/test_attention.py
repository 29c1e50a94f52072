"""The attention "hopsparse" in whole tiny models: dense below the crossover, sparse above."""

from __future__ import annotations

import copy
import inspect
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from hopsparse import AttentionConfig
from hopsparse.errors import ArgumentError
from hopsparse.models.attention import attend
from hopsparse.models.attention_config import ENTRY
from tests.helpers.tiny_models import save_model, tiny_llama, tiny_qwen3

SPARSE = AttentionConfig(budget=48, page=16, crossover=32)
WHOLE = AttentionConfig(budget=128, page=16, crossover=0, prefill=True)


@pytest.fixture(params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = {"llama": tiny_llama, "qwen3": tiny_qwen3}[request.param]()
    return save_model(model, tmp_path / request.param)


def loaded(folder: Path, implementation: str, config: AttentionConfig | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=implementation, dtype=torch.float32
    )
    if config:
        config.apply(model)
    return model


def ids(tokens: int, batch: int = 1) -> Tensor:
    return torch.randint(0, 256, (batch, tokens))


def run(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    """Logits; the keys go into the cache, which a parameter of either name takes."""
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    logits: Tensor = model(tokens, use_cache=True, **{name: cache}).logits
    return logits


@torch.no_grad()
def generated(model: Any, prompt: Tensor, count: int = 4) -> list[Tensor]:
    """Logits of a prompt and of tokens that follow one another through the cache."""
    cache = DynamicCache(config=model.config)
    rows = [run(model, prompt, cache)]
    for _ in range(count):
        rows.append(run(model, rows[-1][:, -1:].argmax(-1), cache))
    return rows


def test_below_the_crossover_it_is_sdpa_bit_for_bit(folder: Path) -> None:
    prompt = ids(60, 2)
    want = generated(loaded(folder, "sdpa"), prompt)
    for config in (None, AttentionConfig(budget=48, page=16, crossover=64)):
        ours = generated(loaded(folder, "hopsparse", config), prompt)
        for mine, other in zip(ours, want, strict=True):
            assert torch.equal(mine, other)


def test_above_it_the_prompt_is_dense_and_what_follows_is_not(folder: Path) -> None:
    prompt = ids(100)
    want = generated(loaded(folder, "sdpa"), prompt)
    ours = generated(loaded(folder, "hopsparse", SPARSE), prompt)
    assert torch.equal(ours[0], want[0])
    assert not torch.equal(ours[1], want[1])


@pytest.mark.parametrize("mode", ["top-k", "top-p", "certified"])
def test_with_room_for_all_tokens_it_is_dense_but_for_rounding(folder: Path, mode: str) -> None:
    prompt = ids(90, 2)
    limits = {"mode": mode, "top_p": 1.0, "epsilon": 1e-30}
    config = AttentionConfig(**asdict(WHOLE) | limits)
    want = generated(loaded(folder, "sdpa"), prompt)
    ours = generated(loaded(folder, "hopsparse", config), prompt)
    for mine, other in zip(ours, want, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_prompt_in_chunks_is_the_prompt(folder: Path) -> None:
    prompt, model = ids(90), loaded(folder, "hopsparse", WHOLE)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        parts = [run(model, part, cache) for part in (prompt[:, :37], prompt[:, 37:])]
        want = loaded(folder, "sdpa")(prompt).logits
    torch.testing.assert_close(torch.cat(parts, 1), want)


def test_padding_is_dense(folder: Path) -> None:
    prompt, seen = ids(90, 2), torch.ones(2, 90).long()
    seen[0, :20] = 0
    with torch.no_grad():
        ours, want = (
            model(prompt, attention_mask=seen).logits
            for model in (loaded(folder, "hopsparse", WHOLE), loaded(folder, "sdpa"))
        )
    assert torch.equal(ours, want)


def test_training_is_dense_and_has_gradients(folder: Path) -> None:
    prompt = ids(90)
    for name in ("hopsparse", "sdpa"):
        model = loaded(folder, name, WHOLE if name == "hopsparse" else None)
        model(prompt, labels=prompt).loss.backward()
        gradient = model.model.layers[0].self_attn.q_proj.weight.grad
        if name == "hopsparse":
            ours = gradient
    assert torch.equal(ours, gradient)
    assert gradient.abs().max() > 0


def test_it_finds_the_key_that_matters_among_many() -> None:
    """One key of 4,096 holds the attention; a budget of 192 tokens is enough to see it."""
    config = AttentionConfig(budget=192, page=64, crossover=0)
    layer = torch.nn.Module()
    layer.config = SimpleNamespace(**{ENTRY: asdict(config)})  # type: ignore[assignment]
    query = torch.randn(1, 4, 1, 64)
    key, value = torch.randn(1, 2, 4096, 64) * 0.1, torch.randn(1, 2, 4096, 64)
    key[:, :, 1777] = 8 * query.view(1, 2, 2, 64).sum(2)
    out, _ = attend(layer, query, key, value, None, scaling=1.0)
    weights = (query.view(1, 2, 2, 64) @ key.transpose(-1, -2)).softmax(-1)
    assert (weights[..., 1777] > 0.99).all()
    assert torch.equal(
        out.view(2, 2, 64).argmax(-1), value[0, :, 1777].argmax(-1)[:, None].expand(2, 2)
    )


def test_a_saved_model_keeps_its_config(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder, "hopsparse", SPARSE)
    model.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved", "hopsparse")
    assert AttentionConfig.of(again.config) == SPARSE
    prompt = ids(100)
    for mine, other in zip(generated(again, prompt), generated(model, prompt), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 0}, {"budget": -64}, {"budget": 100}, {"budget": 64}, {"budget": True},
        {"page": 8}, {"page": 256}, {"mode": "best"}, {"top_p": 0}, {"top_p": 1.5},
        {"epsilon": float("nan")}, {"sink": -1}, {"recent": 0}, {"crossover": -1},
        {"prefill": 1}, {"score": "max"},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(changes))):
        AttentionConfig(**changes)


def test_an_entry_that_means_nothing_is_refused(folder: Path) -> None:
    model = loaded(folder, "hopsparse")
    setattr(model.config, ENTRY, {"budgets": 3})
    with pytest.raises(ArgumentError, match="budgets"):
        model(ids(3))
    with pytest.raises(ArgumentError, match="Linear"):
        SPARSE.apply(torch.nn.Linear(2, 2))


def test_parts_with_a_config_of_their_own_are_told_too() -> None:
    """As a model that was sparsified has them; versions of transformers reach one or the other."""
    model: Any = tiny_llama()
    model.model.config = copy.deepcopy(model.config)
    for block in model.model.layers:
        block.self_attn.config = model.model.config
    WHOLE.apply(model)
    for config in (model.config, model.model.config):
        assert config._attn_implementation == "hopsparse"
        assert AttentionConfig.of(config) == WHOLE

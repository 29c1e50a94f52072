"""Blocks of keys that are kept between steps: the logits of blocks that are made at every step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hopsparse import AttentionConfig, KeyBlocksCache
from hopsparse.models import key_blocks_cache
from hopsparse.models.key_blocks_cache import KeyBlocksLayer, blocks_of, newest_of
from tests.helpers.tiny_models import tiny_llama, tiny_qwen3

MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3}
PAGE = 16


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every time that blocks are made of all keys."""
    counts: list[int] = []
    original = key_blocks_cache.key_blocks

    def counted(keys: Tensor, page: int) -> Any:
        counts.append(keys.shape[2])
        return original(keys, page)

    monkeypatch.setattr(key_blocks_cache, "key_blocks", counted)
    return counts


def sparse(name: str, **changes: Any) -> Any:
    model = MODELS[name]().eval()
    AttentionConfig(budget=48, page=PAGE, crossover=32, **changes).apply(model)
    return model


def named(model: Any, cache: Any) -> dict[str, Any]:
    """The cache as a parameter, whichever name it has."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def step(model: Any, tokens: Tensor, cache: Any) -> Tensor:
    logits: Tensor = model(tokens, use_cache=True, **named(model, cache)).logits
    return logits


@torch.no_grad()
def run(model: Any, caches: list[Any], tokens: Tensor) -> None:
    """The tokens one by one: every cache gives the same logits, bit for bit."""
    for i in range(tokens.shape[1]):
        mine, other = (step(model, tokens[:, i : i + 1], cache) for cache in caches)
        assert torch.equal(mine, other)


def both(model: Any, batch: int = 1, prompt: int = 60) -> list[Any]:
    """One cache of each kind, with the same prompt."""
    caches = [KeyBlocksCache(config=model.config), DynamicCache(config=model.config)]
    tokens = torch.randint(0, 256, (batch, prompt))
    with torch.no_grad():
        mine, other = (step(model, tokens, cache) for cache in caches)
    assert torch.equal(mine, other)
    return caches


def some(count: int, batch: int = 1) -> Tensor:
    return torch.randint(0, 256, (batch, count))


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    "changes",
    [{}, {"score": "bound"}, {"mode": "top-p", "top_p": 0.7}, {"mode": "certified"}],
    ids=str,
)
def test_logits_are_those_of_blocks_made_anew(
    name: str, changes: dict[str, Any], made: list[int]
) -> None:
    model = sparse(name, **changes)
    caches = both(model, batch=2)
    layers = len(caches[0].layers)
    run(model, caches, some(30, 2))
    # The other cache makes blocks of all keys at every step.
    assert sorted(made) == sorted([61] * layers + [61 + i for i in range(30)] * layers)


def test_blocks_are_those_of_all_keys() -> None:
    """Bit for bit, through growing room, and portions of any size."""
    layer = KeyBlocksLayer()
    keys = torch.randn(2, 3, 400, 8).bfloat16()
    begin = 0
    for count in (20, 1, 1, 30, 1, 12, 100, 1, 200, 34):
        part = keys[:, :, begin : begin + count]
        begin += count
        found, _ = layer.update(part, part)
        kept, want = blocks_of(found, PAGE), key_blocks_cache.key_blocks(found, PAGE)
        for each in ("low", "high", "total"):
            assert torch.equal(getattr(kept, each), getattr(want, each))


def test_the_newest_key_is_left_to_the_launch_that_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step of the model runs append_keys, and what is kept afterwards is that of all keys."""
    model, calls = sparse("llama"), []
    cache = KeyBlocksCache(config=model.config)
    original = key_blocks_cache.append_keys

    def counted(*given: Any) -> None:
        calls.append(given[1].shape[1])
        original(*given)

    monkeypatch.setattr(key_blocks_cache, "append_keys", counted)
    with torch.no_grad():
        step(model, some(60), cache)
        for _ in range(20):
            step(model, some(1), cache)
        assert calls == []
        for layer in cache.layers:
            kept = [each.clone() for each in kept_by(layer)]
            want = key_blocks_cache.key_blocks(layer.keys, PAGE)
            assert all(map(torch.equal, kept, (want.low, want.high, want.total)))
            assert all(map(torch.equal, kept, kept_by(layer)))
        # Tokens that no attention of this kind saw are taken in by the next update.
        for layer in cache.layers:
            layer.update(layer.keys[:, :, :1], layer.values[:, :, :1])
        step(model, some(1), cache)
    assert calls == [1] * len(cache.layers)


def kept_by(layer: Any) -> list[Tensor]:
    blocks = layer.blocks(PAGE)
    return [blocks.low, blocks.high, blocks.total]


def test_the_newest_key_is_handed_out_once() -> None:
    layer = KeyBlocksLayer()
    keys = torch.randn(2, 3, 60, 8)
    found, _ = layer.update(keys[:, :, :40], keys[:, :, :40])
    blocks, newest = newest_of(found, PAGE)
    assert newest is None
    assert blocks.low.shape[2] == 3
    found, _ = layer.update(keys[:, :, 40:41], keys[:, :, 40:41])
    blocks, newest = newest_of(found, PAGE)
    assert newest is not None
    assert torch.equal(newest, keys[:, :, 40:41].transpose(1, 2))
    key_blocks_cache.append_keys(blocks, newest, torch.tensor([40, 40]).int())
    assert newest_of(found, PAGE)[1] is None
    assert torch.equal(blocks_of(found, PAGE).total, key_blocks_cache.key_blocks(found, PAGE).total)
    # Blocks of another size, and of a tensor that no layer gave, are made of all keys.
    found, _ = layer.update(keys[:, :, 41:42], keys[:, :, 41:42])
    assert newest_of(found, 32)[1] is None
    assert newest_of(found.clone(), PAGE)[1] is None
    # Two tokens at once are taken in when blocks are asked for.
    layer.update(keys[:, :, 42:43], keys[:, :, 42:43])
    found, _ = layer.update(keys[:, :, 43:45], keys[:, :, 43:45])
    blocks, newest = newest_of(found, 32)
    assert newest is None
    assert torch.equal(blocks.total, key_blocks_cache.key_blocks(found, 32).total)


def cropped(cache: Any) -> None:
    cache.crop(-7)


def reordered(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


def repeated(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([1, 1]))


def written_over(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys[:, :, 20:40] *= -3


def cropped_and_refilled(cache: Any) -> None:
    """As many tokens as before, and others."""
    cache.crop(-1)
    for number, layer in enumerate(cache.layers):
        key = torch.full_like(layer.keys[:, :, :1], 0.3 + number)
        layer.update(key, key)


@pytest.mark.parametrize(
    "change", [cropped, reordered, repeated, written_over, cropped_and_refilled]
)
def test_a_cache_that_was_changed_is_noticed(
    change: Callable[[Any], None], made: list[int]
) -> None:
    model = sparse("llama")
    caches = both(model, batch=2)
    run(model, caches, some(9, 2))
    with torch.no_grad():
        for cache in caches:
            change(cache)
    made.clear()
    run(model, caches, some(5, 2))
    layers = len(caches[0].layers)
    assert len(made) == layers + 5 * layers  # once by ours, at every step by the other


def test_another_page_makes_other_blocks() -> None:
    layer = KeyBlocksLayer()
    keys, _ = layer.update(torch.randn(1, 1, 70, 8), torch.randn(1, 1, 70, 8))
    assert blocks_of(keys, 16).block == 16
    found = blocks_of(keys, 32)
    assert found.block == 32
    assert torch.equal(found.high, key_blocks_cache.key_blocks(keys, 32).high)


def test_a_layer_that_is_reset_starts_anew() -> None:
    layer = KeyBlocksLayer()
    for keys in torch.randn(2, 1, 2, 50, 8):
        found, _ = layer.update(keys, keys)
        kept, want = blocks_of(found, PAGE), key_blocks_cache.key_blocks(found, PAGE)
        assert torch.equal(kept.low, want.low)
        assert torch.equal(kept.total, want.total)
        layer.reset()


def test_a_copy_of_a_cache_goes_its_own_way() -> None:
    model = sparse("llama")
    caches = both(model)
    run(model, caches, some(5))
    copies = [copy.deepcopy(cache) for cache in caches]
    run(model, caches, some(20))
    run(model, copies, some(20))


def test_inference_mode_and_afterwards() -> None:
    layer = KeyBlocksLayer()
    keys = torch.randn(1, 1, 80, 8)
    with torch.inference_mode():
        for part in (keys[:, :, :40], keys[:, :, 40:41]):
            found, _ = layer.update(part, part)
            blocks_of(found, PAGE)
    found, _ = layer.update(keys[:, :, 41:42], keys[:, :, 41:42])
    kept, want = blocks_of(found, PAGE), key_blocks_cache.key_blocks(found, PAGE)
    assert torch.equal(kept.low, want.low)


def test_layers_without_a_config() -> None:
    model = sparse("llama")
    caches: list[Any] = [KeyBlocksCache(), DynamicCache()]
    prompt = some(40)
    with torch.no_grad():
        for cache in caches:
            step(model, prompt, cache)
    run(model, caches, some(10))
    assert all(isinstance(layer, KeyBlocksLayer) for layer in caches[0].layers)


def test_nothing_keeps_a_cache_alive() -> None:
    before = len(key_blocks_cache._LAYERS)
    model = sparse("llama")
    caches = both(model)
    run(model, caches, some(3))
    assert len(key_blocks_cache._LAYERS) > before
    del caches
    assert len(key_blocks_cache._LAYERS) == before


def test_generate_takes_it() -> None:
    model = sparse("llama")
    prompt = some(50)
    options = {"max_new_tokens": 12, "do_sample": False}
    names = [KeyBlocksCache(config=model.config), DynamicCache(config=model.config)]
    mine, other = (model.generate(prompt, **named(model, cache), **options) for cache in names)
    assert torch.equal(mine, other)
    assert all(layer._kept is not None for layer in names[0].layers)

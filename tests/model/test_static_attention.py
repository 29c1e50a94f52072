"""Attention over a static cache that reads what is there: the logits of torch with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hopsparse.models.generate import cache_argument
from hopsparse.models.static_attention import STATIC, mask, page_of, room_for
from tests.helpers.tiny_models import tiny_llama, tiny_qwen3

transformers = pytest.importorskip("transformers")


def steps_of(
    model: Any, name: str, room: int, *, steps: int = 3, padded: int = 0, **first: Any
) -> list[Tensor]:
    """Logits of a prompt and of steps behind it, of two texts."""
    model.set_attn_implementation(name)
    cache = transformers.StaticCache(config=model.config, max_cache_len=room)
    ids = torch.arange(2 * (6 + steps)).view(2, -1) % 50
    seen = torch.ones_like(ids)
    seen[0, :padded] = 0
    found, at = [], 0
    with torch.no_grad():
        for tokens in (6, *[1] * steps):
            options: dict[str, Any] = {cache_argument(model): cache} | (first if at == 0 else {})
            if padded:
                options["attention_mask"] = seen[:, : at + tokens]
            found.append(model(ids[:, at : at + tokens], use_cache=True, **options).logits)
            at += tokens
    return found


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("room", [16, 64, 192, 100])
def test_steps_give_the_logits_of_sdpa(make: Any, room: int) -> None:
    model = make().float()
    right = steps_of(model, "sdpa", room)
    for found, wanted in zip(steps_of(model, STATIC, room, from_empty=True), right, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_operator_runs_where_pages_divide_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from hopsparse.models import static_attention

    calls = []
    operator = static_attention.attend_decode
    monkeypatch.setattr(
        static_attention, "attend_decode", lambda *a, **k: calls.append(1) or operator(*a, **k)
    )
    model = tiny_llama().float()
    blocks = model.config.num_hidden_layers
    steps_of(model, STATIC, 64)
    assert len(calls) == 3 * blocks
    steps_of(model, STATIC, 100)
    steps_of(model, STATIC, 64, padded=2)
    assert len(calls) == 3 * blocks


def test_padding_is_seen() -> None:
    model = tiny_llama().float()
    right = steps_of(model, "sdpa", 64, padded=2)
    for found, wanted in zip(steps_of(model, STATIC, 64, padded=2), right, strict=True):
        torch.testing.assert_close(found[1], wanted[1])
        torch.testing.assert_close(found[0, -1], wanted[0, -1])


def test_values_that_need_a_gradient_take_a_mask_made_of_the_lengths() -> None:
    model = tiny_llama().float()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    ids = torch.arange(12).view(2, 6)
    options = {cache_argument(model): cache}
    model.set_attn_implementation(STATIC)
    with torch.no_grad():
        model(ids, **options)
    assert model(ids[:, :1], **options).logits.requires_grad
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        again = transformers.StaticCache(config=model.config, max_cache_len=64)
        model(ids, **{cache_argument(model): again})
        right = model(ids[:, :1], **{cache_argument(model): again}).logits
    for layer in cache.layers:
        layer.cumulative_length.sub_(1)
    model.set_attn_implementation(STATIC)
    torch.testing.assert_close(model(ids[:, :1], **options).logits.detach(), right)


def test_a_prompt_in_two_parts_needs_its_mask() -> None:
    """Without the caller's word that the cache is empty, the second part sees the first."""
    model = tiny_llama().float()
    logits = {}
    ids = torch.arange(16).view(1, 16)
    for name in ("sdpa", STATIC):
        model.set_attn_implementation(name)
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            model(ids[:, :8], **{cache_argument(model): cache})
            logits[name] = model(ids[:, 8:], **{cache_argument(model): cache}).logits
    torch.testing.assert_close(logits[STATIC], logits["sdpa"])


def test_one_graph_under_a_compiler() -> None:
    model = tiny_llama().float()
    right = steps_of(model, STATIC, 64)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    ids = torch.arange(18).view(2, 9) % 50
    options = {cache_argument(model): cache, "use_cache": True}
    run = torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)
    with torch.no_grad():
        model(ids[:, :6], **options)
        for at, wanted in zip(range(6, 9), right[1:], strict=True):
            torch.testing.assert_close(run(ids[:, at : at + 1], **options).logits, wanted)
    torch._dynamo.reset()


def test_what_the_mask_says() -> None:
    config = tiny_llama().config
    heads = config.num_key_value_heads
    told = mask(2, 1, 128, torch.tensor(9), config=config, attention_mask=None)
    assert told is not None
    assert told.tolist() == [10] * 2 * heads + list(range(2 * heads * 2))
    assert mask(2, 1, 128, 0, config=config, attention_mask=None) is None
    for differing in ({"local_size": 4}, {"attention_mask": torch.ones(2, 128).bool()}):
        found = mask(2, 1, 128, torch.tensor(9), config=config, **differing)
        assert found is not None
        assert found.shape == (2, 1, 1, 128)
    assert [page_of(tokens) for tokens in (128, 96, 80, 72)] == [64, 32, 16, None]
    assert [room_for(tokens) for tokens in (1, 64, 65)] == [64, 64, 128]

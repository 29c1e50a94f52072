"""Attention of accelerated models over a cache of a fixed size: what "sdpa" gives, from lengths."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import hopsparse
from hopsparse import fuse_blocks
from hopsparse.models import cached_attention, self_attention
from hopsparse.models.cached_attention import IMPLEMENTATION, attend, install, mask
from tests.helpers.cached_logits import FUSED, assert_as_near, logits, telling
from tests.helpers.tiny_models import tiny_llama, tiny_qwen3

WIDE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The CPU takes the way of a GPU, with the references of both operators; which ran is told."""
    ran: list[str] = []
    monkeypatch.setattr(cached_attention, "_serves", lambda device: True)

    for name in ("attend_decode", "attend_prefill"):
        run = telling(getattr(cached_attention, name), name, ran)
        monkeypatch.setattr(cached_attention, name, run)
    run = telling(self_attention.rope_append, "rope_append", ran)
    monkeypatch.setattr(self_attention, "rope_append", run)
    yield ran
    cached_attention._KNOWN.clear()


def tiny(make: Any = tiny_llama, **changes: Any) -> Any:
    config = make().config
    for name, value in (WIDE | changes).items():
        setattr(config, name, value)
    return type(make())(config).to(torch.bfloat16).eval().requires_grad_(False)


@pytest.mark.parametrize("room", [64, 48, 80], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_gives_what_it_gives_under_sdpa(kernels: list[str], batch: int, room: int) -> None:
    model, texts = tiny(), torch.randint(0, 256, (batch, 24))
    steps = (9, 1, 1, 7, 5, 1)  # A prompt, tokens, chunks.
    right = logits(model, texts, steps, room)
    undo = install(model)
    found = logits(model, texts, steps, room)
    layers = model.config.num_hidden_layers
    assert kernels.count("attend_decode") == 3 * layers
    assert kernels.count("attend_prefill") == 3 * layers
    undo()
    assert_as_near(found, right, logits(copy.deepcopy(model).double(), texts, steps, room))
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, texts, steps, room), right)


@pytest.mark.parametrize(
    "changes",
    [{"room": 30}, {"head_dim": 32}, {"dtype": torch.float32}],
    ids=["no pages", "other heads", "float32"],
)
def test_what_kernels_do_not_have_runs_as_sdpa(kernels: list[str], changes: dict[str, Any]) -> None:
    room, dtype = changes.get("room", 64), changes.get("dtype", torch.bfloat16)
    model = tiny(head_dim=changes.get("head_dim", 64)).to(dtype)
    texts = torch.randint(0, 256, (2, 20))
    right = logits(model, texts, (12, 1, 7), room)
    install(model)
    # A mask that is there takes another way through torch than one that is only meant.
    found = logits(model, texts, (12, 1, 7), room)
    assert kernels == []
    model.set_attn_implementation("sdpa")
    assert_as_near(found, right, logits(model.double(), texts, (12, 1, 7), room))


def test_padding_is_seen(kernels: list[str]) -> None:
    model, texts = tiny(), torch.randint(0, 256, (2, 16))
    padding = torch.ones(2, 16, dtype=torch.bool)
    full = logits(model, texts, (16,), 64)
    padding[1, :5] = False
    right = logits(model, texts, (16,), 64, attention_mask=padding)
    install(model)
    assert torch.equal(logits(model, texts, (16,), 64, attention_mask=padding), right)
    assert kernels == []
    padding[:] = True
    found = logits(model, texts, (16,), 64, attention_mask=padding)
    assert set(kernels) == {"attend_prefill"}
    model.set_attn_implementation("sdpa")
    assert_as_near(found, full, logits(model.double(), texts, (16,), 64))


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_what_generate_asks_for_ahead_reaches_compiled_steps(
    kernels: list[str], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, texts = tiny(make), torch.randint(1, 256, (3, 8))
    how = {"max_new_tokens": 57, "cache_implementation": "static", "output_logits": True}
    how |= {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    right = model.generate(texts, **how, pad_token_id=0)
    install(model)
    seen = cached_attention._all_seen
    # Inside of a step that is compiled nothing is looked at, as transformers compiles it on a GPU.
    monkeypatch.setattr(
        cached_attention, "_all_seen", lambda mask: seen(mask) and (mask is None or mask.dim() == 2)
    )
    found = model.generate(texts, **how, pad_token_id=0)
    assert set(kernels) == {"attend_decode", "attend_prefill"}
    for ours, theirs in zip(found.logits[:2], right.logits[:2], strict=True):
        # bfloat16 of about 1; generate() has no float64 to hold both against.
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.05)


def test_without_such_a_cache_it_is_sdpa(kernels: list[str]) -> None:
    model, texts = tiny(), torch.randint(0, 256, (2, 16))
    with torch.no_grad():
        right = model(texts).logits
        install(model)
        assert torch.equal(model(texts).logits, right)
    assert kernels == []


def test_a_gradient_is_kept(kernels: list[str]) -> None:
    query, key = torch.randn(2, 2, 5, 64).bfloat16(), torch.randn(2, 1, 64, 64).bfloat16()
    query.requires_grad_()
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    lengths = torch.tensor([30, 64], dtype=torch.int32)
    found, _ = attend(module, query, key, key, lengths)
    found.sum().backward()
    assert kernels == []
    assert query.grad is not None
    seen = torch.arange(64) < torch.stack([torch.arange(26, 31), torch.arange(60, 65)]).unsqueeze(
        -1
    )
    right, _ = sdpa_attention_forward(module, query, key, key, seen[:, None])
    assert torch.equal(found, right)


def test_lengths_are_those_of_the_step(kernels: list[str]) -> None:
    counted = torch.tensor(7)
    found = mask(3, 2, 64, q_offset=counted, device=torch.device("cpu"))
    assert found is not None
    counted += 2  # As the cache does, before attention reads its keys.
    assert found.tolist() == [9, 9, 9]
    assert found.dtype == torch.int32
    told = mask(3, 5, 64, device=torch.device("cpu"))
    assert told is not None
    assert told.tolist() == [5, 5, 5]


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_fused_blocks_attend_so_until_undone(make: Any) -> None:
    model = make().eval().requires_grad_(False)
    assert model.config._attn_implementation == "sdpa"
    fused = fuse_blocks(model)
    assert model.config._attn_implementation == IMPLEMENTATION
    fused.undo()
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_is_left_alone() -> None:
    model = tiny()
    model.set_attn_implementation("eager")
    install(model)()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_positions_and_the_cache_are_one_launch_of_fused_blocks(
    kernels: list[str], scheme: str | None, make: Any
) -> None:
    torch.manual_seed(0)
    config = make().config
    for name, value in WIDE.items():
        setattr(config, name, value)
    model = type(make())(config).to(torch.bfloat16).eval()
    hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude", scheme=scheme))
    model.requires_grad_(False)
    texts = torch.randint(0, 256, (2, 16))
    right = logits(model, texts, (9, 1, 6), 64)
    kinds = [type(block.self_attn) for block in model.model.layers]
    names = set(model.state_dict())
    fused = fuse_blocks(model)
    found = logits(model, texts, (9, 1, 6), 64)
    layers = model.config.num_hidden_layers
    # A cache takes its memory in the first call, which goes the long way.
    assert kernels.count("rope_append") == 2 * layers
    assert kernels.count("attend_decode") == layers
    torch.testing.assert_close(found, right, **FUSED)
    # Without a cache, and with one that grows, the code of transformers runs.
    kernels.clear()
    with torch.no_grad():
        model(texts, use_cache=True)
    assert kernels == []
    fused.undo()
    assert [type(block.self_attn) for block in model.model.layers] == kinds
    assert set(model.state_dict()) == names
    assert torch.equal(logits(model, texts, (9, 1, 6), 64), right)


@pytest.mark.parametrize("under", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_a_fused_model_says_what_it_said(
    kernels: list[str], dtype: torch.dtype, under: torch.dtype
) -> None:
    model = tiny()
    hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude"))
    model.requires_grad_(False).to(dtype)
    texts = torch.randint(0, 256, (2, 16))
    with torch.autocast("cpu", under):
        right = logits(model, texts, (9, 1, 6), 64)
    fuse_blocks(model)
    with torch.autocast("cpu", under):
        found = logits(model, texts, (9, 1, 6), 64)
    torch.testing.assert_close(found, right, **FUSED)
    assert ("rope_append" in kernels) == (dtype == under)

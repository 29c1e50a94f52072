"""Attention of accelerated models on a GPU: our kernels over a cache of a fixed size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hopsparse
from hopsparse.graphs import capture
from hopsparse.ops.attend_decode import device as decode_device
from hopsparse.ops.attend_prefill import device as prefill_device
from hopsparse.ops.rope_append import device as rope_device
from tests.helpers.cached_logits import FUSED, logits, telling

transformers = pytest.importorskip("transformers")


def tiny(device: torch.device, dim: int, group: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": dim}
    config = transformers.LlamaConfig(vocab_size=256, **sizes, **heads)
    with device:
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("batch", [1, 5])
def test_chunks_and_tokens_give_what_sdpa_gives(
    batch: int, group: int, dim: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hopsparse.models.cached_attention import install

    ran: list[str] = []
    for name, module in (("decode", decode_device), ("prefill", prefill_device)):
        monkeypatch.setattr(module, "run", telling(module.run, name, ran))
    model, texts = tiny(device, dim, group), torch.randint(0, 256, (batch, 160), device=device)
    steps = (90, 1, 1, 60, 7, 1)
    right = logits(model, texts, steps, 192)
    undo = install(model)
    found = logits(model, texts, steps, 192)
    undo()
    assert (ran.count("decode"), ran.count("prefill")) == (6, 6)
    # Of bfloat16, with sums in another order: a few roundings of logits of about 1.
    torch.testing.assert_close(found, right, atol=0.03, rtol=0.05)


@torch.no_grad()
def test_a_captured_step_serves_every_length(device: torch.device) -> None:
    from hopsparse.models.cached_attention import install
    from hopsparse.models.generate import cache_argument

    model = tiny(device, 64, 4)
    install(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=256)
    name = {cache_argument(model): cache}

    def step(ids: Tensor) -> Tensor:
        found: Tensor = model(ids, use_cache=True, **name).logits
        return found

    texts = torch.randint(0, 256, (3, 200), device=device)
    step(texts[:, :1])
    graph = capture(step, texts[:, :1].contiguous(), reuse_outputs=False)
    cache.reset()
    step(texts[:, :60])
    found = [graph(texts[:, i : i + 1].contiguous()) for i in range(60, 200)]
    right = logits(model, texts, (60, *[1] * 140), 256)
    torch.testing.assert_close(torch.cat(found, 1), right[:, 60:], atol=0, rtol=0)
    graph.release()


@pytest.mark.parametrize("scheme", [None, "fp8"])
@torch.no_grad()
def test_fused_blocks_write_what_unfused_ones_do(
    scheme: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of a text, positions and cache in the kernel, a captured step among them."""
    ran: list[str] = []
    monkeypatch.setattr(rope_device, "run", telling(rope_device.run, "rope", ran))
    model = tiny(device, 64, 2)
    hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude", scheme=scheme))
    model.requires_grad_(False)
    texts = torch.randint(0, 256, (3, 120), device=device)
    steps = (40, 1, 1, 70, 7, 1)
    right = logits(model, texts, steps, 128)
    fused = hopsparse.fuse_blocks(model)
    found = logits(model, texts, steps, 128)
    fused.undo()
    assert len(ran) == 2 * 5  # The first call, in which the cache takes its memory, goes around.
    torch.testing.assert_close(found, right, **FUSED)


def test_transformers_compiles_the_steps_of_a_fused_model(device: torch.device) -> None:
    """`generate` makes masks ahead of a step that it compiles; ours are lengths."""
    model = tiny(device, 64, 2)
    hopsparse.sparsify(model, hopsparse.Recipe("2:4", "magnitude"))
    model.requires_grad_(False)
    texts = torch.randint(1, 256, (3, 8), device=device)
    compiled = transformers.CompileConfig(backend="aot_eager", mode=None)
    how = {"max_new_tokens": 57, "cache_implementation": "static", "output_logits": True}
    how |= {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
    right = model.generate(texts, **how, pad_token_id=0, disable_compile=True)
    fused = hopsparse.fuse_blocks(model)
    found = model.generate(texts, **how, pad_token_id=0, compile_config=compiled)
    fused.undo()
    torch._dynamo.reset()
    for ours, theirs in zip(found.logits[:2], right.logits[:2], strict=True):
        torch.testing.assert_close(ours, theirs, **FUSED)

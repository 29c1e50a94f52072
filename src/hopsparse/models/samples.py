"""Short texts from the dense and the sparse model, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..quant import Rounding
from ._block import restore_shard, rounding_in
from ._resume import RunState
from .load import load
from .source import WeightSource, materialize_outside, skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = (
    "The capital of France is",
    "In the beginning",
    "To make a cup of tea, first",
)
_NEW_TOKENS = 32


@torch.inference_mode()
def generate_pair(
    source: WeightSource, state: RunState, folder: Path, device: str
) -> list[dict[str, str]]:
    """Greedy continuations of a few prompts by both models.

    Args:
        source: The dense model.
        state: The finished blocks, whose shards lie in `folder`.
        folder: Where the shards are.
        device: Where to run.
    """
    tokenizer = source.tokenizer()
    model = skeleton(source)
    materialize_outside(model, (), source, device)
    dense = [_continue(model, tokenizer, prompt) for prompt in PROMPTS]
    rounding: dict[str, Rounding] = {}
    for shard in state.shards:
        rounding |= restore_shard(model, folder, shard)
    with rounding_in(model, rounding):
        sparse = [_continue(model, tokenizer, prompt) for prompt in PROMPTS]
    return [
        {"prompt": prompt, "dense": before, "sparse": after}
        for prompt, before, after in zip(PROMPTS, dense, sparse, strict=True)
    ]


@torch.inference_mode()
def compare_samples(source: WeightSource, sparse: Path, device: str) -> list[dict[str, str]]:
    """The same as `generate_pair` for a finished checkpoint, which is loaded after the dense model.

    Args:
        source: The dense model.
        sparse: The checkpoint folder.
        device: Where to run.
    """
    tokenizer = source.tokenizer()
    model = skeleton(source)
    materialize_outside(model, (), source, device)
    dense = [_continue(model, tokenizer, prompt) for prompt in PROMPTS]
    # A checkpoint in 16 bits is measured in float32, and so is its sample.
    loaded: Any = load(sparse, device=device, dtype=torch.float32)
    after = [_continue(loaded, tokenizer, prompt) for prompt in PROMPTS]
    return [
        {"prompt": prompt, "dense": before, "sparse": now}
        for prompt, before, now in zip(PROMPTS, dense, after, strict=True)
    ]


def _continue(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    output = model.generate(
        **inputs,
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    new = output[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)

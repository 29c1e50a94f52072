"""Whole models small enough to make, save, prune and run in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Model = TypeVar("Model", LlamaForCausalLM, Qwen3ForCausalLM)

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZES = {
    "vocab_size": len(ALPHABET) + 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": len(ALPHABET),
    "eos_token_id": len(ALPHABET),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end token."""
    vocabulary = {symbol: index for index, symbol in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<end>",
        eos_token="<end>",
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama of 3 blocks in bfloat16."""
    torch.manual_seed(seed)
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": True} | changes)
    return _in_bfloat16(LlamaForCausalLM(config))


def tiny_qwen3(seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 of 3 blocks in bfloat16, with a head of its own."""
    torch.manual_seed(seed)
    config = Qwen3Config(**SIZES | {"tie_word_embeddings": False})
    return _in_bfloat16(Qwen3ForCausalLM(config))


def _in_bfloat16(model: Model) -> Model:
    """Weights in bfloat16 and rotary frequencies in float32, as loaders leave them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.eval()


def save_model(model: LlamaForCausalLM | Qwen3ForCausalLM, folder: Path) -> Path:
    """Write model and tokenizer as an HF folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_text(path: Path, characters: int = 4000) -> Path:
    """A text that is not one repeated word."""
    words = [f"{index * 7919 % 1000} " for index in range(characters)]
    path.write_text("".join(words)[:characters], encoding="utf-8")
    return path

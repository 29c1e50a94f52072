"""A Llama of two blocks with random weights, and a tokenizer that knows every byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEXT = "In the beginning the engineers made the sparse and the dense. And the sparse was quick. "


def write_tiny_llama(folder: Path, *, hidden: int = 32, **config: Any) -> Path:
    """Write a checkpoint folder that transformers and hopsparse can read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {token: index + 2 for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    settings = {
        "vocab_size": len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | config))).to(torch.bfloat16)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def write_text(path: Path, repeats: int = 40) -> Path:
    """Write a text of a few thousand bytes."""
    path.write_text(TEXT * repeats, encoding="utf-8")
    return path


def write_taught_llama(folder: Path) -> Path:
    """A tiny Llama that knows text.txt beside it, so that pruning costs it something.

    eval.txt lies there too.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    text = write_text(folder / "text.txt")
    (folder / "eval.txt").write_text("Another text, that nobody has trained on. " * 20)
    model_folder = write_tiny_llama(folder / "model")
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(model_folder)(text.read_text())["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(ids) - 32, (16,), generator=draw)
        batch = torch.stack([ids[start : start + 32] for start in starts])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(model_folder)
    return model_folder

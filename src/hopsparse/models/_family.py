"""What distinguishes one family of language models from another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Where things are in a decoder-only language model, and how GGUF files store it.

    Attributes:
        name: Shown to users.
        model_types: `model_type` values of config.json.
        blocks: Path of the list of decoder blocks.
        final_norm: Path of the norm after the last block.
        head: Path of the projection to the vocabulary.
        residual: Layer of a block -> module of the block whose input is the residual stream that
            the layer's output is added to.
        gguf_architectures: `general.architecture` values of GGUF files.
        gguf_interleaves_rotary: Whether GGUF stores q and k rows in interleaved rotary order,
            where HF has two halves.
    """

    name: str
    model_types: tuple[str, ...]
    blocks: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    residual: tuple[tuple[str, str], ...] = (
        ("self_attn.o_proj", "input_layernorm"),
        ("mlp.down_proj", "post_attention_layernorm"),
    )
    gguf_architectures: tuple[str, ...] = ()
    gguf_interleaves_rotary: bool = False

"""What distinguishes one family of language models from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Channels(NamedTuple):
    """Channels inside a block that have no order of their own.

    Attributes:
        makers: Layers whose rows they are.
        taker: The layer whose columns they are.
        heads: Module whose `head_dim` says within which width they may move; "": anywhere.
    """

    makers: tuple[str, ...]
    taker: str
    heads: str = ""


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
        channels: Inner channels that may be permuted.
        scales: Module that makes an input -> the layers that take it, and nobody else does: a
            factor may move from one to the other.
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
    channels: tuple[Channels, ...] = (
        Channels(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
        Channels(("self_attn.v_proj",), "self_attn.o_proj", heads="self_attn"),
    )
    scales: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.up_proj", ("mlp.down_proj",)),
    )
    gguf_architectures: tuple[str, ...] = ()
    gguf_interleaves_rotary: bool = False

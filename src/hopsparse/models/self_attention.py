"""The attention of a block whose q, k and v are one product: from it to the cache in one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as once
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer

from ..ops import rope_append
from .cached_attention import attend
from .stream import made_again

# They rotate halves of heads, and nothing happens between q, k, v and the cache but that, and a
# norm of each head of q and of k.
_KNOWN = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
_NORM = "Qwen3RMSNorm"


def append_in_kernels(attention: nn.Module, qkv: nn.Module) -> Callable[[], None]:
    """Let rotation, norms of heads and the cache be one launch; returns the way back.

    The module stays the object that it is, of a class made from its own: who looks for it by its
    class finds it. Calls whose cache is no static one run its own code.

    Args:
        attention: That of a block. One of another kind than those known is left alone.
        qkv: The product of its q, k and v, which takes what the module takes.
    """
    if type(attention).__name__ not in _KNOWN or not _has_known_norms(attention):
        return lambda: None
    before = type(attention)
    attention.__dict__["_qkv"] = qkv  # Beside the modules: it is part of q_proj already.
    attention.__class__ = _appending(cast(Any, before))

    def undo() -> None:
        attention.__class__ = before
        attention.__dict__.pop("_qkv", None)

    return undo


@once
def _appending(kind: Any) -> Any:
    """An attention of that class, in fewer launches."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        cache = options.get("cache", options.get("past_key_values"))
        found = _layer_of(cache, self.layer_idx)
        if not _served(found, hidden_states, position_embeddings, attention_mask):
            return kind.forward(
                self,
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **options,
            )
        layer, turns = cast(StaticLayer, found), cast(tuple[Tensor, Tensor], position_embeddings)
        lengths, norms, eps = cast(Tensor, attention_mask), None, 0.0
        if hasattr(self, "q_norm"):
            norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.variance_epsilon
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        q = rope_append(
            self._qkv(hidden_states),
            turns,
            (keys, values),
            lengths,
            norms=norms,
            eps=eps,
            count=layer.cumulative_length,
        )
        q = q.transpose(1, 2)
        out, _ = attend(self, q, keys, values, lengths, scaling=self.scaling)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    methods = {"forward": forward, "__reduce__": lambda self: made_again(_appending, kind, self)}
    return type(kind.__name__, (kind,), methods | {"__module__": __name__})


def _served(
    layer: StaticLayer | None,
    x: Tensor,
    turns: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
) -> bool:
    """Whether one launch does what a call asks for: a counted step, in one dtype, no gradient."""
    counted = mask is not None and mask.dim() == 1
    if layer is None or not counted or turns is None or torch.is_grad_enabled():
        return False
    # Autocast makes q, k and v of another dtype than what they are turned by and kept in.
    where = x.device.type
    made = torch.get_autocast_dtype(where) if torch.is_autocast_enabled(where) else x.dtype
    return bool(made == turns[0].dtype == cast(Tensor, layer.keys).dtype)


def _has_known_norms(attention: nn.Module) -> bool:
    """Whether both or neither of q and k have the norm of a head that the kernel has."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if norms == [None, None]:
        return True
    alike = {getattr(each, "variance_epsilon", None) for each in norms}
    return len(alike) == 1 and all(type(each).__name__ == _NORM for each in norms)


def _layer_of(cache: Any, index: int) -> StaticLayer | None:
    """The layer of a static cache that has its memory; None if it is another."""
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    known = type(layer) is StaticLayer  # A class derived from it may keep other things.
    return layer if known and cast(StaticLayer, layer).is_initialized else None

"""A cache of transformers that keeps, beside keys, what is known of their blocks.

transformers gives a function of attention keys and nothing else; here it finds the layer of the
cache by the tensor that the layer returned. A layer takes in the keys of a step where what it knows
is of the keys that it has: it remembers which tensor those were, and at which version. Whatever
crops, reorders, repeats, moves or resets a cache puts another tensor there or changes that one, and
blocks are then made anew from all keys.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..ops import KeyBlocks, append_keys
from .attention_choice import key_blocks

# By the keys that a layer returned last; neither keeps the other alive.
_LAYERS: Any = WeakTensorKeyDictionary()


class KeyBlocksLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a `KeyBlocksCache`: keys, values, and blocks of keys once they are asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept: KeyBlocks | None = None
        self._of: Tensor | None = None
        self._version: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in keys and values [batch, kv_heads, new, dim]; all of them are returned."""
        before = self.keys if self.is_initialized else None
        known = self._kept is not None and self._knows(before)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if torch.compiler.is_compiling():
            self._kept = self._of = None
            return keys, values
        if known and before is not None:
            self._take_in(keys, before.shape[2])
        else:
            self._kept = None
        self._of, self._version = keys, _version_of(keys)
        _LAYERS[keys] = weakref.ref(self)
        return keys, values

    def reset(self) -> None:
        """Forget all tokens."""
        self._kept = self._of = None
        super().reset()

    def blocks(self, page: int) -> KeyBlocks:
        """What is kept of the keys of all tokens, in blocks of `page`."""
        kept = self._kept
        if kept is None or kept.block != page or not self._knows(self.keys):
            kept = self._kept = key_blocks(self.keys, page)
            self._of, self._version = self.keys, _version_of(self.keys)
        # As many as there would be if they were made now; there is room for more.
        count = -(-self.keys.shape[2] // page)
        low, high, total = (each[:, :, :count] for each in (kept.low, kept.high, kept.total))
        return KeyBlocks(low, high, total, page)

    def _knows(self, keys: Tensor | None) -> bool:
        """Whether blocks are those of these keys."""
        return keys is not None and keys is self._of and _version_of(keys) == self._version

    def _take_in(self, keys: Tensor, start: int) -> None:
        """The tokens from `start` on."""
        kept = self._kept
        assert kept is not None
        if kept.low.is_inference() and not torch.is_inference_mode_enabled():
            self._kept = None  # torch lets nobody write there any more
            return
        if keys.shape[2] > kept.tokens:
            self._kept = kept = _roomier(kept, keys.shape[2])
        starts = torch.full((keys.shape[0],), start, dtype=torch.int32, device=keys.device)
        append_keys(kept, keys[:, :, start:].transpose(1, 2), starts)


class KeyBlocksCache(DynamicCache):  # type: ignore[misc]
    """A `DynamicCache` whose layers keep blocks of keys between steps.

    For `attn_implementation="hopsparse"`: what it attends to is the same, and no step looks through
    all keys again. Layers of sliding windows, which are dense, stay as they are.

    Args:
        config: Of the model, as for `DynamicCache`; None: full attention in every layer.

    Example:
        >>> cache = KeyBlocksCache()
        >>> keys, _ = cache.update(torch.ones(1, 2, 40, 8), torch.ones(1, 2, 40, 8), 0)
        >>> cache.layers[0].blocks(16).low.shape
        torch.Size([1, 2, 3, 8])
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config=config)
        own: Any = self  # of a base that mypy knows nothing of
        own.layers = [
            KeyBlocksLayer() if type(layer) is DynamicLayer else layer for layer in own.layers
        ]
        if own.layer_class_to_replicate is DynamicLayer:
            own.layer_class_to_replicate = KeyBlocksLayer


def blocks_of(keys: Tensor, page: int) -> KeyBlocks:
    """What is known of keys: kept by the layer that returned them, or made of them now.

    Args:
        keys: [batch, kv_heads, tokens, dim].
        page: Tokens of a block.
    """
    held = _LAYERS.get(keys)
    layer = None if held is None else held()
    return key_blocks(keys, page) if layer is None or layer.keys is not keys else layer.blocks(page)


def _version_of(keys: Tensor) -> int | None:
    """How often a tensor was changed; None where torch does not count."""
    return None if keys.is_inference() else keys._version


def _roomier(kept: KeyBlocks, tokens: int) -> KeyBlocks:
    """The same with room for so many tokens and as many again, so that copies are few."""
    batch, heads, count, dim = kept.low.shape
    shape = (batch, heads, 2 * -(-tokens // kept.block), dim)
    more = KeyBlocks.empty(shape, block=kept.block, dtype=kept.low.dtype, device=kept.low.device)
    for name in ("low", "high", "total"):
        getattr(more, name)[:, :, :count].copy_(getattr(kept, name))
    return more

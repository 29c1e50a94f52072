"""A cache of transformers that keeps, beside keys, what is known of their blocks.

transformers gives a function of attention keys and nothing else; here it finds the layer of the
cache by the tensor that the layer returned. A layer takes in the keys of a step where what it knows
is of the keys that it has: it remembers which tensor those were, and at which version. Whatever
crops, reorders, repeats, moves or resets a cache puts another tensor there or changes that one, and
blocks are then made anew from all keys. Keys wait until blocks are asked for: those of one token
are then taken in by the launch that scores.
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
        self._waiting = 0  # last tokens that blocks do not know yet

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in keys and values [batch, kv_heads, new, dim]; all of them are returned."""
        before = self.keys if self.is_initialized else None
        found: tuple[Tensor, Tensor]
        if torch.compiler.is_compiling():
            self._kept = self._of = None
            found = super().update(key_states, value_states, *args, **kwargs)
            return found
        if before is not None and self._kept is not None and self._knows(before):
            self._take_in(before)
        else:
            self._kept = None
        found = super().update(key_states, value_states, *args, **kwargs)
        self._waiting = key_states.shape[2]
        self._of, self._version = found[0], _version_of(found[0])
        _LAYERS[found[0]] = weakref.ref(self)
        return found

    def reset(self) -> None:
        """Forget all tokens."""
        self._kept = self._of = None
        super().reset()

    def blocks(self, page: int) -> KeyBlocks:
        """What is kept of the keys of all tokens, in blocks of `page`."""
        if self._is_of(page):
            self._take_in(self.keys)
        kept = self._kept
        if kept is None or not self._is_of(page):
            kept = self._kept = key_blocks(self.keys, page)
            self._of, self._version, self._waiting = self.keys, _version_of(self.keys), 0
        return self._in_use(kept)

    def newest(self, page: int) -> tuple[KeyBlocks, Tensor | None]:
        """The same, and keys [batch, 1, kv_heads, dim] that the caller has to take in, or None."""
        kept = self._with_room() if self._is_of(page) and self._waiting == 1 else None
        if kept is None:
            return self.blocks(page), None
        self._waiting = 0
        return self._in_use(kept), self.keys[:, :, -1:].transpose(1, 2)

    def _is_of(self, page: int) -> bool:
        """Whether there are blocks of that size, of the keys that the layer has."""
        return self._kept is not None and self._kept.block == page and self._knows(self.keys)

    def _in_use(self, kept: KeyBlocks) -> KeyBlocks:
        page = kept.block
        # As many as there would be if they were made now; there is room for more.
        count = -(-self.keys.shape[2] // page)
        low, high, total = (each[:, :, :count] for each in (kept.low, kept.high, kept.total))
        return KeyBlocks(low, high, total, page)

    def _knows(self, keys: Tensor | None) -> bool:
        """Whether blocks are those of these keys."""
        return keys is not None and keys is self._of and _version_of(keys) == self._version

    def _take_in(self, keys: Tensor) -> None:
        """Those that wait, which are the last."""
        kept = self._with_room() if self._waiting else None
        if kept is None:
            return
        start = keys.shape[2] - self._waiting
        starts = torch.full((keys.shape[0],), start, dtype=torch.int32, device=keys.device)
        append_keys(kept, keys[:, :, start:].transpose(1, 2), starts)
        self._waiting = 0

    def _with_room(self) -> KeyBlocks | None:
        """Blocks with room for the keys that the layer has; None if nobody may write there."""
        kept = self._kept
        assert kept is not None
        if kept.low.is_inference() and not torch.is_inference_mode_enabled():
            self._kept = None  # torch lets nobody write there any more
            return None
        if self.keys.shape[2] > kept.tokens:
            self._kept = kept = _roomier(kept, self.keys.shape[2])
        return kept


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


def newest_of(keys: Tensor, page: int) -> tuple[KeyBlocks, Tensor | None]:
    """The same, and keys [batch, 1, kv_heads, dim] of the newest token, which it does not know yet.

    The caller has to take these in, as `select_blocks` does; None if there are none.

    Args:
        keys: [batch, kv_heads, tokens, dim].
        page: Tokens of a block.
    """
    held = _LAYERS.get(keys)
    layer = None if held is None else held()
    if layer is None or layer.keys is not keys:
        return key_blocks(keys, page), None
    found: tuple[KeyBlocks, Tensor | None] = layer.newest(page)
    return found


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

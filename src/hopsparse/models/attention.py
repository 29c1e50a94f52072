"""The attention "hopsparse" of transformers; importing this module enters it in its registries.

`register` does that as soon as transformers has models. Masks are made as for "sdpa", which also
runs whatever is not sparse: short contexts, training, padding, windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops import COMPUTE_DTYPES, PagedKV, attend_decode, attend_prefill, contiguous_pages
from .attention_choice import choose, choose_tiles
from .attention_config import FOREIGN, IMPLEMENTATION, AttentionConfig
from .key_blocks_cache import newest_of


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; dense where it has to be, or where that is faster.

    Args:
        module: The layer; its `config` may have an AttentionConfig.
        query: [batch, heads, tokens, dim].
        key: [batch, kv_heads, all tokens, dim].
        value: As key.
        attention_mask: None, bool or additive [batch, 1, tokens, all tokens].
        dropout: Part of the weights that is dropped.
        scaling: Of q.k.
        options: What transformers passes on.

    Returns:
        [batch, tokens, heads, dim] and None.
    """
    config = AttentionConfig.of(module.config)
    # First what costs nothing: a mask is looked at on its device.
    short = key.shape[2] <= config.crossover or (query.shape[2] > 1 and not config.prefill)
    if short or not _may_be_sparse(module, (query, key, value), attention_mask, dropout, options):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1:
        return _decode(config, query, key, value, scale), None
    if attention_mask is None:
        # "sdpa" lines a causal mask up with the first keys: the rest of a cache is not filled.
        key, value = (each[:, :, : query.shape[2]] for each in (key, value))
    return _prefill(config, query, key, value, scale), None


def _may_be_sparse(
    module: Any,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> bool:
    query, key, value = tensors
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return False
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if dropout or not causal or any(options.get(name) for name in FOREIGN):
        return False
    if key.shape[-1] != value.shape[-1] or query.dtype not in COMPUTE_DTYPES:
        return False
    return mask is None or _is_causal(mask, query.shape[2], key.shape[2])


def _is_causal(mask: Tensor, queries: int, keys: int) -> bool:
    """Whether a mask hides nothing but the future; it waits for a GPU."""
    if mask.shape[-2:] != (queries, keys):
        return False
    seen = mask if mask.dtype == torch.bool else mask == 0
    plain = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
    return bool((seen == plain).all())


def _lengths(key: Tensor) -> Tensor:
    return torch.full((key.shape[0],), key.shape[2], dtype=torch.int32, device=key.device)


def _pages(config: AttentionConfig, key: Tensor, value: Tensor) -> PagedKV:
    return contiguous_pages(key, value, _lengths(key), config.page)


def _decode(
    config: AttentionConfig, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """[batch, 1, heads, dim]."""
    q = query[:, :, 0]
    # A KeyBlocksCache keeps them from step to step; of any other cache keys are looked through.
    blocks, newest = newest_of(key, config.page)
    indices, counts = choose(config, q, blocks, _lengths(key), scale, newest)
    cache = _pages(config, key, value)
    out, _ = attend_decode(q, cache, indices, counts, block=config.page, scale=scale)
    return out[:, None]


def _prefill(
    config: AttentionConfig, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """[batch, tokens, heads, dim]."""
    batch, heads, tokens, dim = query.shape
    indices, counts = choose_tiles(config, query, key, scale)
    cache = _pages(config, key, value)
    starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
    q = query.transpose(1, 2).reshape(batch * tokens, heads, dim)
    out, _ = attend_prefill(q, starts, cache, indices, counts, block=config.page, scale=scale)
    return out.view(batch, tokens, heads, dim)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])

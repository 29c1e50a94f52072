"""Attention of accelerated models: over all keys of a cache of a fixed size, by our kernels.

transformers hides what a `StaticCache` has not filled yet with a mask over all of it, which no fast
attention of torch takes. How many tokens there are says as much, and stays on the device: a graph
that was captured serves every length. Whatever else a call asks for runs as under "sdpa".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..launch import is_capturing
from ..ops import PagedKV, attend_decode, attend_prefill, contiguous_pages
from ..ops._product import is_hopper
from .attention_config import FOREIGN, configs_of

#: The name that transformers knows this attention by.
IMPLEMENTATION = "hopsparse_cached"

_PAGES = (64, 32, 16)
_DIMS, _LARGEST_GROUP = (64, 128), 16  # heads that both kernels have
_DTYPES = (torch.bfloat16, torch.float16)

# Which pages sequences have, and where their queries start: they depend on shapes alone.
_KNOWN: dict[tuple[object, ...], Tensor] = {}
_MOST_KNOWN = 256


def install(model: Any) -> Callable[[], None]:
    """Let a model whose attention is "sdpa" attend so; returns the way back.

    Args:
        model: A causal language model of transformers. One with another attention is left alone.
    """
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return lambda: None
    # Not `set_attention`: parts of another attention keep theirs.
    ours = [
        each for each in configs_of(model) if getattr(each, "_attn_implementation", None) == "sdpa"
    ]
    for config in ours:
        config._attn_implementation = IMPLEMENTATION

    def undo() -> None:
        for config in ours:
            if config._attn_implementation == IMPLEMENTATION:
                config._attn_implementation = "sdpa"

    return undo


def room_for(tokens: int) -> int:
    """Tokens that a static cache should have room for, so that it is read where it lies.

    Example:
        >>> room_for(65)
        128
    """
    return -(-tokens // _PAGES[0]) * _PAGES[0]


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """What `attend` is told of a step: lengths where those say it all, else the mask of "sdpa".

    Args:
        batch_size: Sequences.
        q_length: Tokens of each in this step.
        kv_length: Tokens that the cache has room for.
        q_offset: Tokens before this step; a tensor if they are counted on the device.
        kv_offset: Of the first key.
        mask_function: What is seen.
        attention_mask: bool [batch, tokens]: which are no padding; or what this returned before.
        options: What transformers passes on.

    Returns:
        int32 [batch], the tokens of each sequence with those of this step; or a mask, or None.
    """
    if attention_mask is not None and attention_mask.dim() == 1:
        return attention_mask  # `generate` asks ahead of a step, and hands in what it was told.
    counted = q_offset if isinstance(q_offset, Tensor) else None  # on the device
    device = torch.device(options.get("device", "cpu") if counted is None else counted.device)
    in_cache = counted is not None or kv_length != q_length + q_offset
    plain = mask_function is causal_mask_function and kv_offset == 0
    if in_cache and plain and _serves(device) and _all_seen(attention_mask):
        if counted is not None:
            return (counted + q_length).to(torch.int32).expand(batch_size).contiguous()
        tokens = int(q_offset) + q_length
        return torch.full((batch_size,), tokens, dtype=torch.int32, device=device)
    made: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **options,
    )
    return made


def _serves(device: torch.device) -> bool:
    return device.type == "cuda" and is_hopper(device.index or 0)


def _all_seen(padding: Tensor | None) -> bool:
    """Whether nothing is padding. It waits for the GPU, unless a graph would not let it."""
    if padding is None:
        return True
    if torch.compiler.is_compiling() or (padding.is_cuda and is_capturing(padding.get_device())):
        return False
    return bool(padding.all())


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
    """Attention as transformers calls it.

    Args:
        module: The layer.
        query: [batch, heads, tokens, dim].
        key: [batch, kv_heads, all tokens, dim].
        value: As key.
        attention_mask: What `mask` returned.
        dropout: Part of the weights that is dropped.
        scaling: Of q.k.
        options: What transformers passes on.

    Returns:
        [batch, tokens, heads, dim] and None.
    """
    lengths = attention_mask
    page = None
    if lengths is not None and lengths.dim() == 1:
        page = _page_for(query, key, value)
        if page is None or dropout or any(options.get(name) for name in FOREIGN):
            attention_mask, page = _mask_of(lengths, query.shape[2], key.shape[2]), None
    if lengths is None or page is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return found
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    cache = _cache(key, value, lengths, page)
    batch, heads, tokens, dim = query.shape
    if tokens == 1:
        return attend_decode(query[:, :, 0], cache, scale=scale)[0][:, None], None
    q = query.transpose(1, 2).reshape(batch * tokens, heads, dim)
    out, _ = attend_prefill(q, _starts(batch, tokens, query.device), cache, scale=scale)
    return out.view(batch, tokens, heads, dim), None


def _page_for(query: Tensor, key: Tensor, value: Tensor) -> int | None:
    """The page that both kernels read a cache by; None if they do not fit, or a gradient is due."""
    dim, group = query.shape[3], query.shape[1] // key.shape[1]
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        return None
    if dim not in _DIMS or value.shape[3] != dim or group > _LARGEST_GROUP:
        return None
    if query.dtype not in _DTYPES or key.dtype != query.dtype:
        return None
    return next((page for page in _PAGES if key.shape[2] % page == 0), None)


def _mask_of(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """A mask [batch, 1, queries, keys]: the last queries of each sequence see what came before."""
    at = torch.arange(keys, device=lengths.device)
    behind = torch.arange(queries, device=lengths.device) - queries + 1
    return at < (lengths[:, None] + behind)[:, None, :, None]


def _cache(key: Tensor, value: Tensor, lengths: Tensor, page: int) -> PagedKV:
    name = (key.shape, key.stride(), value.stride(), page, key.device)
    table = _KNOWN.get(name)
    cache = contiguous_pages(key, value, lengths, page, table)
    if table is None:
        _keep(name, cache.table)
    return cache


def _starts(batch: int, tokens: int, device: torch.device) -> Tensor:
    name = (batch, tokens, device)
    found = _KNOWN.get(name)
    if found is None:
        ends = torch.arange(batch + 1, dtype=torch.int32, device=device)
        found = _keep(name, tokens * ends)
    return found


def _keep(name: tuple[object, ...], made: Tensor) -> Tensor:
    """What later steps use again, unless its memory is that of a graph, or of a compiler."""
    graph = made.is_cuda and is_capturing(made.get_device())
    if not graph and not torch.compiler.is_compiling():
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[name] = made
    return made


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask)

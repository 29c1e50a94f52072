"""The attention "hopsparse_static" of transformers: the tokens of a static cache alone.

A static cache has room for more tokens than it holds. "sdpa" hides the rest by a mask, and with a
mask it copies keys for every query head and multiplies by all of them. Here a step of decoding
carries how many tokens there are instead, and `attend_decode` reads those alone, where they are.
Importing this module enters the attention in the registries of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops import PagedKV, attend_decode
from ..ops.attend_decode.plan import DIMS, GROUPS

#: The name that transformers knows the attention by.
STATIC = "hopsparse_static"
#: A cache of as many tokens, or a multiple, is read where it is.
PAGE = 64
_PAGES = (PAGE, 32, 16)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
# What changes scores or what is seen in a way that lengths know nothing of.
_FOREIGN = ("sliding_window", "softcap", "position_bias", "s_aux", "output_attentions")


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    **options: Any,
) -> Tensor | None:
    """The mask as for "sdpa"; for one query of a static cache without padding, what is there.

    Args:
        batch_size: Sequences.
        q_length: Queries of each.
        kv_length: Room for keys.
        q_offset: Tokens that came before, a tensor of a static cache.
        kv_offset: First key.
        mask_function: What may be seen; transformers combines causal ones with others.
        options: What transformers passes on: `attention_mask` is that of padding.

    Returns:
        bool [batch, 1, queries, keys], or None; or int32 [batch * kv_heads * (1 + pages)]: of
        every sequence and head of keys the tokens that are there, then of each its pages.
    """
    heads = getattr(options.get("config"), "num_key_value_heads", None)
    page = page_of(kv_length)
    counted = q_length == 1 and isinstance(q_offset, Tensor) and kv_offset == 0
    plain = mask_function is causal_mask_function and options.get("attention_mask") is None
    if counted and plain and isinstance(heads, int) and page and not options.get("local_size"):
        lists = batch_size * heads
        lengths = (q_offset + 1).to(torch.int32).reshape(1).expand(lists)
        pages = torch.arange(lists * (kv_length // page), dtype=torch.int32, device=q_offset.device)
        return torch.cat([lengths, pages])
    if isinstance(q_offset, Tensor):
        options["allow_is_causal_skip"] = False  # To look whether it is 0 waits for the GPU.
    found: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        **options,
    )
    return found


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    from_empty: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: The layer.
        query: [batch, heads, tokens, dim].
        key: [batch, kv_heads, all tokens, dim].
        value: As key.
        attention_mask: What `mask` made.
        dropout: Part of the weights that is dropped.
        scaling: Of q.k.
        from_empty: The cache was empty before these tokens, and none is padding: the caller's
            word, given as `model(..., from_empty=True)`.
        options: What transformers passes on.

    Returns:
        [batch, tokens, heads, dim] and None.
    """
    tokens = query.shape[2]
    foreign = dropout or any(options.get(name) for name in _FOREIGN)
    if attention_mask is not None and attention_mask.dim() == 1:
        if not foreign and _has_operator(query, key, value):
            return _decode(query, key, value, attention_mask, scaling), None
        lists = key.shape[0] * key.shape[1]
        lengths = attention_mask[: lists : key.shape[1]].view(-1, 1, 1, 1)
        attention_mask = torch.arange(key.shape[2], device=key.device) < lengths
    elif from_empty and tokens > 1 and not foreign:
        # Flash attention wants as many keys as queries, and reads heads of keys where they are.
        keys, values = (each[:, :, :tokens] for each in (key, value))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2), None
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return found


def page_of(tokens: int) -> int | None:
    """Tokens of the pages that a cache is cut in; None if no size divides it.

    Example:
        >>> page_of(576), page_of(48), page_of(100)
        (64, 16, None)
    """
    return next((each for each in _PAGES if tokens % each == 0), None)


def room_for(tokens: int) -> int:
    """Tokens that a static cache should have room for, so that it is cut in pages.

    Example:
        >>> room_for(65)
        128
    """
    return -(-tokens // PAGE) * PAGE


def _has_operator(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        return False
    if key.shape != value.shape or not (key.is_contiguous() and value.is_contiguous()):
        return False
    if not query.is_cuda:
        return True
    groups, dim = query.shape[1] // key.shape[1], query.shape[3]
    return query.dtype in _KERNEL_DTYPES and dim in DIMS and groups <= GROUPS[-1]


def _decode(
    query: Tensor, key: Tensor, value: Tensor, there: Tensor, scaling: float | None
) -> Tensor:
    """[batch, 1, heads, dim]; every head of keys counts as a sequence, whose pages are a view."""
    (batch, heads, _, dim), (_, kv_heads, room, _) = query.shape, key.shape
    lists = batch * kv_heads
    width = there.shape[0] // lists - 1
    pool = (lists * width, 1, room // width, dim)
    table = there[lists:].view(lists, width)
    cache = PagedKV(key.view(pool), value.view(pool), table, there[:lists])
    q = query.reshape(lists, heads // kv_heads, dim)
    out, _ = attend_decode(q, cache, scale=scaling)
    return out.view(batch, 1, heads, dim)


ALL_ATTENTION_FUNCTIONS.register(STATIC, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(STATIC, mask)

"""Attention of prompts as rivals run it at their best: causal, over an empty cache.

transformers asks on the host whether a static cache is empty. Compiled code and graphs cannot, and
would attend through a mask, which no fast attention of torch takes: a benchmark knows that it is.
Importing this module enters the attention in the registries of transformers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: The name that transformers knows this attention by.
IMPLEMENTATION = "hopsparse_rival"


def mask(*, q_length: int, **options: Any) -> Tensor | None:
    """No mask for prompts, that of "sdpa" for steps of decoding."""
    made: Tensor | None = None if q_length > 1 else sdpa_mask(q_length=q_length, **options)
    return made


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: The layer.
        query: [batch, heads, tokens, dim].
        key: [batch, kv_heads, room, dim]; those of the prompt come first.
        value: As key.
        attention_mask: None for prompts.
        scaling: Of q.k.
        options: What transformers passes on.

    Returns:
        [batch, tokens, heads, dim] and None.
    """
    tokens = query.shape[2]
    if tokens == 1:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return found
    keys, values = (each[:, :, :tokens] for each in (key, value))
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, mask)

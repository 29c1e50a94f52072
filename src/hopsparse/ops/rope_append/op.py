"""Rotary positions for q and k, and keys and values into their cache: checks, run."""

from __future__ import annotations

from functools import cache as once
from types import ModuleType

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedError
from .._product import is_dense, is_hopper, told
from .dispatch import register_on_gpu, run_reference, traced

_OP = "rope_append"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rope_append(
    qkv: Tensor,
    turns: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    ends: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    count: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys by their positions, and put keys and values into a cache.

    Rotary embedding as Llama and Qwen models have it (Su et al., RoFormer): entry i of the lower
    half of a head turns with entry i of the upper half. Every step rounds to the dtype of qkv as
    the code of transformers does: without norms results are its results, bit for bit. One kernel
    on a Hopper GPU for 16-bit heads of 64, 128 or 256; else torch. No gradient.

    Args:
        qkv: [batch, tokens, (heads + 2 kv_heads) * dim]: queries, keys and values behind each
            other, as one product makes them; float32, bfloat16 or float16.
        turns: Cosines and sines, [batch or 1, tokens, dim] each, in the dtype of qkv.
        cache: Keys and values, [batch, kv_heads, room, dim] each, of any strides; changed in place.
        ends: int32 [batch]: tokens of each sequence with the new ones, which are its last. A token
            that the cache has no room for is left out.
        norms: Weights [dim] of an RMSNorm over each head of q and of k ahead, or None.
        eps: Of that norm.
        count: int64, one number that grows by the new tokens, as a static cache of transformers
            counts them; or None.

    Returns:
        Queries [batch, tokens, heads, dim], rotated.

    Raises:
        ArgumentError: Arguments do not fit each other.
        UnsupportedError: A gradient would be needed.

    Example:
        >>> import torch
        >>> keys, values = torch.zeros(2, 1, 1, 4, 2)
        >>> turns = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)  # a quarter of a turn
        >>> qkv, ends = torch.arange(6.0).view(1, 1, 6), torch.tensor([2]).int()
        >>> rope_append(qkv, turns, (keys, values), ends).flatten().tolist()
        [-1.0, 0.0]
        >>> keys[0, 0, 1].tolist(), values[0, 0, 1].tolist()
        ([-3.0, 2.0], [4.0, 5.0])
    """
    keys, values = _checked(qkv, turns, cache)
    _check_rest(qkv, keys, ends, norms, count)
    if torch.is_grad_enabled() and any(
        each.requires_grad for each in (qkv, keys, values, *(norms or ()))
    ):
        raise UnsupportedError(
            f"{_OP}: a tensor that requires a gradient",
            need="torch.no_grad(), or tensors that require none",
            hint="the model as it was, to train",
        )
    return traced(qkv, list(turns), keys, values, ends, list(norms or ()), eps, count)


def _checked(
    qkv: Tensor, turns: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    (cos, sin), (keys, values) = turns, cache
    if not is_dense(qkv) or qkv.dim() != 3 or qkv.dtype not in _DTYPES:
        raise ArgumentError(
            f"{_OP}: qkv {told(qkv)}",
            need="[batch, tokens, all heads * dim] in float32, bfloat16 or float16",
            hint="q, k and v, torch.cat(..., -1)",
        )
    for name, each in (("keys", keys), ("values", values)):
        fits = is_dense(each) and each.dim() == 4 and each.dtype == qkv.dtype
        if not fits or each.shape[0] != qkv.shape[0] or each.device != qkv.device:
            raise ArgumentError(
                f"{_OP}: {name} {told(each)}",
                need=f"{qkv.dtype} [{qkv.shape[0]}, kv_heads, room, dim] on {qkv.device}",
                hint="those of a StaticCache",
            )
    dim, kv_heads = keys.shape[3], keys.shape[1]
    heads = qkv.shape[2] // max(dim, 1) - 2 * kv_heads
    if keys.shape != values.shape or dim == 0 or dim % 2 or heads < 1 or qkv.shape[2] % dim:
        raise ArgumentError(
            f"{_OP}: qkv {told(qkv)}, keys {told(keys)}, values {told(values)}",
            need="an even dim, and rows of (heads + 2 kv_heads) * dim",
            hint="a cache of the same model",
        )
    for name, each in (("cosines", cos), ("sines", sin)):
        fits = is_dense(each) and each.dim() == 3 and each.dtype == qkv.dtype
        whole = fits and each.shape[0] in (1, qkv.shape[0]) and each.device == qkv.device
        if not whole or each.shape[1:] != (qkv.shape[1], dim):
            raise ArgumentError(
                f"{_OP}: {name} {told(each)}",
                need=f"{qkv.dtype} [1 or {qkv.shape[0]}, {qkv.shape[1]}, {dim}] on {qkv.device}",
                hint="what rotary_emb of the model returns",
            )
    return keys, values


def _check_rest(
    qkv: Tensor,
    keys: Tensor,
    ends: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    count: Tensor | None,
) -> None:
    whole = is_dense(ends) and ends.dtype == torch.int32 and ends.shape == qkv.shape[:1]
    if not whole or ends.device != qkv.device:
        raise ArgumentError(
            f"{_OP}: ends {told(ends)}",
            need=f"int32 [{qkv.shape[0]}] on {qkv.device}",
            hint="ends.int()",
        )
    for each in norms or ():
        fits = is_dense(each) and each.dtype == qkv.dtype and each.shape == keys.shape[3:]
        if not fits or each.device != qkv.device:
            raise ArgumentError(
                f"{_OP}: the weight of a norm {told(each)}",
                need=f"{qkv.dtype} [{keys.shape[3]}] on {qkv.device}",
                hint="q_norm.weight, k_norm.weight",
            )
    if count is not None and (
        not is_dense(count)
        or count.numel() != 1
        or count.dtype != torch.int64
        or count.device != qkv.device
    ):
        raise ArgumentError(
            f"{_OP}: count {told(count)}",
            need=f"one int64 on {qkv.device}",
            hint="cumulative_length of a StaticLayer",
        )


def _run_on_gpu(
    qkv: Tensor,
    turns: list[Tensor],
    keys: Tensor,
    values: Tensor,
    ends: Tensor,
    norms: list[Tensor],
    eps: float,
    count: Tensor | None,
) -> Tensor:
    """The kernel where there is one for this GPU and these heads."""
    weights = (norms[0], norms[1]) if norms else None
    both, cache = (turns[0], turns[1]), (keys, values)
    hopper = is_hopper(qkv.get_device())
    if not hopper or not _device().fits(qkv, both, cache, weights):
        return run_reference(qkv, turns, keys, values, ends, norms, eps, count)
    q: Tensor = _device().run(qkv, both, cache, ends, weights, eps, count)
    return q


register_on_gpu(_run_on_gpu)


@once
def _device() -> ModuleType:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from . import device

    return device

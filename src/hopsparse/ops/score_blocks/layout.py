"""Which tensors the kernels can read: the reason where they cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import DIMS, MOST_GROUP, MOST_RANKS, MOST_TOKENS

NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_MOST_GRID = 65_535  # along y and z
_PIECE = 16

#: low, high and total of `KeyBlocks`.
Kept = tuple[Tensor, Tensor, Tensor]


def refused_scores(q: Tensor, kept: Kept, block: int, kind: str) -> str | None:
    """Why no kernel scores these blocks; None where one does.

    Args:
        q: [batch, heads, dim], checked like all the rest.
        kept: What is kept of keys.
        block: Tokens of a block.
        kind: "bound", "mean" or "mass".
    """
    batch, heads, dim = q.shape
    kv_heads, count = kept[0].shape[1:3]
    if dim not in DIMS:
        return f"heads of {dim}, not of {', '.join(map(str, DIMS))}"
    if heads // kv_heads > MOST_GROUP:
        return f"{heads // kv_heads} query heads a head of keys, more than {MOST_GROUP}"
    if batch == 0 or count == 0:
        return "nothing to score"
    if max(batch, kv_heads) > _MOST_GRID or block > MOST_TOKENS:
        return f"a batch of {batch}, {kv_heads} heads of keys, blocks of {block}: too many"
    read = {"bound": kept[:2], "mean": kept[2:], "mass": kept}[kind]
    return None if all(map(_in_pieces, read)) else _APART


def refused_choice(q: Tensor, kept: Kept, block: int, kind: str) -> str | None:
    """Why no kernel both scores these blocks and chooses of them; None where one does.

    Args:
        q: As for `refused_scores`, like all the rest.
        kept: What is kept of keys.
        block: Tokens of a block.
        kind: "bound", "mean" or "mass".
    """
    count = kept[0].shape[2]
    if count > MOST_RANKS:
        return f"room for {count} blocks of keys, more than {MOST_RANKS}"
    return refused_scores(q, kept, block, kind)


def refused_keys(kept: Kept, keys: Tensor, block: int) -> str | None:
    """Why no kernel takes in these keys; None where one does.

    Args:
        kept: What is kept of keys, checked like all the rest.
        keys: [batch, new, kv_heads, dim].
        block: Tokens of a block.
    """
    batch, new, kv_heads, dim = keys.shape
    if dim not in DIMS:
        return f"heads of {dim}, not of {', '.join(map(str, DIMS))}"
    if 0 in (batch, new, kept[0].shape[2]):
        return "nothing to take in"
    if batch > _MOST_GRID or new * kv_heads >= 2**31 or block >= 2**31:
        return f"a batch of {batch}, {new} tokens of {kv_heads} heads: too many"
    if any(0 in each.stride() for each in kept):
        return "blocks that share memory"
    return None if all(map(_in_pieces, (*kept, keys))) else _APART


def refused_newest(kept: Kept, keys: Tensor, block: int) -> str | None:
    """Why no kernel that scores takes in these keys too; None where one does.

    Args:
        kept: What is kept of keys, checked like all the rest.
        keys: [batch, new, kv_heads, dim].
        block: Tokens of a block.
    """
    new = keys.shape[1]
    return f"{new} new tokens, not one" if new != 1 else refused_keys(kept, keys, block)


def by_tensor_cores(q: Tensor, kept: Kept, kind: str) -> bool:
    """Whether the kernel that scores these blocks multiplies by the tensor cores.

    Args:
        q: As for `refused_scores`, like all the rest.
        kept: What is kept of keys.
        kind: "bound", "mean" or "mass".
    """
    return kind == "bound" and q.dtype == kept[0].dtype and q.dtype != torch.float32


_APART = "rows that are not contiguous, or do not start on 16 bytes"


def _in_pieces(tensor: Tensor) -> bool:
    """Whether rows are contiguous and start on 16 bytes."""
    *lead, last = tensor.stride()
    size = tensor.element_size()
    aligned = not any(
        stride * size % _PIECE
        for stride, length in zip(lead, tensor.shape[:-1], strict=True)
        if length > 1
    )
    return last == 1 and tensor.data_ptr() % _PIECE == 0 and aligned

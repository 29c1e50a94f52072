"""What is kept of each block of keys: the range of every dimension, and the sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._call import is_plain
from .._paged import QUERY_DTYPES, check_whole_numbers, looks_at_values
from .._product import is_dense, is_hopper, told
from .dispatch import append_reference, register_on_gpu, traced_append
from .layout import Kept, refused_keys


@dataclass(frozen=True)
class KeyBlocks:
    """Facts of blocks of neighbouring keys, of every sequence and head; updated in place.

    Two vectors in the dtype of keys and one of float32: of bfloat16 keys in blocks of 64, 1/16 of
    the bytes of keys. What lies behind the end of a sequence is not read.

    Attributes:
        low: [batch, kv_heads, blocks, dim]: the least of each dimension, exact.
        high: The largest.
        total: float32: the sum.
        block: Tokens of a block.

    Example:
        >>> blocks = KeyBlocks.empty((1, 2, 4, 8), block=16)
        >>> blocks.low.shape, blocks.tokens
        (torch.Size([1, 2, 4, 8]), 64)
    """

    low: Tensor
    high: Tensor
    total: Tensor
    block: int

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int, int, int],
        *,
        block: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KeyBlocks:
        """Room for [batch, kv_heads, blocks, dim].

        Args:
            shape: As above.
            block: Tokens of a block.
            dtype: Of keys; float32 for keys that are stored in 8 bits.
            device: Where they will be.

        Raises:
            ArgumentError: No such block or dtype.
        """
        if not isinstance(block, int) or block < 1 or dtype not in QUERY_DTYPES:
            raise ArgumentError(
                f"KeyBlocks: block={block!r}, dtype={dtype}",
                need="at least one token, in float32, bfloat16 or float16",
                hint="block=64, dtype=torch.bfloat16",
            )
        low = torch.zeros(shape, dtype=dtype, device=device)
        total = torch.zeros(shape, dtype=torch.float32, device=device)
        return cls(low, torch.zeros_like(low), total, block)

    @property
    def tokens(self) -> int:
        """Tokens of each sequence that there is room for."""
        return self.low.shape[2] * self.block


def append_keys(
    blocks: KeyBlocks, keys: Tensor, starts: Tensor, counts: Tensor | None = None
) -> None:
    """Take in keys that were appended to sequences, in place; a block that begins is begun anew.

    One launch on a Hopper GPU, for heads of 64, 128 or 256 whose rows start on 16 bytes; else
    torch. Keys of a block are added in their order by the kernel and on the CPU, so that both keep
    the same bits. On a GPU tokens that there is no room for are none.

    Args:
        blocks: What is kept.
        keys: [batch, new, kv_heads, dim] in the dtype of `blocks.low`, as they are stored.
        starts: int32 [batch]: tokens before them.
        counts: int32 [batch]: how many of `new` there are; None: all.

    Raises:
        ArgumentError: Shapes, dtypes or devices do not fit, or there is no room.
        UnsupportedError: A CUDA graph is being captured, and the kernel is not loaded yet.

    Example:
        >>> blocks = KeyBlocks.empty((1, 1, 2, 1), block=2)
        >>> keys = torch.tensor([3.0, -1.0, 5.0]).view(1, 3, 1, 1)
        >>> append_keys(blocks, keys, torch.tensor([0]).int())
        >>> blocks.low.flatten().tolist(), blocks.high.flatten().tolist()
        ([-1.0, 5.0], [3.0, 5.0])
    """
    check_keys("append_keys", blocks, keys)
    _check_places(blocks, keys, starts, counts)
    kept = (blocks.low, blocks.high, blocks.total)
    run = _append_on_gpu if keys.is_cuda and is_plain(keys) else traced_append
    run(*kept, keys.detach(), starts, counts, blocks.block)


def _append_on_gpu(
    low: Tensor,
    high: Tensor,
    total: Tensor,
    keys: Tensor,
    starts: Tensor,
    counts: Tensor | None,
    block: int,
) -> None:
    """The kernel where there is one for this GPU and these keys."""
    kept = (low, high, total)
    if not is_hopper(keys.get_device()) or refused_keys(kept, keys, block):
        append_reference(*kept, keys, starts, counts, block)
        return
    _device().append(kept, keys, starts, counts, block)
    count_change(kept)


def count_change(kept: Kept) -> None:
    """Let torch know that a kernel wrote there."""
    for each in kept:
        if not each.is_inference():  # which counts no changes
            torch.autograd.graph.increment_version(each)


register_on_gpu("append_keys", _append_on_gpu)


@cache
def _device() -> ModuleType:
    """The launch, imported late: a process on the CPU needs neither a compiler nor a driver."""
    from . import device

    return device


def check_keys(op: str, blocks: KeyBlocks, keys: Tensor) -> None:
    """Refuse keys that are not those of these blocks.

    Raises:
        ArgumentError: Shape, dtype or device do not fit.
    """
    batch, heads, _, dim = blocks.low.shape
    fits = is_dense(keys) and keys.dim() == 4 and keys.dtype == blocks.low.dtype
    if not fits or keys.device != blocks.low.device:
        raise ArgumentError(
            f"{op}: keys {told(keys)}",
            need=f"[batch, new, kv_heads, dim] of {told(blocks.low)}",
            hint="keys.to(blocks.low)",
        )
    if (keys.shape[0], *keys.shape[2:]) != (batch, heads, dim):
        raise ArgumentError(
            f"{op}: keys {told(keys)}",
            need=f"[{batch}, new, {heads}, {dim}]",
            hint="keys.transpose(1, 2), for [batch, kv_heads, new, dim]",
        )


def _check_places(blocks: KeyBlocks, keys: Tensor, starts: Tensor, counts: Tensor | None) -> None:
    batch = blocks.low.shape[0]
    for name, each in (("starts", starts), ("counts", counts)):
        if each is not None:
            check_whole_numbers("append_keys", name, each, keys, (batch,))
    if looks_at_values(keys):
        ends = starts.long() + (keys.shape[1] if counts is None else counts.long())
        least = int(starts.min()) if batch else 0
        if least < 0 or (batch and int(ends.max()) > blocks.tokens):
            raise ArgumentError(
                f"append_keys: tokens from {least} to {int(ends.max())}",
                need=f"0 to {blocks.tokens}, which there is room for",
                hint="KeyBlocks.empty with more blocks",
            )

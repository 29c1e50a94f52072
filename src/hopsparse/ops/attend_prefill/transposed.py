"""Lists the other way round: queries of each block of keys, and readers of each page.

Made by sorting on the device, without a count that the host would wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tiles_of_queries(starts: Tensor, tokens: int, rows: int) -> tuple[Tensor, Tensor]:
    """Cut sequences into tiles: the sequence of each tile, and the first tile of each sequence.

    Args:
        starts: int32 [batch + 1].
        tokens: Queries of all sequences.
        rows: Queries of a tile.

    Returns:
        int32 [tokens // rows + batch], the number of sequences where there is no tile; and int32
        [batch].

    Example:
        >>> tiles_of_queries(torch.tensor([0, 40, 40, 56]).int(), 56, 32)
        (tensor([0, 0, 2, 3], dtype=torch.int32), tensor([0, 2, 2], dtype=torch.int32))
    """
    batch = starts.shape[0] - 1
    count = (starts.diff().clamp_min(0) + rows - 1) // rows
    ends = count.cumsum(0, dtype=torch.int32)
    number = torch.arange(tokens // rows + batch, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(ends, number, right=True, out_int32=True)
    return owner, ends - count


def queries_of_blocks(
    lists: tuple[Tensor, Tensor | None], starts: Tensor, lengths: Tensor, block: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """For each block of keys the blocks of queries that list it, and see some of it.

    Args:
        lists: Indices [batch, lists, q_blocks, most] and counts, as for `attend_prefill`.
        starts: int32 [batch + 1].
        lengths: int32 [batch].
        block: Tokens of a block.
        blocks: That a sequence may have.

    Returns:
        int32 [batch * lists * blocks + 1]: where each begins; and int32 [all entries], ascending
        within a block; entries that mean nothing are last.

    Example:
        >>> indices = torch.tensor([[[[0, -1], [1, 0]]]]).int()
        >>> starts, lengths = torch.tensor([0, 32]).int(), torch.tensor([32]).int()
        >>> first, rows = queries_of_blocks((indices, None), starts, lengths, 16, 2)
        >>> first.tolist(), rows[:3].tolist()
        ([0, 2, 3], [0, 1, 1])
    """
    indices, counts = lists
    batch, count, q_blocks, most = indices.shape
    number = torch.arange(q_blocks, device=indices.device)
    queries = starts.diff()[:, None]
    last = lengths[:, None] - queries + torch.minimum((number + 1) * block, queries) - 1
    begins = indices.clamp(-1, blocks).long() * block
    there = (begins >= 0) & (indices < blocks) & (begins <= last[:, None, :, None])
    there &= (number * block < queries)[:, None, :, None]
    if counts is not None:
        there &= torch.arange(most, device=indices.device) < counts[..., None]
    own = torch.arange(batch * count, dtype=torch.int32, device=indices.device)
    key = own.view(batch, count, 1, 1) * blocks + indices
    first, order = _sorted(key.where(there, batch * count * blocks), batch * count * blocks)
    return first, (order // most % q_blocks).int()


def readers_of_pages(
    table: Tensor, lengths: Tensor, page: int, pages: int
) -> tuple[Tensor, Tensor]:
    """For each page of a pool the entries of the table that name it.

    Args:
        table: int32 [batch, width].
        lengths: int32 [batch].
        page: Tokens of a page.
        pages: Of the pool.

    Returns:
        int32 [pages + 1]: where each begins; and int32 [batch * width], ascending within a page.

    Example:
        >>> first, entry = readers_of_pages(torch.tensor([[1, 0], [1, 7]]).int(),
        ...                                 torch.tensor([20, 9]).int(), 16, 2)
        >>> first.tolist(), entry[:3].tolist()
        ([0, 1, 3], [1, 0, 2])
    """
    begins = torch.arange(0, table.shape[1] * page, page, device=table.device)
    used = (begins < lengths[:, None]) & (table >= 0) & (table < pages)
    first, order = _sorted(table.where(used, pages), pages)
    return first, order.int()


def _sorted(key: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
    """Where each kind begins, int32 [kinds + 1], and the order."""
    ordered, order = key.flatten().sort(stable=True)
    every = torch.arange(kinds + 1, dtype=ordered.dtype, device=key.device)
    return torch.searchsorted(ordered, every, out_int32=True), order

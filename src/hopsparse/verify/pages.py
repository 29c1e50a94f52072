"""Keys and values of sequences, and the same in pages in no order, among pages of NaN."""

from __future__ import annotations

import torch
from torch import Tensor

Sequences = list[tuple[Tensor, Tensor]]


def random_tokens(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> Sequences:
    """Keys and values [heads, length, dim] of each sequence.

    Example:
        >>> [keys.shape for keys, _ in random_tokens([3], 2, 8, torch.float32)]
        [torch.Size([2, 3, 8])]
    """
    sizes = [(heads, length, dim) for length in lengths]
    return [(torch.randn(size).to(dtype), torch.randn(size).to(dtype)) for size in sizes]


def in_pages(sequences: Sequences, page: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pools of keys and of values [pages, heads, page, dim], a table and lengths.

    What no token fills is NaN, and entries of the table behind the end name no page.

    Args:
        sequences: Keys and values of each.
        page: Tokens of a page.

    Example:
        >>> keys, _, table, lengths = in_pages(random_tokens([3], 2, 8, torch.float32), 2)
        >>> keys.shape, table.shape, lengths.tolist()
        (torch.Size([5, 2, 2, 8]), torch.Size([1, 2]), [3])
    """
    lengths = [keys.shape[1] for keys, _ in sequences]
    wide = max(-(-max(lengths) // page), 1)
    order = torch.randperm(len(sequences) * wide + 3)
    heads, _, dim = sequences[0][0].shape
    size, dtype = (len(order), heads, page, dim), sequences[0][0].dtype
    pools = [torch.full(size, float("nan")).to(dtype) for _ in range(2)]
    table = torch.full((len(sequences), wide), 2**31 - 1, dtype=torch.int32)
    for row, pair in enumerate(sequences):
        for column, first in enumerate(range(0, lengths[row], page)):
            place = int(order[row * wide + column])
            table[row, column] = place
            for pool, tokens in zip(pools, pair, strict=True):
                part = tokens[:, first : first + page]
                pool[place, :, : part.shape[1]] = part
    return pools[0], pools[1], table, torch.tensor(lengths, dtype=torch.int32)

"""One parameter's values as they are sent: the largest exactly, the others rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.hybrid_gradient.indices import chunk_count, decode_indices
from ..ops.hybrid_gradient.reference import padded, pieces, rows_of
from ..ops.hybrid_gradient.remainder import CODERS, Coder
from .options import HybridOptions
from .wire import Field


@dataclass(frozen=True)
class Layout:
    """What is sent of a vector in one step; the same on every rank.

    Attributes:
        numel: Its values.
        k: How many are sent exactly; all of them, without positions, where it is dense.
        coder: How the others are rounded; None: they are not sent.
        every: Of how many blocks of them one is sent.
        phase: The first of those.
    """

    numel: int
    k: int
    coder: Coder | None
    every: int = 1
    phase: int = 0

    @classmethod
    def of(cls, numel: int, options: HybridOptions, step: int, ranks: int) -> Layout:
        """The layout of a step, from 0 on.

        Example:
            >>> Layout.of(10_000, HybridOptions(), step=0, ranks=2).k
            10
        """
        if ranks == 1 or numel < options.dense_below or numel == 0:
            return cls(numel, numel, None)
        k = min(numel, math.ceil(options.k_at(step) * numel))
        coder = None if options.remainder is None else CODERS[options.remainder]
        return cls(numel, k, coder, options.every, step % options.every)

    @property
    def is_dense(self) -> bool:
        """Whether all values are sent as they are."""
        return self.k == self.numel

    @property
    def padded(self) -> int:
        """Values of it in whole blocks."""
        return padded(self.numel, self.coder)

    @property
    def rows(self) -> int:
        """Blocks of the remainder that are sent."""
        return 0 if self.is_dense else rows_of(self.numel, self.coder, self.every, self.phase)

    def active(self, padded: Tensor) -> Tensor:
        """Those blocks of a vector in whole blocks: a view [rows, block]."""
        assert self.coder is not None
        return padded.view(-1, self.coder.block)[self.phase :: self.every]

    def exact_fields(self) -> list[Field]:
        """Tensors of a message for the exact values."""
        values = (torch.float32, self.k)
        if self.is_dense:
            return [values]
        return [values, (torch.int32, chunk_count(self.numel)), (torch.int16, self.k)]

    def rounded_fields(self, rows: int) -> list[Field]:
        """Tensors of a message for so many blocks of the others."""
        if self.coder is None or rows == 0:
            return []
        return [(torch.uint8, rows * self.coder.code_bytes), (torch.bfloat16, rows)]


def add_exact(total: Tensor, tensors: list[Tensor], layout: Layout) -> None:
    """Add exact values of a message to a vector."""
    vector = total[: layout.numel]
    if layout.is_dense:
        vector.add_(tensors[0])
        return
    values, counts, offsets = tensors
    # A rank names each position once: there is one order of adding, whatever runs in parallel.
    positions = decode_indices(counts, offsets)
    vector[positions] += values


def add_rounded(total: Tensor, tensors: list[Tensor], layout: Layout) -> None:
    """Add rounded blocks of a message to a vector in whole blocks."""
    if layout.coder is None or not tensors:
        return
    blocks, (codes, scales) = layout.active(total), tensors
    codes = codes.view(-1, layout.coder.code_bytes)
    for at in pieces(len(blocks), layout.coder):
        blocks[at] += layout.coder.decode(codes[at], scales[at])


def rounded(tensors: list[Tensor], coder: Coder) -> Tensor:
    """Blocks of a message, float32 [rows, block]."""
    codes, scales = tensors
    return coder.decode(codes.view(-1, coder.code_bytes), scales)

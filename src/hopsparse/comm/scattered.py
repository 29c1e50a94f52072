"""Rounded blocks of many ranks: each rank adds a part of them, and sends the rounded sum to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .coding import Layout, rounded
from .collective import Group, exchange, gather
from .state import HybridState
from .wire import Field, pack, unpack


class Blocks(Protocol):
    """A parameter whose blocks are to be added up."""

    @property
    def layout(self) -> Layout:
        """What is sent of it."""

    @property
    def coded(self) -> list[Tensor]:
        """Codes and scales of this rank's blocks; empty if there are none."""

    @property
    def local(self) -> Tensor:
        """What this rank did not send, in whole blocks; the error of its sums is added to it."""


def mean_of_blocks(
    state: HybridState, pending: Sequence[Blocks], group: Group
) -> list[Tensor | None]:
    """Add up blocks over the ranks.

    Returns:
        For each parameter float32 [rows, block], the rounded mean; None where it has no rows.
    """
    coded = [each for each in pending if each.layout.rows]
    if not coded:
        return [None for _ in pending]
    ranks, rank, counters = group.size(), group.rank(), state.counters
    device = coded[0].local.device
    with counters.timed("quantise_ms"):
        messages = torch.stack([_segment(coded, to, ranks, device) for to in range(ranks)])
    with counters.timed("communicate_ms"):
        received = exchange(messages, group)
    with counters.timed("quantise_ms"):
        own = []
        for each, tensors in zip(coded, _opened(received, coded, ranks), strict=True):
            own += _rounded_mean(each, tensors, rank, ranks)
        message = pack(own, device)
    with counters.timed("communicate_ms"):
        gathered = gather(message, group)
    counters.sent_bytes += (ranks - 1) * (messages.shape[1] + message.numel())
    with counters.timed("quantise_ms"):
        means = {id(each): found for each, found in _joined(gathered, coded, ranks)}
    return [means.get(id(each)) for each in pending]


def _of_segment(layout: Layout, ranks: int) -> int:
    """Blocks that one rank adds up."""
    return -(-layout.rows // ranks)


def _segment(coded: Sequence[Blocks], to: int, ranks: int, device: torch.device) -> Tensor:
    """What one rank is to add up; filled up with blocks of zeros, so that all are as long."""
    own = []
    for each in coded:
        rows = _of_segment(each.layout, ranks)
        for tensor in each.coded:
            part = tensor[to * rows : (to + 1) * rows]
            filled = torch.zeros((rows, *part.shape[1:]), dtype=part.dtype, device=device)
            filled[: len(part)] = part
            own.append(filled)
    return pack(own, device)


def _fields(coded: Sequence[Blocks], ranks: int) -> list[Field]:
    found: list[Field] = []
    for each in coded:
        found += each.layout.rounded_fields(_of_segment(each.layout, ranks))
    return found


def _opened(received: Tensor, coded: Sequence[Blocks], ranks: int) -> list[list[list[Tensor]]]:
    """For each parameter, for each rank in order: codes and scales."""
    fields = _fields(coded, ranks)
    rows = [unpack(message, fields) for message in received]
    return [[row[2 * place : 2 * place + 2] for row in rows] for place in range(len(coded))]


def _rounded_mean(
    each: Blocks, arrived: Sequence[list[Tensor]], rank: int, ranks: int
) -> list[Tensor]:
    """Codes and scales of the mean of this rank's blocks; what they lack it keeps."""
    coder = each.layout.coder
    assert coder is not None
    mean = rounded(arrived[0], coder)
    for tensors in arrived[1:]:
        mean.add_(rounded(tensors, coder))
    mean.div_(ranks)
    codes, scales = coder.encode(mean)
    mean.sub_(coder.decode(codes, scales))
    first = rank * len(mean)
    mine = each.layout.active(each.local)[first : first + len(mean)]
    mine.add_(mean[: len(mine)], alpha=ranks)
    return [codes, scales]


def _joined(gathered: Tensor, coded: Sequence[Blocks], ranks: int) -> list[tuple[Blocks, Tensor]]:
    found = []
    for each, tensors in zip(coded, _opened(gathered, coded, ranks), strict=True):
        assert each.layout.coder is not None
        rows = torch.cat([rounded(part, each.layout.coder) for part in tensors])
        found.append((each, rows[: each.layout.rows]))
    return found

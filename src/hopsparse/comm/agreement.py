"""Ranks that would talk past each other are told so, before they wait for one another for ever."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, VerificationError
from .collective import Group, gather


def agree(facts: Sequence[str], group: Group, device: torch.device) -> None:
    """Raise on every rank if one has other facts.

    Args:
        facts: What an exchange depends on, a line each.
        group: Ranks.
        device: Where messages are.

    Raises:
        ArgumentError: The first line that differs, and on which rank.
    """
    digest = hashlib.sha256(json.dumps(list(facts)).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    if bool((gather(mine, group) == mine).all()):
        return
    # Every rank sees every digest, so that all of them come here or none.
    told: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(told, list(facts), group=group)
    first = told[0]
    other = next(rank for rank, lines in enumerate(told) if lines != first)
    lines = zip(_longer(first, told[other]), _longer(told[other], first), strict=True)
    one, two = next(pair for pair in lines if pair[0] != pair[1])
    raise ArgumentError(
        f"rank 0 reduces {one}, rank {other} {two}",
        need="one HybridState on every rank: options, model and steps",
        hint="make the state of the same options everywhere, and load it on every rank or on none",
    )


def _longer(lines: list[str], other: list[str]) -> list[str]:
    return lines + ["nothing"] * (len(other) - len(lines))


def compare(sums: Sequence[Tensor], what: Sequence[str], group: Group) -> None:
    """Raise on every rank if a sum differs on one.

    Args:
        sums: int64 scalars, on one device.
        what: What each is a sum of.
        group: Ranks.

    Raises:
        VerificationError: What differs, and on which ranks.
    """
    found = gather(torch.stack(list(sums)), group)
    for column, name in enumerate(what):
        values = found[:, column]
        others = (values != values[0]).nonzero().flatten().tolist()
        if others:
            raise VerificationError(
                f"{name} differ between rank 0 and ranks {others}",
                need="replicas that are equal bit by bit",
                hint="start all ranks from one checkpoint; do not change weights on one rank alone",
            )


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """A sum that changes with any bit, and with the order; int64 scalar, exact.

    Example:
        >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> bool(checksum([one]) == checksum([other]))
        False
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
        # An odd factor for each place: sums of int64 wrap, so that no order of adding matters.
        for start in range(0, words.numel(), _AT_ONCE):
            part = words[start : start + _AT_ONCE].long()
            places = torch.arange(start, start + part.numel(), device=device)
            total = total + (part * (2 * places + 1)).sum()
        total = total * 1_000_003
    return total


_AT_ONCE = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

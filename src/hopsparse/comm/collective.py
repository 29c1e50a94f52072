"""The two exchanges that everything here is made of; the same on gloo and on NCCL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedError

Group = dist.ProcessGroup

# torch 2.13 warns of the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_or_world(group: Group | None) -> Group:
    """The group, or that of all ranks.

    Raises:
        UnsupportedError: There is none yet.
    """
    if group is not None:
        return group
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise UnsupportedError(
            "no process group",
            need="torch.distributed.init_process_group before gradients are reduced",
            hint="torchrun --nproc-per-node=2 script.py, with init_process_group('gloo') in it",
        )
    return dist.group.WORLD


@dataclass
class Gathering:
    """Messages that are on their way.

    Attributes:
        gathered: [ranks, n]; written until `wait` returns.
        work: What torch gave to wait for; None where there is nothing to wait for.
    """

    gathered: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        """Every rank's message, in the order of the ranks; over NCCL the host does not wait."""
        if self.work is not None:
            self.work.wait()
        return self.gathered


def gather_later(message: Tensor, group: Group) -> Gathering:
    """Send a message to every rank, and do not wait.

    Args:
        message: [n], as long on every rank.
        group: Ranks.
    """
    if group.size() == 1:
        return Gathering(message[None])
    gathered = message.new_empty(group.size(), message.numel())
    work = _all_gather(gathered.view(-1), message, group=group, async_op=True)
    return Gathering(gathered, work)


def gather(message: Tensor, group: Group) -> Tensor:
    """Every rank's message, to every rank.

    Args:
        message: [n], as long on every rank.
        group: Ranks.

    Returns:
        [ranks, n], in the order of the ranks.
    """
    return gather_later(message, group).wait()


def exchange(messages: Tensor, group: Group) -> Tensor:
    """A message to each rank, and one from each.

    Args:
        messages: [ranks, n]: row r goes to rank r of the group.
        group: Ranks.

    Returns:
        [ranks, n]: row r came from rank r.
    """
    if group.size() == 1:
        return messages
    received = torch.empty_like(messages)
    dist.all_to_all_single(received, messages, group=group)
    return received

"""The two exchanges that everything here is made of; the same on gloo and on NCCL."""

from __future__ import annotations

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


def gather(message: Tensor, group: Group) -> Tensor:
    """Every rank's message, to every rank.

    Args:
        message: [n], as long on every rank.
        group: Ranks.

    Returns:
        [ranks, n], in the order of the ranks.
    """
    if group.size() == 1:
        return message[None]
    gathered = message.new_empty(group.size(), message.numel())
    _all_gather(gathered.view(-1), message, group=group)
    return gathered


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

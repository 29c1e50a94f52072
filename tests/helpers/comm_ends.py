"""How ranks end, together and not, in the tests of it."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hopsparse.comm import HybridState, aggregate, leave, register
from tests.helpers.comm_ranks import gradient
from tests.helpers.ranks import die

#: How late the last of three ranks comes to its end.
LATE_S = 0.6


def left(rank: int) -> bool:
    """Whether there still is a group when a rank has left; the later ones leave later."""
    aggregate(torch.ones(5000))
    time.sleep(LATE_S * rank / 2)
    leave()
    return dist.is_initialized()


def left_twice(rank: int) -> bool:
    """The same with a second group over the first one's store, as torchrun's lives on."""
    assert dist.group.WORLD is not None
    store, ranks = dist.group.WORLD.get_group_store(), dist.get_world_size()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for number in range(2):
        if number:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        aggregate(torch.ones(5000))
        time.sleep(1.5 * LATE_S * rank)
        leave()
    return dist.is_initialized()


def dying_in_backward(rank: int) -> list[int]:
    """Rank 1 is killed between two layers of a backward pass; how often others came to an end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    register(ddp, HybridState())
    ends = []
    for step in range(3):
        y = ddp(gradient(rank, step, (8, 400)))
        if rank == 1 and step == 2:
            model[0].weight.register_hook(lambda _: die())
        y.square().mean().backward()
        ends.append(step)
    return ends

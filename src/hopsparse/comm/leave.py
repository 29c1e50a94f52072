"""The end of a job, without a rank that fails because another was quicker."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

_POLL_S = 0.005
_TIMEOUT_S = 300.0


def leave(timeout_s: float = _TIMEOUT_S) -> None:
    """Wait until every rank is done with its exchanges, then destroy the process group.

    With `dist.barrier()` in front of `dist.destroy_process_group()` a rank may close its
    connections while another is still inside of the barrier, which gloo takes for a failure there.
    Here ranks meet in the store, and who hosts it goes last. All of them must call it.

    Args:
        timeout_s: How long to wait for the slowest.

    Raises:
        DistStoreError: A rank did not come in time (of torch.distributed).

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> leave()
        >>> dist.is_initialized()
        False
    """
    if not dist.is_initialized():
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    # A store may outlive the group, and serve the next one of the same process.
    arrived = store.add("hopsparse_arrived", 1)
    round_ = (arrived - 1) // ranks
    if arrived == (round_ + 1) * ranks:
        store.set(f"hopsparse_all_arrived_{round_}", "1")
    store.wait([f"hopsparse_all_arrived_{round_}"], timedelta(seconds=timeout_s))
    left = store.add("hopsparse_left", 1)
    if rank == 0:
        # It may host the store, which the others still ask.
        until = time.monotonic() + timeout_s
        while left < (round_ + 1) * ranks and time.monotonic() < until:
            time.sleep(_POLL_S)
            left = store.add("hopsparse_left", 0)
    dist.destroy_process_group()

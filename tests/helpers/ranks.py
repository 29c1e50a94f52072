"""Several processes over gloo, for as long as a test needs them.

They are forked from a server that has imported torch already: a rank is there in tens of
milliseconds, where torchrun takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SERVER = multiprocessing.get_context("forkserver")
# fully_shard imports torch._dynamo when it is first called.
_SERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "hopsparse.comm"])
#: What a rank gives that was killed or killed itself.
KILLED = "killed"


def on_ranks(
    work: Callable[..., Any],
    ranks: int,
    *given: Any,
    timeout: float = 60,
    backend: str = "gloo",
) -> list[Any]:
    """What `work(rank, *given)` gives on each rank: its result, or the exception that it raised.

    Args:
        work: A function of a module that can be imported.
        ranks: How many processes.
        given: Its other arguments.
        timeout: Of the process group, in seconds.
        backend: gloo, or nccl: rank r has GPU r then.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            mine, its = _SERVER.Pipe()
            group = (backend, Path(folder) / "store", timeout)
            arguments = (work, rank, ranks, group, given, its)
            process = _SERVER.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            its.close()
            started.append((process, mine))
        found = []
        try:
            for _, mine in started:
                try:
                    # The group's own time-out ends a rank that waits for ever.
                    assert mine.poll(timeout + 60), "a rank hangs"
                    found.append(mine.recv())
                except EOFError:
                    found.append(KILLED)
        except BaseException:
            for process, _ in started:
                process.kill()
            raise
        for _, mine in started:
            mine.close()
        for process, _ in started:
            process.join(30)
            process.kill()  # one whose GPU failed may not come to its end
            process.join()
        return found


def die() -> None:
    """End this rank as a crash does: nothing is closed, nobody is told."""
    os.kill(os.getpid(), signal.SIGKILL)


def _rank(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    group: tuple[str, Path, float],
    given: tuple[Any, ...],
    tell: Connection,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    backend, store, timeout = group
    if backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which is set up on few machines
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    try:
        result = work(rank, *given)
    except BaseException as error:  # what torch.distributed.checkpoint raises is no Exception
        result = error
    # Numbers travel as plain objects: shared memory would need its owner alive.
    tell.send(_plain(result))
    # Until all are done: gloo may fail a rank that is late when another closes its connection.
    with suppress(EOFError):
        tell.recv()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        here = value.detach().cpu()
        return here.float().numpy() if here.is_floating_point() else here.numpy()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value

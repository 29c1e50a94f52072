"""Ways to reduce gradients, side by side over a link: step times, and bytes at the interface.

`python -m hopsparse.comm.race` is one rank of some runs; `races` starts them.
"""

# Annotations are values here: DDP compares those of a hook with the classes that it knows.

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError, UnsupportedError
from .hook import register
from .leave import leave
from .namespaces import Place, linked
from .planner import PlannedState, register_planned
from .state import HybridState

#: Hybrid methods by name.
HYBRID: dict[str, dict[str, Any]] = {
    "int4": {"remainder": "int4"},
    "int3.5": {"remainder": "int3.5"},
    "int3": {"remainder": "int3"},
    "sign": {"remainder": "sign"},
    "int4-every-2": {"remainder": "int4", "every": 2},
    "int4-every-4": {"remainder": "int4", "every": 4},
    "top-k": {"remainder": None},
}
METHODS = ("dense", "bf16", "fp16", "powersgd-2", *HYBRID, "planned")
# 4.2 M values, as four layers of an MLP; 109 M, in the shapes of BERT-Base.
MODELS: dict[str, list[tuple[int, int]]] = {
    "mlp": [(1024, 1024)] * 4,
    "bert": [(30522, 768), (512, 768), *[(768, 768)] * 48, *[(3072, 768)] * 24],
}
_WARM = 4
_PORT = 29577
_ROWS, _COLUMNS = 32, 1024


@dataclass(frozen=True)
class Race:
    """One run.

    Attributes:
        method: One of `METHODS`.
        model: One of `MODELS`.
        ranks: Processes, 2 or more.
        mbit: What each sends at most, in Mbit/s; 0: whatever it can.
        steps: Timed ones, behind four that are not.

    Raises:
        ArgumentError: It says what means nothing.
    """

    method: str
    model: str = "mlp"
    ranks: int = 2
    mbit: int = 0
    steps: int = 20

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        for name, known in (("method", METHODS), ("model", tuple(MODELS))):
            if getattr(self, name) not in known:
                got = f"{name} {getattr(self, name)!r}"
                raise ArgumentError(got, need=f"one of {', '.join(known)}", hint=known[0])
        for name, least in (("ranks", 2), ("mbit", 0), ("steps", 1)):
            if getattr(self, name) < least:
                got = f"{name} {getattr(self, name)}"
                raise ArgumentError(got, need=f"at least {least}", hint=str(least))


def race(asked: Race) -> dict[str, Any]:
    """Run all ranks of one run, each in a namespace of its own.

    Returns:
        `parameters`, `step_ms`, `step_ms_least`, `step_ms_most`, `interface_bytes_a_step` and
        `segments_again_a_step` (sent by rank 0; resent by its TCP), and `plan` of a planned run.

    Raises:
        UnsupportedError: Namespaces cannot be made here, or a rank failed.
    """
    with closing(races([asked])) as found:
        return next(found)


def races(asked: Sequence[Race]) -> Generator[dict[str, Any]]:
    """Runs over one link, by the same processes: to start those takes longer than a few steps do.

    Args:
        asked: Runs that differ in their method alone.

    Yields:
        What `race` returns, of each, as soon as it is there.

    Raises:
        UnsupportedError: Namespaces cannot be made here, or a rank failed.
    """
    with linked(asked[0].ranks, asked[0].mbit) as places, ExitStack() as open_files:
        started: list[subprocess.Popen[str]] = []
        try:
            errors = [open_files.enter_context(TemporaryFile("w+")) for _ in places]
            for rank, place in enumerate(places):
                started.append(_start(asked, rank, place, places[0].address, errors[rank]))
            of_first = started[0].stdout
            assert of_first is not None
            for each in asked:
                line = of_first.readline()
                if not line:
                    _refuse_failed(each, started, errors)
                yield json.loads(line)
            _refuse_failed(asked[-1], started, errors)
        finally:
            for process in started:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def _refuse_failed(
    asked: Race, started: Sequence[subprocess.Popen[str]], errors: Sequence[IO[str]]
) -> None:
    """Wait for the end of all ranks, and say what the first said that failed."""
    for rank, process in enumerate(started):
        if process.wait():
            errors[rank].seek(0)
            last = (errors[rank].read().strip() or "nothing").splitlines()[-1]
            raise UnsupportedError(
                f"{asked.method} at {asked.mbit} Mbit/s: rank {rank} ended with "
                f"{process.returncode} and said: {last}",
                need="ranks that run to their end",
                hint="the same with --steps 1, and memory for every rank",
            )


def _start(
    asked: Sequence[Race], rank: int, place: Place, first: str, errors: IO[str]
) -> subprocess.Popen[str]:
    given = {"asked": [asdict(each) for each in asked], "rank": rank}
    given |= {"interface": place.interface, "address": first}
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": place.interface, "OMP_NUM_THREADS": "1"}
    source = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([source, *sys.path])
    return subprocess.Popen(
        place.command(sys.executable, "-m", __name__, json.dumps(given)),
        stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
        stderr=errors,  # a file: nobody reads a pipe while ranks run
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for who started them, and ends them
    )


# ---- one rank ------------------------------------------------------------------------------


def powersgd_in_turn(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, a bucket after the other: over gloo several at once mix up messages."""
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def _halved(
    state: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """What PyTorch's bf16_compress_hook does, which DDP refuses over gloo."""
    buffer = bucket.buffer()
    sent = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    found: torch.futures.Future[Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
    return found


class Layers(nn.Module):
    """Linear layers one behind the other, or tables of parameters with a gradient of their own."""

    def __init__(self, shapes: Sequence[tuple[int, int]], chained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(s) * 0.03) for s in shapes])
        self.chained = chained

    def forward(self, x: Tensor) -> Tensor:
        """Something with a gradient for every weight."""
        if self.chained:
            for weight in self.weights:
                x = torch.tanh(x @ weight.T)
            return x.square().mean()
        scale = x.mean()
        return torch.stack([(weight * weight).sum() * scale for weight in self.weights]).sum()


def reduce_by(ddp: DistributedDataParallel, method: str) -> PlannedState | None:
    """Let a method reduce the gradients."""
    if method in HYBRID:
        register(ddp, HybridState(**HYBRID[method]))
    elif method == "planned":
        return register_planned(ddp, PlannedState(HybridState(remainder="int3.5")))
    elif method == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "bf16":
        ddp.register_comm_hook(None, _halved)
    elif method == "powersgd-2":
        state = PowerSGDState(None, 2, 2, orthogonalization_epsilon=1e-8)
        ddp.register_comm_hook(state, powersgd_in_turn)
    return None


def _sent(interface: str) -> int:
    """Bytes that an interface of this namespace has sent."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def _sent_again() -> int:
    """Segments of TCP that this namespace has sent more than once."""
    names, values = (
        line.split()
        for line in Path("/proc/net/snmp").read_text().splitlines()
        if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def run_ranks(asked: Sequence[Race], rank: int, interface: str, address: str) -> None:
    """One rank of runs that follow one another; rank 0 prints each as a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{_PORT}",
        rank=rank,
        world_size=asked[0].ranks,
        timeout=timedelta(seconds=300),
    )
    for each in asked:
        row = _run(each, rank, interface)
        if rank == 0:
            print(json.dumps(row), flush=True)
    leave()


def _run(asked: Race, rank: int, interface: str) -> dict[str, Any]:
    """What this rank measured of one run."""
    ddp = DistributedDataParallel(Layers(MODELS[asked.model], asked.model == "mlp"))
    planned = reduce_by(ddp, asked.method)
    generator = torch.Generator().manual_seed(rank)
    times, sent, again = [], [], []
    for step in range(_WARM + asked.steps):
        x = torch.randn(_ROWS, _COLUMNS, generator=generator)
        ddp.zero_grad()
        dist.barrier()
        before, again_before = _sent(interface), _sent_again()
        started = time.perf_counter()
        ddp(x).backward()
        spent = time.perf_counter() - started
        # What is still on its way belongs to this step.
        dist.barrier()
        if step >= _WARM:
            times.append(1e3 * spent)
            sent.append(_sent(interface) - before)
            again.append(_sent_again() - again_before)
    row: dict[str, Any] = {
        "parameters": sum(each.numel() for each in ddp.parameters()),
        "step_ms": statistics.median(times),
        "step_ms_least": min(times),
        "step_ms_most": max(times),
        "interface_bytes_a_step": sum(sent) / len(sent),
        "segments_again_a_step": sum(again) / len(again),
    }
    if planned is not None:
        row["plan"] = planned.describe().splitlines()
    return row


if __name__ == "__main__":
    _given = json.loads(sys.argv[1])
    _races = [Race(**each) for each in _given["asked"]]
    run_ranks(_races, _given["rank"], _given["interface"], _given["address"])

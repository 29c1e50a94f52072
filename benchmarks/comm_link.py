"""Step times and bytes on the wire of gradients over links of a given rate, between namespaces.

    PYTHONPATH=src python benchmarks/comm_link.py --out rows.jsonl          (as root)

Each rank is a process in a network namespace of its own, with one interface to a bridge; `tc tbf`
limits what it sends. Bytes are those that the interface counted. Appends one JSON row a rate and
method; a run that is in the file already is not made again. Needs root, `ip` and `tc`.
"""

# Annotations are values here: DDP compares those of a hook with the classes that it knows.

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comm_convergence import powersgd_in_turn
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from hopsparse.comm import HybridState, PlannedState, register, register_planned
from hopsparse.measure import record

HYBRID: dict[str, dict[str, Any]] = {
    "int4": {"remainder": "int4"},
    "int3": {"remainder": "int3"},
    "int4 every 2": {"remainder": "int4", "every": 2},
    "int4 every 4": {"remainder": "int4", "every": 4},
    "sign": {"remainder": "sign"},
}
METHODS = ("dense", "fp16", "powersgd 2", *HYBRID, "planned", "planned with rank 2")
# 4.2 M values, as four layers of an MLP; 110 M, about those of BERT-Base.
MODELS = {
    "mlp": [(1024, 1024)] * 4,
    "bert": [(30522, 768), (512, 768), *[(768, 768)] * 48, *[(3072, 768)] * 24],
}
_WARM = 4


class Layers(nn.Module):
    """Linear layers one behind the other, or tables of parameters with a gradient of their own."""

    def __init__(self, shapes: list[tuple[int, int]], chained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(s) * 0.03) for s in shapes])
        self.chained = chained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Something with a gradient for every weight."""
        if self.chained:
            for weight in self.weights:
                x = torch.tanh(x @ weight.T)
            return x.square().mean()
        scale = x.mean()
        return torch.stack([(weight * weight).sum() * scale for weight in self.weights]).sum()


def hook(ddp: DistributedDataParallel, method: str) -> Any:
    """Let a method reduce the gradients."""
    if method in HYBRID:
        return register(ddp, HybridState(**HYBRID[method]))
    if method.startswith("planned"):
        rank = 2 if method.endswith("rank 2") else None
        return register_planned(ddp, PlannedState(HybridState(every=2), rank=rank))
    if method == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif method == "powersgd 2":
        ddp.register_comm_hook(PowerSGDState(None, 2, 2), powersgd_in_turn)
    return None


def counted(interface: str) -> int:
    """Bytes that an interface of this namespace has sent."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def work(options: argparse.Namespace) -> None:
    """One rank of one run; rank 0 prints what it measured as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.address}:29577",
        rank=options.rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=300),
    )
    ddp = DistributedDataParallel(Layers(MODELS[options.model], options.model == "mlp"))
    state = hook(ddp, options.method)
    generator = torch.Generator().manual_seed(options.rank)
    times, sent = [], []
    for step in range(_WARM + options.steps):
        x = torch.randn(32, 1024, generator=generator)
        ddp.zero_grad()
        dist.barrier()
        before, started = counted(options.interface), time.perf_counter()
        ddp(x).backward()
        spent = time.perf_counter() - started
        # What is still on its way belongs to this step.
        dist.barrier()
        if step >= _WARM:
            times.append(1e3 * spent)
            sent.append(counted(options.interface) - before)
    if options.rank == 0:
        row: dict[str, Any] = {
            "parameters": sum(each.numel() for each in ddp.parameters()),
            "step_ms": statistics.median(times),
            "step_ms_least": min(times),
            "step_ms_most": max(times),
            "interface_bytes_a_step": sum(sent) / len(sent),
        }
        if isinstance(state, PlannedState):
            row["plan"] = state.describe().splitlines()
        print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def namespaces(ranks: int, mbit: int) -> Iterator[list[tuple[str, str]]]:
    """Namespaces on one bridge, each with an interface that sends `mbit` at most; 0: any rate.

    Yields:
        Name of the namespace and of its interface, for each rank.
    """
    mine = f"hs{os.getpid() % 10000}"
    bridge, made = f"{mine}b", []

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for rank in range(ranks):
            name, inside, outside = f"{mine}n{rank}", f"{mine}i{rank}", f"{mine}o{rank}"
            run("ip", "netns", "add", name)
            made.append((name, inside))
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            run("ip", "link", "set", inside, "netns", name)
            run("ip", "link", "set", outside, "master", bridge, "up")
            there = ("ip", "netns", "exec", name)
            run(*there, "ip", "addr", "add", f"10.77.0.{rank + 1}/24", "dev", inside)
            run(*there, "ip", "link", "set", inside, "up")
            run(*there, "ip", "link", "set", "lo", "up")
            if mbit:
                shape = ("rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms")
                run(*there, "tc", "qdisc", "add", "dev", inside, "root", "tbf", *shape)
                run("tc", "qdisc", "add", "dev", outside, "root", "tbf", *shape)
        yield made
    finally:
        # An interface goes with its namespace.
        for name, _ in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def measured(options: argparse.Namespace, mbit: int, method: str) -> dict[str, Any]:
    """One run, all ranks."""
    with namespaces(options.ranks, mbit) as made:
        started = []
        for rank, (name, interface) in enumerate(made):
            words = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", str(rank)]
            words += ["--interface", interface, "--address", "10.77.0.1", "--method", method]
            words += ["--ranks", str(options.ranks), "--model", options.model]
            words += ["--steps", str(options.steps)]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            started.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
            )
        told = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit(f"{method} at {mbit} Mbit/s failed")
    found: dict[str, Any] = json.loads(told[0].splitlines()[-1])
    return found


def main() -> None:
    """Run what the file does not have yet."""
    options = parse()
    if options.rank is not None:
        work(options)
        return
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        raise SystemExit(f"needs root, ip and tc; missing: {', '.join(missing) or 'root'}")
    record.check_can_append(options.out)
    have = record.done(options.out, ("model", "ranks", "mbit", "method"))
    for mbit in map(int, options.mbit.split(",")):
        for method in options.methods.split(","):
            if (options.model, options.ranks, mbit, method) in have:
                continue
            asked = {"model": options.model, "ranks": options.ranks, "mbit": mbit}
            row = {"suite": "comm_link", **asked, "method": method, "steps": options.steps}
            row |= measured(options, mbit, method)
            record.append(options.out, row | record.environment())
            print(
                f"{mbit or 'any':>5} Mbit/s {method:<16} {row['step_ms']:8.1f} ms "
                f"{row['interface_bytes_a_step'] / 1e6:8.3f} MB a step",
                flush=True,
            )


def parse() -> argparse.Namespace:
    """Options of the command line; those of a single rank are for this script itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("comm_link.jsonl"))
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--mbit", default="100,1000,0", help="rates, comma-separated; 0 for any")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--interface", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for method in options.methods.split(","):
        if method not in METHODS:
            parser.error(f"--methods {method!r}: one of {', '.join(METHODS)}")
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: at least 2")
    return options


if __name__ == "__main__":
    main()

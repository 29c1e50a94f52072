"""Gradients over NCCL between two GPUs: NVLink, where coding must lose, and sockets, where it wins.

    PYTHONPATH=src python benchmarks/comm_nccl.py --out rows.jsonl        # two GPUs of one machine
    PYTHONPATH=src python benchmarks/comm_nccl.py --links nvlink,sockets --steps 5

A link is `nvlink`; `sockets`, NCCL without NVLink and shared memory; or so many Mbit/s of sockets,
between network namespaces that tc limits, for which it must be root and have ip and tc; others are
told and left out. Two processes go through all methods of a link: steps of DDP with 4.2 M
parameters, forward and backward, of which the median is told. `planned` also says what it measured
and chose: dense on NVLink. Appends one JSON row a method, with the environment.
"""

from __future__ import annotations

import argparse
import json
import os
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
from torch.nn.parallel import DistributedDataParallel

from hopsparse.comm.namespaces import Place, linked, require_namespaces
from hopsparse.comm.race import METHODS, MODELS, Layers, reduce_by
from hopsparse.errors import UnsupportedError
from hopsparse.measure import record

_METHODS = "dense,bf16,int4,int3.5,sign,powersgd-2,planned"
_LINKS = "nvlink,sockets,1000,100"
_WARM = 3
_ROWS, _COLUMNS = 32, 1024
_LIMIT_S = 90.0  # of all methods over one link
_PORT = 29583
# What each link takes from NCCL. Multicast, which few machines have set up, is never used.
_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
_ALWAYS = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Go through the links, print and append."""
    options = parse()
    if options.rank is not None:
        run_rank(options)
        return
    facts, rows = record.environment(), []
    for link in options.links:
        try:
            found = over(link, options)
        except UnsupportedError as error:
            print(f"{link}: left out: {error}", flush=True)
            continue
        for row in found:
            rows.append(row)
            record.append(options.out, row | facts)
    table(rows)


def parse() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("comm_nccl.jsonl"))
    parser.add_argument("--links", default=_LINKS, help="nvlink, sockets, or Mbit/s of sockets")
    parser.add_argument("--methods", default=_METHODS)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--backend", default="nccl", help="gloo runs on a machine without GPUs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.links, options.methods = options.links.split(","), options.methods.split(",")
    for name, known, given in (
        ("links", lambda each: each in ("nvlink", "sockets") or each.isdigit(), options.links),
        ("methods", lambda each: each in METHODS, options.methods),
    ):
        wrong = [each for each in given if not known(each)]
        if wrong:
            words = ", ".join(METHODS) if name == "methods" else "nvlink, sockets, a number"
            parser.error(f"--{name} {wrong[0]!r}: one of {words}")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    return options


# ---- one link ------------------------------------------------------------------------------


@contextmanager
def places_of(link: str) -> Iterator[list[Place | None]]:
    """Where ranks run: namespaces where a rate is asked for."""
    if link.isdigit():
        require_namespaces()
        with linked(2, int(link)) as places:
            yield list(places)
    else:
        yield [None, None]


def over(link: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all methods over one link.

    Raises:
        UnsupportedError: Ranks cannot be started so here, or failed.
    """
    with places_of(link) as places:
        started = [
            start(link, rank, place, places[0], options) for rank, place in enumerate(places)
        ]
        until = time.monotonic() + _LIMIT_S
        try:
            outputs = [
                process.communicate(timeout=max(1.0, until - time.monotonic()))
                for process in started
            ]
        except subprocess.TimeoutExpired:
            raise UnsupportedError(
                f"{link}: ranks that take over {_LIMIT_S:.0f} s",
                need="a link that is quick enough",
                hint="--steps 2, or --methods int4,sign",
            ) from None
        finally:
            for process in started:
                process.kill()
                process.wait()
    for rank, process in enumerate(started):
        if process.returncode:
            last = (outputs[rank][1].strip() or "nothing").splitlines()[-1]
            raise UnsupportedError(
                f"{link}: rank {rank} ended with {process.returncode} and said: {last}",
                need="ranks that run to their end",
                hint="NCCL_DEBUG=INFO",
            )
    rows = [json.loads(line) for line in outputs[0][0].splitlines() if line.startswith("{")]
    return [{"suite": "comm_nccl", "link": link, **row} for row in rows]


def start(
    link: str, rank: int, place: Place | None, first: Place | None, options: argparse.Namespace
) -> subprocess.Popen[str]:
    """A rank."""
    interface = place.interface if place else "lo"
    environment = {**os.environ, **_ALWAYS}
    if link != "nvlink":
        environment |= {**_SOCKETS, "NCCL_SOCKET_IFNAME": interface}
    environment |= {"GLOO_SOCKET_IFNAME": interface}
    root = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), *sys.path])
    words = [sys.executable, str(Path(__file__).resolve()), "--rank", str(rank)]
    words += ["--address", first.address if first else "127.0.0.1", "--links", link]
    words += ["--methods", ",".join(options.methods), "--steps", str(options.steps)]
    words += ["--backend", options.backend]
    return subprocess.Popen(
        place.command(*words) if place else words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for who started them, and ends them
    )


# ---- one rank ------------------------------------------------------------------------------


def run_rank(options: argparse.Namespace) -> None:
    """One rank of a link; rank 0 prints a row a method."""
    on_gpu = options.backend == "nccl"
    device = torch.device("cuda", options.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        options.backend,
        init_method=f"tcp://{options.address}:{_PORT}",
        rank=options.rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for method in options.methods:
        row = steps_of(method, options, device)
        if options.rank == 0:
            print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def steps_of(method: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Times of the steps of one method."""
    model = Layers(MODELS["mlp"], chained=True).to(device)
    ddp = DistributedDataParallel(model, device_ids=None)
    planned = reduce_by(ddp, method)
    generator = torch.Generator().manual_seed(options.rank)
    times, sent = [], []
    for step in range(_WARM + options.steps):
        x = torch.randn(_ROWS, _COLUMNS, generator=generator).to(device)
        ddp.zero_grad()
        meet(device)
        before, started = bytes_sent(options.links[0]), time.perf_counter()
        ddp(x).backward()
        finish(device)
        if step >= _WARM:
            times.append(1e3 * (time.perf_counter() - started))
        meet(device)
        if step >= _WARM:
            sent.append(bytes_sent(options.links[0]) - before)
    row: dict[str, Any] = {
        "method": method,
        "backend": options.backend,
        "parameters": sum(each.numel() for each in ddp.parameters()),
        "steps": options.steps,
        "step_ms": statistics.median(times),
        "step_ms_least": min(times),
        "step_ms_most": max(times),
        "interface_bytes_a_step": sum(sent) / len(sent),
    }
    if planned is not None:
        row["plan"] = planned.describe().splitlines()
        row["chosen"] = sorted({plan.method for plan in planned.plans.values()})
    return row


def meet(device: torch.device) -> None:
    """All ranks are here."""
    dist.barrier()
    finish(device)


def finish(device: torch.device) -> None:
    """All is done that was started."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def bytes_sent(link: str) -> int:
    """What went out of the interfaces of this namespace; over lo, of both ranks."""
    if link == "nvlink":
        return 0
    folder = Path("/sys/class/net")
    counters = [each / "statistics/tx_bytes" for each in folder.iterdir()]
    return sum(int(each.read_text()) for each in counters if each.exists())


def table(rows: list[dict[str, Any]]) -> None:
    """A line a method."""
    print(f"{'link':10} {'method':12} {'step ms':>9} {'least':>9} {'MB a step':>10}")
    for row in rows:
        sent = f"{row['interface_bytes_a_step'] / 1e6:10.2f}"
        print(
            f"{row['link']:10} {row['method']:12} {row['step_ms']:9.2f} "
            f"{row['step_ms_least']:9.2f} {sent}  {', '.join(row.get('chosen', []))}"
        )
    for row in rows:
        if "plan" in row:
            print(f"{row['link']}: " + "; ".join(row["plan"]))


if __name__ == "__main__":
    main()

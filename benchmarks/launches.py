"""What a launch costs at the least: empty kernels in chains, on a stream, in a graph, overlapped.

    PYTHONPATH=src python benchmarks/launches.py --out rows.jsonl     # on an H100 or H200

A chain is so many kernels that do nothing, one behind the other. `stream` calls the driver for
each, `graph` replays one CUDA graph, `graph, early` lets each start before the one ahead has ended
(programmatic dependent launch); `torch` adds nothing to one number, eagerly and in a graph. Device
time is from before the first to behind the last, host time until the last call has returned.
Appends one JSON row a chain, with the environment.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from hopsparse.compiler import KernelCache
from hopsparse.launch import Kernel, capture, current_stream, kernel_for
from hopsparse.measure import record
from hopsparse.measure.clock import gpu
from hopsparse.plan import KernelSpec

CHAINS = (1, 4, 16, 64, 256, 1024)
BLOCKS = (1, 132)
_ARGS = bytes(16)

# All threads wait for the kernel ahead, or a chain would not be one: a kernel that ends without
# waiting lets the one behind it pass two.
EMPTY = KernelSpec(
    op="launches",
    name="empty",
    kernel="device/ptx/base.cuh",
    text="""
struct Args { void* nothing[2]; };
extern "C" __global__ void empty(const __grid_constant__ Args args) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
""",
    entry="empty",
    threads=128,
    cluster=(1, 1, 1),
    smem_bytes=0,
    args_bytes=len(_ARGS),
    pdl=True,
)


def main() -> None:
    """Measure, print and append."""
    options = parse()
    device = gpu()
    facts = record.environment()
    for blocks in BLOCKS:
        for chain in CHAINS:
            for name, run in contenders(device, blocks, chain):
                row = timed(name, run, blocks, chain, options.rounds)
                record.append(options.out, row | facts)
                print(line(row), flush=True)


def contenders(
    device: torch.device, blocks: int, chain: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to run a chain, by name."""
    kernel = kernel_for(EMPTY, device.index, lambda spec: KernelCache.default().get(spec).image)
    yield "stream", partial(launched, kernel, blocks, chain, early=False)
    yield "graph", capture(partial(launched, kernel, blocks, chain, early=False)).replay
    yield "graph, early", capture(partial(launched, kernel, blocks, chain, early=True)).replay
    if blocks == 1:
        number = torch.zeros(1, device=device)
        eager = partial(added, number, chain)
        yield "torch", eager
        yield "torch, graph", capture(eager).replay


def launched(kernel: Kernel, blocks: int, chain: int, *, early: bool) -> None:
    """Put a chain of empty kernels on torch's current stream."""
    bound = kernel.bind(blocks, _ARGS, current_stream(kernel.device), pdl=early)
    for _ in range(chain):
        bound()


def added(number: torch.Tensor, chain: int) -> None:
    """Add 0 so many times."""
    for _ in range(chain):
        number.add_(0)


def timed(name: str, run: Callable[[], object], blocks: int, chain: int, rounds: int) -> record.Row:
    """Microseconds a kernel: medians of the device and of the host."""
    on_device, on_host = [], []
    for _ in range(3):
        run()
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        began = time.perf_counter()
        run()
        on_host.append(1e6 * (time.perf_counter() - began) / chain)
        stop.record()
        stop.synchronize()
        on_device.append(1e3 * start.elapsed_time(stop) / chain)
    return {
        "way": name,
        "blocks": blocks,
        "chain": chain,
        "us": round(statistics.median(on_device), 3),
        "host_us": round(statistics.median(on_host), 3),
        "rounds": rounds,
    }


def line(row: record.Row) -> str:
    """One chain, for people."""
    return (
        f"{row['chain']:5} kernels of {row['blocks']:3} blocks, {row['way']:14}"
        f"{row['us']:9.2f} us a kernel, host {row['host_us']:7.2f}"
    )


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("launches.jsonl"))
    parser.add_argument("--rounds", type=int, default=21, help="samples of each chain")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    return options


if __name__ == "__main__":
    main()

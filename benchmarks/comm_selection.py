"""Choosing 0.1 % of a gradient on the CPU: ours against torch.topk of the magnitudes.

    PYTHONPATH=src python benchmarks/comm_selection.py --out comm_selection.jsonl

Both are checked to choose magnitudes of the same sum, then timed in turns; rows hold medians. One
thread each, as a rank of a training run has beside its backward pass, and all threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.measure import record
from hopsparse.ops.hybrid_gradient.select import largest

SIZES = (1 << 20, 1 << 22, 25_000_000)


def main() -> None:
    """Time each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    facts = record.environment()
    most = torch.get_num_threads()
    for threads in dict.fromkeys((1, most)):
        torch.set_num_threads(threads)
        for n in SIZES:
            for row in measured(n, options.rounds):
                record.append(options.out, row | {"threads": threads} | facts)
                print(f"{n:>10} values, {threads} threads  {row['way']:<12}{row['ms']:9.2f} ms")


def measured(n: int, rounds: int) -> list[record.Row]:
    """Rows of one size, on normal values."""
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    k = n // 1000
    ways: dict[str, Callable[[], Tensor]] = {
        "hopsparse": lambda: largest(values, k),
        "torch.topk": lambda: torch.topk(values.abs(), k, sorted=False).indices,
    }
    ours, theirs = (values[choose()].abs().double().sum() for choose in ways.values())
    if not torch.isclose(ours, theirs, rtol=1e-12):
        raise SystemExit(f"{n} values: another choice than torch.topk's")
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, choose in ways.items():
            start = time.perf_counter()
            choose()
            taken[way].append(1e3 * (time.perf_counter() - start))
    return [
        {"suite": "comm_selection", "n": n, "k": k, "way": way, "ms": statistics.median(each)}
        for way, each in taken.items()
    ]


if __name__ == "__main__":
    main()

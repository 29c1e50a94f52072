"""The packing kernels against a copy of the same bytes, side by side.

    PYTHONPATH=src python benchmarks/pack.py --out rows.jsonl

The copy reads half of the bytes that packing reads and writes, and writes the other half. Each
kernel is checked against `NM.from_dense` first. Appends one JSON row a matrix and kernel. The rows
of `pack_nm()` and `NM.from_dense()` are whole calls by the clock of the host, with their waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.formats import NM, NMPattern
from hopsparse.measure import record
from hopsparse.measure.clock import Call, Contender, copies_to_defeat_l2, time_side_by_side
from hopsparse.ops import pack_nm
from hopsparse.ops.pack_nm.cases import MODEL, Case
from hopsparse.ops.pack_nm.op import empty_packed, enqueue
from hopsparse.ops.pack_nm.plan import PackConfig, supports
from hopsparse.prune import magnitude

CONFIGS = [
    PackConfig(select, True, units) for select in ("check", "magnitude") for units in (1, 2, 4)
]
# What a matrix runs whose rows do not start on 16 bytes.
CONFIGS.append(PackConfig("check", False, 1))
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def main() -> None:
    """Measure, print and append."""
    options = parse()
    facts = record.environment()
    for dtype in options.dtypes.split(","):
        for case in MODEL:
            if options.only in case.name:
                for row in measured(case, dtype, options.rounds):
                    record.append(options.out, row | facts)
                    print(line(row), flush=True)


def measured(case: Case, dtype: str, rounds: int) -> list[record.Row]:
    """Rows of one matrix: every kernel, and the copy."""
    dense = two_four(case, DTYPES[dtype])
    packed = empty_packed(dense)
    configs = [config for config in CONFIGS if supports(dtype, config.select)]
    checked(dense, configs)
    moved = dense.nbytes + packed.nbytes
    l2_bytes = torch.cuda.get_device_properties(dense.device).L2_cache_size
    copies = copies_to_defeat_l2(packed.nbytes, l2_bytes)
    inputs = [(dense.clone(), empty_packed(dense)) for _ in range(copies)]
    contenders = [Contender(named(config), packings(config, inputs)) for config in configs]
    contenders.append(Contender("copy", copyings(moved // 2, copies)))
    timings = time_side_by_side(contenders, rounds=rounds)
    if failed := [timing.error for timing in timings if timing.error]:
        raise SystemExit(f"{case.name} {dtype}: {failed[0]}")
    copy_us = timings[-1].us
    times = {timing.name: timing.us for timing in timings}
    times["pack_nm()"] = host_us(lambda: pack_nm(dense))
    times["NM.from_dense()"] = host_us(lambda: NM.from_dense(dense))
    return [
        {
            "case": case.name,
            "rows": case.rows,
            "cols": case.cols,
            "dtype": dtype,
            "kernel": name,
            "us": us,
            "tbps": moved / us * 1e-6,
            "of_copy": copy_us / us,
        }
        for name, us in times.items()
    ]


def host_us(run: Call) -> float:
    """Median of nine calls, each waited for."""
    spans = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        spans.append(1e6 * (time.perf_counter() - started))
    return statistics.median(spans[1:])  # the first one allocates


def two_four(case: Case, dtype: torch.dtype) -> Tensor:
    """A random 2:4 matrix; 8-bit values are small whole numbers."""
    dense = torch.randn(case.rows, case.cols, device="cuda")
    dense = magnitude(dense, NMPattern(2, 4))
    return (dense * 16).clamp(-127, 127).to(dtype) if dtype.itemsize == 1 else dense.to(dtype)


def checked(dense: Tensor, configs: list[PackConfig]) -> None:
    """Stop at a kernel that does not write what `NM.from_dense` writes."""
    want = NM.from_dense(dense)
    for config in configs:
        packed, refused = empty_packed(dense), sentinel()
        enqueue(config, dense, packed, refused)
        for name, part in want.parts().items():
            got = packed.parts()[name].view(torch.uint8)
            if int(refused) != -1 or not torch.equal(got, part.view(torch.uint8)):
                raise SystemExit(f"{named(config)}: {name} of {tuple(dense.shape)} is wrong")


def packings(config: PackConfig, inputs: list[tuple[Tensor, NM]]) -> list[Call]:
    """One call for each copy of the inputs."""
    refused = sentinel()
    return [
        lambda dense=dense, packed=packed: enqueue(config, dense, packed, refused)  # type: ignore[misc]
        for dense, packed in inputs
    ]


def copyings(nbytes: int, count: int) -> list[Call]:
    """One copy of `nbytes` for each of `count` sources."""
    sources = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(count)]
    target = torch.empty_like(sources[0])
    return [lambda source=source: target.copy_(source) for source in sources]  # type: ignore[misc]


def sentinel() -> Tensor:
    """The word that says that nothing was refused."""
    return torch.full((), -1, dtype=torch.int64, device="cuda")


def named(config: PackConfig) -> str:
    """Selection, way of reading, units a thread."""
    return f"{config.select} {'vector' if config.vector else 'entry'} x{config.units}"


def line(row: record.Row) -> str:
    """One row for people."""
    head = f"{row['case']:<16} {row['dtype']:<14} {row['kernel']:<22}"
    return f"{head} {row['us']:8.1f} us {row['tbps']:5.2f} TB/s {100 * row['of_copy']:5.1f} %"


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pack.jsonl"))
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated")
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()

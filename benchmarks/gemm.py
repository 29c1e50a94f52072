"""Our 2:4 product against what users have today, side by side, layer by layer.

    PYTHONPATH=src python benchmarks/gemm.py --suite anchors --out rows.jsonl
    PYTHONPATH=src python benchmarks/gemm.py --dtype int8 --scaling rows --out rows.jsonl

Every contender is checked against float64 before it is timed. Appends one JSON row a contender and
problem, with the environment; run again, it goes on behind the problems that are in the file. The
table comes last: microseconds, and how many times slower than ours each rival is.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopsparse.measure import coded_peers, record
from hopsparse.measure.coded_contest import layer_for
from hopsparse.measure.codes import SCALINGS
from hopsparse.measure.contest import Way, as_rows
from hopsparse.measure.peers import Product
from hopsparse.measure.record import Row
from hopsparse.measure.suite import CodedProblem, Problem, coded_suite, read_suite
from hopsparse.nn import SparseLinear
from hopsparse.ops import pack_nm, spmm_nm
from hopsparse.ops.spmm_nm import contenders
from hopsparse.ops.spmm_nm.op import plan

RIVALS = ("cublas", "cusparselt", "torch_class")
PROBLEM = ("layer", "out", "k", "tokens", "dtype")


class Operator:
    """`hopsparse.ops.spmm_nm` on a packed weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed, self.bias = pack_nm(weight), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, k]."""
        return spmm_nm(self.packed, x, bias=self.bias)


def module(weight: Tensor, bias: Tensor | None) -> Product:
    """`SparseLinear`, as models use it."""
    return SparseLinear(pack_nm(weight), bias)


OURS = {
    "hopsparse": Way("hopsparse", Operator, lambda by, x: plan(by.packed, x).name),
    "SparseLinear": Way("SparseLinear", module, lambda by, x: by.plan(x).name),
}


def main() -> None:
    """Measure what the file does not have yet, then print the table of all of it."""
    options = parse()
    suite = coded_suite(options.suite, options.dtype, options.scaling) if options.dtype else None
    problems = [each for each in suite or read_suite(options.suite) if wanted(each, options.only)]
    ways = coded_ways(options) if options.dtype else float_ways(options)
    names = [each.name for each in ways]
    known = record.done(options.out, (*fields(bool(options.dtype)), "contender"))
    missing = [
        each for each in problems if any((*key_of(each), name) not in known for name in names)
    ]
    facts = record.environment() | {"suite": options.suite}
    end = time.monotonic() + options.budget_s
    for problem, rows in measured(missing, ways, end, options.rounds, options.host):
        for row in rows:
            record.append(options.out, row | facts)
        print(line(problem, rows), flush=True)
    print_table(record.read(options.out), problems, names)


def float_ways(options: argparse.Namespace) -> list[Way]:
    """The contenders of 16 bits that were asked for, ours first."""
    names = [options.ours, *filter(None, options.rivals.split(","))]
    return [way(name, options.split_k) for name in names]


def coded_ways(options: argparse.Namespace) -> list[Way]:
    """All of ours in 8 bits, then the peers that can run here and were asked for."""
    dtype = CodedProblem.DTYPES[options.dtype]
    peers = coded_peers.coded_ways(dtype, split_k=options.split_k)
    asked = options.rivals.split(",")
    return [*contenders.coded_ways(dtype), *(each for each in peers if each.name in asked)]


def way(name: str, split_k: bool) -> Way:
    """A contender by name: one of ours, or a module of `rivals`."""
    if name in OURS:
        return OURS[name]
    rival = Way.of(import_module(f"rivals.{name}"))
    if name == "cusparselt" and split_k:
        return replace(rival, prepare=partial(rival.prepare, split_k=True))
    return rival


def measured(
    problems: Iterable[Problem], ways: Sequence[Way], end: float, rounds: int, host: bool
) -> Iterator[tuple[Problem, list[Row]]]:
    """Rows problem by problem; weights are made once for all tokens of a layer."""
    for _, group in groupby(problems, lambda each: (each.out, each.k, each.dtype)):
        layer = None
        for problem in group:
            if time.monotonic() > end:
                print("the time is spent: the same command goes on")
                return
            if layer is None:
                layer = layer_for(problem, ways)
            rows = as_rows(problem, layer.contest(problem.tokens, rounds=rounds))
            for number, row in enumerate(rows):
                if host and not row["error"]:
                    row["host_us"] = layer.host_us(number, problem.tokens)
            yield problem, rows
            torch.cuda.empty_cache()


def line(problem: Problem, rows: Sequence[Row]) -> str:
    """One problem: each contender's time, plan and TFLOP/s, or its error."""
    parts = [
        f"{row['contender']} ({row['plan']}) {row['us']:.1f} us {row['tflops']:.0f} TF"
        + (f", host {row['host_us']:.1f} us" if "host_us" in row else "")
        if row["us"] is not None
        else f"{row['contender']}: {row['error']}"
        for row in rows
    ]
    head = f"{problem.layer} {problem.out}x{problem.k} {problem.tokens} {numbers_of(problem)}"
    return f"{head}: {'; '.join(parts)}"


def print_table(rows: Sequence[Row], problems: Sequence[Problem], names: Sequence[str]) -> None:
    """Times, and ratios to ours (the first name): above 1 where ours is faster; then their means.

    A contender that was measured twice counts as the last time.
    """
    us = {
        (*(row[each] for each in fields("scaling" in row)), row["contender"]): row["us"]
        for row in rows
    }
    ours, *rivals = names
    ratios: dict[str, list[float]] = {name: [] for name in rivals}
    heads = [word for name in rivals for word in (name, "ratio")]
    print_cells(["layer", "out x k", "tokens", "dtype", ours, "TFLOP/s", *heads])
    for problem in problems:
        mine = us.get((*key_of(problem), ours))
        sides = f"{problem.out}x{problem.k}"
        cells = [problem.layer, sides, str(problem.tokens), numbers_of(problem)]
        cells += [shown(mine), shown(problem.flops / mine / 1e6 if mine else None)]
        for name in rivals:
            theirs = us.get((*key_of(problem), name))
            ratio = theirs / mine if theirs and mine else None
            ratios[name] += [] if ratio is None else [ratio]
            cells += [shown(theirs), shown(ratio, 2)]
        print_cells(cells)
    for name, found in ratios.items():
        if found:
            mean = math.exp(math.fsum(map(math.log, found)) / len(found))
            extent = f"{len(found)} problems, {min(found):.2f} to {max(found):.2f}"
            print(f"geometric mean of {name} / {ours}: {mean:.3f} ({extent})")


def print_cells(cells: Sequence[str]) -> None:
    """One row: the layer on the left, the rest on the right."""
    print(f"{cells[0]:<20}" + "".join(f"{cell:>12}" for cell in cells[1:]))


def shown(number: float | None, digits: int = 1) -> str:
    """A number, or a dash."""
    return "-" if number is None else f"{number:.{digits}f}"


def key_of(problem: Problem) -> tuple[Any, ...]:
    """What names a problem in a file."""
    return tuple(getattr(problem, each) for each in fields(isinstance(problem, CodedProblem)))


def fields(coded: bool) -> tuple[str, ...]:
    """The fields of that name; codes have a scaling."""
    return (*PROBLEM, "scaling") if coded else PROBLEM


def numbers_of(problem: Problem) -> str:
    """The dtype, and the scaling of codes."""
    known = {"float8_e4m3fn": "fp8"}
    scaling = f" {problem.scaling}" if isinstance(problem, CodedProblem) else ""
    return known.get(problem.dtype, problem.dtype) + scaling


def wanted(problem: Problem, only: Sequence[str]) -> bool:
    """Whether every word of `only` is the layer, the shape, the tokens or the dtype."""
    facts = (problem.layer, f"{problem.out}x{problem.k}", str(problem.tokens), problem.dtype)
    return all(word in facts for word in only)


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="anchors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="layer, OUTxK, tokens or dtype")
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--dtype", choices=list(CodedProblem.DTYPES), help="codes instead")
    parser.add_argument("--scaling", choices=SCALINGS, default="none", help="of codes")
    parser.add_argument("--ours", default="hopsparse", choices=OURS)
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument(
        "--host", action="store_true", help="time eager calls on the host too: host_us"
    )
    parser.add_argument(
        "--split-k", action="store_true", help="let cuSPARSELt try slices of k as well"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

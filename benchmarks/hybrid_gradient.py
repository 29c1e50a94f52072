"""hybrid_gradient against a copy of the same bytes, and against torch.topk.

    PYTHONPATH=src python benchmarks/hybrid_gradient.py --out rows.jsonl

Bytes are those that must be moved: gradient and residual read, codes, scales, exact values and the
new residual written. The copy reads half of them and writes the other half. `torch.topk` chooses
only, and reads the gradient alone. Each
call works on its own copy of the inputs, so that the L2 cache holds none. The operator is checked
against the reference on the CPU first. Appends one JSON row a case, dtype, remainder and contender.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopsparse.measure import record
from hopsparse.measure.clock import Contender, copies_to_defeat_l2, gpu, time_side_by_side
from hopsparse.ops import hybrid_gradient
from hopsparse.ops.hybrid_gradient.cases import TIMED, Case
from hopsparse.ops.hybrid_gradient.remainder import CODERS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Inputs = tuple[Tensor, Tensor]


def main() -> None:
    """Measure, print and append."""
    options = parse()
    facts = record.environment(gpu())
    record.check_can_append(options.out)
    for case in TIMED:
        if options.only not in case.name:
            continue
        for dtype in options.dtypes.split(","):
            for remainder in options.remainders.split(","):
                for row in measured(case, dtype, remainder, options.rounds):
                    record.append(options.out, row | facts)
                    print(line(row), flush=True)


def measured(case: Case, dtype: str, remainder: Any, rounds: int) -> list[record.Row]:
    """Rows of one case: the operator, torch.topk, and the copy."""
    first = inputs(case, dtype)
    results = hybrid_gradient(*first, case.k, remainder)
    checked(first, results, case.k, remainder)
    moved = sum(each.nbytes for each in (*first, *results))
    l2_bytes = torch.cuda.get_device_properties(first[0].device).L2_cache_size
    copies = copies_to_defeat_l2(sum(each.nbytes for each in first), l2_bytes)
    every = [first, *((first[0].clone(), first[1].clone()) for _ in range(copies - 1))]
    sources = [torch.zeros(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    target = torch.zeros_like(sources[0])
    contenders = [
        Contender(
            "hybrid_gradient",
            [lambda each=each: hybrid_gradient(*each, case.k, remainder) for each in every],  # type: ignore[misc]
        ),
        Contender(
            "torch.topk",
            [lambda each=each: each[0].abs().topk(case.k, sorted=False) for each in every],  # type: ignore[misc]
        ),
        Contender("copy", [lambda each=each: target.copy_(each) for each in sources]),  # type: ignore[misc]
    ]
    timings = time_side_by_side(contenders, rounds=rounds)
    ours, *_, copy = timings
    if ours.error or copy.error:
        raise SystemExit(f"{case.name} {dtype} {remainder}: {ours.error or copy.error}")
    return [
        {
            "suite": "hybrid_gradient",
            "case": case.name,
            "n": case.n,
            "k": case.k,
            "dtype": dtype,
            "remainder": remainder,
            "contender": each.name,
            "error": each.error,
            "moved_bytes": moved,
            "us": None if each.error else each.us,
            "of_copy": None if each.error else copy.us / each.us,
        }
        for each in timings
    ]


def inputs(case: Case, dtype: str) -> Inputs:
    """A random gradient and residual."""
    gradient = torch.randn(case.n, device="cuda").mul_(0.01).to(DTYPES[dtype])
    return gradient, torch.randn(case.n, device="cuda").mul_(0.001)


def checked(given: Inputs, results: tuple[Tensor, ...], k: int, remainder: Any) -> None:
    """Stop if a result is not, bit for bit, that of the CPU."""
    wanted = hybrid_gradient(*(each.cpu() for each in given), k, remainder)
    for number, (one, two) in enumerate(zip(results, wanted, strict=True)):
        if not torch.equal(one.cpu().view(torch.uint8), two.view(torch.uint8)):
            raise SystemExit(f"result {number} of {remainder} is wrong")


def line(row: record.Row) -> str:
    """One row for people."""
    head = f"{row['case']:<5} {row['dtype']:<9} {row['remainder']:<7} {row['contender']:<16}"
    if row["error"]:
        return f"{head} {row['error']}"
    return f"{head} {row['us']:9.1f} us {100 * row['of_copy']:6.1f} % of the copy"


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("hybrid_gradient.jsonl"))
    parser.add_argument("--remainders", default=",".join(CODERS), help="comma-separated")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated")
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for name, known in (("remainders", CODERS), ("dtypes", DTYPES)):
        for word in getattr(options, name).split(","):
            if word not in known:
                parser.error(f"--{name} {word!r}: one of {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    return options


if __name__ == "__main__":
    main()

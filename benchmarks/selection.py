"""select against torch.topk, and the worst input against a random one.

    PYTHONPATH=src python benchmarks/selection.py --out selection.jsonl

Contenders of a case: select and torch.topk on random rows; select on rows that are equal, crowded
(one score in thirteen shares its top 8 bits) and ascending; select by mass. Each call works on its
own copy of the scores where the L2 cache would hold them. What is chosen is checked against the
reference first. Appends one JSON row a case and contender.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.measure import record
from hopsparse.measure.clock import Contender, copies_to_defeat_l2, gpu, time_side_by_side
from hopsparse.ops import select
from hopsparse.ops.select.cases import MODEL, Case

WORST = ("equal", "crowded", "ascending")


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    facts = record.environment(gpu())
    for case in MODEL:
        if options.only in case.name:
            for row in measured(case, options.rounds):
                print(f"{row['case']:>14} {row['contender']:<18} {row['us']:8.2f} us")
                record.append(options.out, facts | row)


def measured(case: Case, rounds: int) -> list[record.Row]:
    """Rows of one case."""
    random = torch.randn(case.rows, case.columns, device="cuda")
    contenders = [
        contender("select", random, case.k),
        Contender("torch.topk", [lambda x=each: torch.topk(x, case.k) for each in copies(random)]),
        contender("select, by mass", random, case.k, top_p=0.9),
        *(contender(f"select, {kind}", rows_of(kind, case), case.k) for kind in WORST),
    ]
    timings = time_side_by_side(contenders, rounds=rounds)
    first = timings[0]
    for timing in timings:
        if timing.error:
            raise SystemExit(f"{case.name} {timing.name}: {timing.error}")
    return [
        {
            "case": case.name,
            "rows": case.rows,
            "columns": case.columns,
            "k": case.k,
            "contender": timing.name,
            "us": timing.us,
            "of_select": timing.us / first.us,
        }
        for timing in timings
    ]


def contender(name: str, scores: Tensor, k: int, **options: float) -> Contender:
    """The operator on copies of the scores, once it is known to be right."""
    want = select(scores.cpu(), k, **options)
    for mine, other in zip(select(scores, k, **options), want, strict=True):
        if not torch.equal(mine.cpu(), other):
            raise SystemExit(f"{name}: not what the reference chooses")
    return Contender(name, [lambda x=each: select(x, k, **options) for each in copies(scores)])


def copies(scores: Tensor) -> list[Tensor]:
    """The scores in so much memory that no cache holds it."""
    l2_bytes = torch.cuda.get_device_properties(scores.device).L2_cache_size
    count = copies_to_defeat_l2(scores.nbytes, l2_bytes)
    return [scores, *(scores.clone() for _ in range(count - 1))]


def rows_of(kind: str, case: Case) -> Tensor:
    """Rows that are hard for a search by digits."""
    shape = (case.rows, case.columns)
    if kind == "equal":
        return torch.full(shape, -2.5, device="cuda")
    if kind == "ascending":
        return torch.linspace(-1, 1, case.columns, device="cuda").expand(shape).contiguous()
    steps = torch.arange(case.rows * case.columns, device="cuda").view(shape)
    bits = (0x42800000 + steps * 7919 % 65_536).to(torch.int32)
    return torch.where(steps % 13 == 5, bits.view(torch.float32), torch.rand(shape, device="cuda"))


if __name__ == "__main__":
    main()

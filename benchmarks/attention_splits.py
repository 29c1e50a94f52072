"""attend_decode with other numbers of blocks a list than it plans.

    PYTHONPATH=src python benchmarks/attention_splits.py --out attention_splits.jsonl

bfloat16, 32 query heads, 8 of keys, dim 128, pages of 64; random lists of the budget, keys of two
caches in turns. A contender is a number of blocks that share a list; the planned one is marked.
Appends one JSON row a case and contender, with the bytes of keys and values that it reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from hopsparse.measure import record
from hopsparse.measure.clock import Contender, gpu, time_side_by_side
from hopsparse.ops import contiguous_pages
from hopsparse.ops.attend_decode.device import enqueue
from hopsparse.ops.attend_decode.plan import SPLITS, splits_for

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
CONTEXT = 32_768
TOKEN_BYTES = 2 * 2 * KV_HEADS * DIM


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--budget", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for name, values, largest in (
        ("batch", options.batch, 64),
        ("budget", options.budget, CONTEXT),
        ("rounds", [options.rounds], 1000),
    ):
        if min(values) < 1 or max(values) > largest:
            parser.error(f"--{name} {values}: 1 to {largest}")
    facts = record.environment(gpu())
    for batch in options.batch:
        for budget in options.budget:
            for row in measured(batch, budget, options.rounds):
                told = "refused" if row["us"] is None else f"{row['us']:9.2f} us"
                mark = " planned" if row["planned"] else ""
                print(f"{batch:>3} x {budget:<6} {row['contender']:<12} {told}{mark}")
                record.append(options.out, facts | row)


def measured(batch: int, budget: int, rounds: int) -> list[record.Row]:
    """Rows of one case."""
    planned = splits_for(
        batch * KV_HEADS, budget, torch.cuda.get_device_properties(0).multi_processor_count
    )
    calls = [launches(batch, budget) for _ in range(2)]
    contenders = [
        Contender(f"split by {count}", [each(count) for each in calls]) for count in SPLITS
    ]
    nbytes = budget * TOKEN_BYTES * batch
    return [
        {
            "batch": batch,
            "context": CONTEXT,
            "budget": budget,
            "contender": timing.name,
            "planned": count == planned,
            "error": timing.error,
            "us": None if timing.error else timing.us,
            "tbps": None if timing.error else nbytes / timing.us * 1e-6,
        }
        for timing, count in zip(time_side_by_side(contenders, rounds=rounds), SPLITS, strict=True)
    ]


def launches(batch: int, budget: int) -> Callable[[int], Callable[[], object]]:
    """attend_decode over one cache, by the number of blocks that share a list."""
    size = (batch, KV_HEADS, CONTEXT, DIM)
    keys, values = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
    cache = contiguous_pages(keys, values, lengths, PAGE)
    q = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    order = torch.rand(batch, KV_HEADS, CONTEXT // PAGE, device="cuda").argsort(-1)
    indices = order[..., : budget // PAGE].int().contiguous()
    results = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    def cut(count: int) -> Callable[[], object]:
        return lambda: enqueue(results, q, cache, (indices, None), PAGE, DIM**-0.5, count)

    return cut


if __name__ == "__main__":
    main()

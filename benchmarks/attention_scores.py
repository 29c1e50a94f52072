"""score_blocks and append_keys alone, and before select, against the bytes that they have to read.

    PYTHONPATH=src python benchmarks/attention_scores.py --out attention_scores.jsonl

bfloat16, 32 query heads, 8 of keys, dim 128, blocks of 64. Contenders of a case: score_blocks by
bound, mean and mass, by bound with products by the tensor cores and in float32, with clusters of
every size, and by bound with every choice of what is asked for ahead of the loads; append_keys of
one token a sequence;
and append, score and select in a row, also with launches that start before the kernel ahead has
ended; the same with select_blocks, which scores and chooses in one launch; and select_blocks alone
with clusters of every size; --only says which. Calls work on copies of the blocks in turns, so that
the L2 cache holds none of them. Scores and lists are checked against the reference first. Appends
one JSON row a case and contender, with the time that the bytes take at 4.35 TB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.launch import EarlyStarts
from hopsparse.measure import record
from hopsparse.measure.block_error import score_error
from hopsparse.measure.clock import Contender, copies_to_defeat_l2, gpu, time_side_by_side
from hopsparse.ops import (
    BlockBudget,
    KeyBlocks,
    append_keys,
    score_blocks,
    select,
    select_blocks,
)
from hopsparse.ops.score_blocks import choose, plan, reference
from hopsparse.ops.score_blocks.device import Wanted, enqueue
from hopsparse.ops.score_blocks.layout import by_tensor_cores
from hopsparse.ops.score_blocks.starts import Asks

HEADS, KV_HEADS, DIM, BLOCK, BUDGET = 32, 8, 128, 64, 2048
CASES = ((1, 32_768), (1, 131_072), (8, 32_768), (8, 131_072), (32, 32_768))
FLOOR_TBPS = 4.35
#: Bytes of an entry that scores of a kind read.
ENTRY_BYTES = {"bound": 4, "mean": 4, "mass": 8}

#: What may be asked of the L2 cache before it is loaded: the first pieces, and later ones.
ASKS = {
    "asks nothing": Asks(first=False, later=False),
    "asks first": Asks(first=True, later=False),
    "asks all": Asks(first=True, later=True),
}

Call = Callable[[], object]


@dataclass(frozen=True)
class Inputs:
    """What a call reads, in memory of its own."""

    q: Tensor
    blocks: KeyBlocks
    lengths: Tensor
    key: Tensor

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """Low, high and total."""
        return self.blocks.low, self.blocks.high, self.blocks.total


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", action="append", help="1x32768; repeatable; all if left out")
    parser.add_argument(
        "--only", action="append", help="part of the names of contenders; repeatable"
    )
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    named = {f"{batch}x{context}": (batch, context) for batch, context in CASES}
    if not set(options.case or named) <= named.keys():
        parser.error(f"--case {options.case}: of {', '.join(named)}")
    facts = record.environment(gpu())
    for batch, context in (named[name] for name in options.case or named):
        for row in measured(batch, context, options.rounds, options.only):
            told = "refused" if row["us"] is None else f"{row['us']:8.2f} us"
            print(
                f"{batch:>3} x {context:<8} {row['contender']:<32} {told}, "
                f"bytes {row['floor_us']:.2f}"
            )
            record.append(options.out, facts | row)


def measured(batch: int, context: int, rounds: int, only: list[str] | None) -> list[record.Row]:
    """Rows of one case, of contenders whose names have some of these parts."""
    made = inputs(batch, context)
    check(made[0])
    entries = batch * KV_HEADS * (context // BLOCK) * DIM
    contenders = [
        *((scored(kind, made), entries * ENTRY_BYTES[kind]) for kind in plan.KINDS),
        *((clustered(size, made), entries * ENTRY_BYTES["bound"]) for size in plan.CLUSTERS),
        *((asking(name, made), entries * ENTRY_BYTES["bound"]) for name in ASKS),
        *((producing(fused, made), entries * ENTRY_BYTES["bound"]) for fused in (False, True)),
        (appended(made), 0),
        *(
            (in_a_row(fused, early, made), entries * ENTRY_BYTES["bound"])
            for fused in (False, True)
            for early in (False, True)
        ),
        *((chosen(size, made), entries * ENTRY_BYTES["bound"]) for size in plan.CLUSTERS),
    ]
    contenders = [
        each for each in contenders if only is None or any(part in each[0].name for part in only)
    ]
    timings = time_side_by_side([each for each, _ in contenders], rounds=rounds)
    return [
        {
            "batch": batch,
            "context": context,
            "contender": timing.name,
            "error": timing.error,
            "us": None if timing.error else timing.us,
            "floor_us": nbytes / FLOOR_TBPS * 1e-6,
        }
        for timing, (_, nbytes) in zip(timings, contenders, strict=True)
    ]


def inputs(batch: int, context: int) -> list[Inputs]:
    """Copies that no cache holds; the last token is the one that is taken in."""
    count = context // BLOCK
    nbytes = batch * KV_HEADS * count * DIM * ENTRY_BYTES["bound"]
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    made = []
    for _ in range(copies_to_defeat_l2(nbytes, l2_bytes)):
        shape = (batch, KV_HEADS, count, DIM)
        blocks = KeyBlocks.empty(shape, block=BLOCK, dtype=torch.bfloat16, device="cuda")
        ends = torch.randn(2, *shape, dtype=torch.bfloat16, device="cuda")
        blocks.low.copy_(ends.amin(0))
        blocks.high.copy_(ends.amax(0))
        blocks.total.copy_(ends.float().mean(0) * BLOCK)
        q = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        key = torch.randn(batch, 1, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        made.append(Inputs(q, blocks, lengths, key))
    return made


def check(each: Inputs) -> None:
    """Stop where scores are further from the reference than float32 allows."""
    scale = reference.default_scale(DIM)
    found = reference.ranges(each.q, each.kept, BLOCK, each.lengths, scale)
    largest = torch.maximum(each.blocks.low.abs(), each.blocks.high.abs()).double()
    q = (each.q.double().abs() * scale).view(-1, KV_HEADS, HEADS // KV_HEADS, DIM)
    size = (q @ largest.transpose(-1, -2)).flatten(1, 2)
    for kind, wanted in (("bound", found.high), ("mean", found.mean)):
        off = score_error(size, DIM if by_tensor_cores(each.q, each.kept, kind) else 0)
        got = score_blocks(each.q, each.blocks, each.lengths, kind=kind, per_head=True)
        if not bool(((got.double() - wanted.double()).abs() <= off).all()):
            raise SystemExit(f"{kind}: not what the reference gives")
    want = select(score_blocks(each.q, each.blocks, each.lengths), BUDGET // BLOCK)
    lists = select_blocks(each.q, each.blocks, each.lengths, BUDGET // BLOCK)
    if not all(torch.equal(mine, other) for mine, other in zip(lists, want, strict=True)):
        raise SystemExit("select_blocks: not what score_blocks and select give")


def scored(kind: str, made: list[Inputs]) -> Contender:
    """One score a head of keys."""
    calls = [lambda x=each: score_blocks(x.q, x.blocks, x.lengths, kind=kind) for each in made]
    return Contender(f"score_blocks, {kind}", calls)


def clustered(size: int, made: list[Inputs]) -> Contender:
    """By bound, with clusters of a given size."""
    return bounds(f"clusters of {size}", made, size, None)


def asking(name: str, made: list[Inputs]) -> Contender:
    """By bound, with clusters as they are chosen, whether it pays or not."""
    return bounds(name, made, None, ASKS[name])


def producing(fused: bool, made: list[Inputs]) -> Contender:
    """By bound, with products in float32 or by the tensor cores."""
    return bounds("float32 products" if fused else "tensor cores", made, None, None, fused)


def bounds(
    name: str, made: list[Inputs], size: int | None, asks: Asks | None, fused: bool = False
) -> Contender:
    """By bound, with clusters, requests and products that are told."""
    wanted = Wanted("bound", reference.default_scale(DIM), False, fused)
    shape = (*made[0].blocks.low.shape[:3],)

    def call(x: Inputs) -> Call:
        scores = torch.empty(shape, device="cuda")
        return lambda: enqueue(scores, x.q, x.kept, x.lengths, BLOCK, wanted, size, asks)

    return Contender(f"score_blocks, bound, {name}", [call(each) for each in made])


def appended(made: list[Inputs]) -> Contender:
    """The last token of every sequence."""
    starts = [each.lengths - 1 for each in made]
    calls = [
        lambda x=each, start=start: append_keys(x.blocks, x.key, start)
        for each, start in zip(made, starts, strict=True)
    ]
    return Contender("append_keys", calls)


def chosen(size: int, made: list[Inputs]) -> Contender:
    """Scores by bound and the best of them in one launch, with clusters of a given size."""
    wanted = Wanted("bound", reference.default_scale(DIM), False)
    k, shape = BUDGET // BLOCK, made[0].blocks.low.shape[:2]
    choice = choose.Choice(None, [k, k, 1, 1])

    def call(x: Inputs) -> Call:
        lists = [torch.empty((*shape, *w), dtype=torch.int32, device="cuda") for w in ((k,), ())]
        asked = (x.lengths, BLOCK, wanted, choice)
        return lambda: choose.enqueue(lists, x.q, x.kept, asked, size)

    return Contender(f"select_blocks, bound, clusters of {size}", [call(each) for each in made])


def in_a_row(fused: bool, early: bool, made: list[Inputs]) -> Contender:
    """What a step does before it attends; the place of the token is known, as servers know it."""
    starts = [each.lengths - 1 for each in made]
    budget = BlockBudget(BUDGET // BLOCK, sink=1, recent=1)

    def call(x: Inputs, start: Tensor) -> Call:
        allowed = EarlyStarts()

        def run() -> object:
            append_keys(x.blocks, x.key, start)
            if fused:
                return select_blocks(x.q, x.blocks, x.lengths, budget)
            scores = score_blocks(x.q, x.blocks, x.lengths)
            return select(scores, BUDGET // BLOCK, sink=1, recent=1)

        def run_early() -> object:
            with allowed.use():
                return run()

        return run_early if early else run

    calls = [call(each, start) for each, start in zip(made, starts, strict=True)]
    name = "append, select_blocks" if fused else "append, score, select"
    return Contender(name + (", early" if early else ""), calls)


if __name__ == "__main__":
    main()

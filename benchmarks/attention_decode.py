r"""attend_decode, and the whole step, against dense attention of torch by its flash and cuDNN.

    PYTHONPATH=src python benchmarks/attention_decode.py --out attention_decode.jsonl

bfloat16, 32 query heads, 8 of keys, dim 128, pages of 64. Contenders of a case: attend_decode over
random lists of the budget; score_blocks, select and attend_decode in one graph; the same behind
append_keys of the newest token, also with kernels that start before the one ahead has ended; the
same with select_blocks, which scores and chooses in one launch, and with a select_blocks that takes
in the newest token too; both behind rope_append, which puts key and value into the cache, as a
layer of a model has it; attend_decode over all tokens; and scaled_dot_product_attention. Keys of
two caches are used in turns, so that the L2 cache holds no long one. Appends one JSON row a case
and contender, with the bytes of keys and values that it reads.

--case and --only choose what is measured, --cluster sizes of clusters of score_blocks and
select_blocks alone:

    PYTHONPATH=src python benchmarks/attention_decode.py --out rows.jsonl --case 1x131072 \
        --case 8x131072 --only select --only score --cluster 2 --cluster 4 --cluster 8
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hopsparse.launch import EarlyStarts
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, gpu, time_side_by_side
from hopsparse.ops import (
    BlockBudget,
    KeyBlocks,
    append_keys,
    attend_decode,
    contiguous_pages,
    rope_append,
    score_blocks,
    select_blocks,
)
from hopsparse.ops import select as choose
from hopsparse.ops.score_blocks import choose as choose_device
from hopsparse.ops.score_blocks import device
from hopsparse.ops.score_blocks.plan import CLUSTERS

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
CASES = ((1, 32_768), (1, 131_072), (8, 32_768), (8, 131_072), (32, 32_768))
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
TOKEN_BYTES = 2 * 2 * KV_HEADS * DIM


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--budget", type=int, default=2048, help="tokens attended")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--case", action="append", help="1x32768; repeatable; all if left out")
    parser.add_argument(
        "--only", action="append", help="part of the names of contenders; repeatable"
    )
    parser.add_argument(
        "--cluster", type=int, action="append", default=[], choices=CLUSTERS, help="repeatable"
    )
    options = parser.parse_args()
    cases = [each for each in CASES if options.case is None or told_case(each) in options.case]
    if not cases:
        parser.error(f"--case {options.case}: some of {', '.join(map(told_case, CASES))}")
    for name, least in (("rounds", 1), ("budget", PAGE)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: at least {least}")
    facts = record.environment(gpu())
    for batch, context in cases:
        for row in measured(batch, context, options):
            told = "refused" if row["us"] is None else f"{row['us']:9.2f} us"
            print(f"{batch:>3} x {context:<8} {row['contender']:<46} {told}")
            record.append(options.out, facts | row)


def told_case(case: tuple[int, int]) -> str:
    """As --case has it."""
    return f"{case[0]}x{case[1]}"


def measured(batch: int, context: int, options: argparse.Namespace) -> list[record.Row]:
    """Rows of one case."""
    budget = options.budget
    caches = [tokens(batch, context) for _ in range(2)]
    q = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    few, every = budget * TOKEN_BYTES * batch, context * TOKEN_BYTES * batch
    steps = [Step(q, *each, budget) for each in caches]
    runs = [each.contenders() | each.clusters(options.cluster) for each in steps]
    for name in BACKENDS:
        for each, cache in zip(runs, caches, strict=True):
            each[f"dense, {name}"] = dense(q, *cache, name)
    names = [
        name
        for name in runs[0]
        if options.only is None or any(part in name for part in options.only)
    ]
    timings = time_side_by_side(
        [Contender(name, [each[name] for each in runs]) for name in names], rounds=options.rounds
    )
    return [
        {
            "batch": batch,
            "context": context,
            "budget": budget,
            "contender": timing.name,
            "error": timing.error,
            "us": None if timing.error else timing.us,
            "tbps": None if timing.error else nbytes / timing.us * 1e-6,
        }
        for timing in timings
        for nbytes in (every if "all" in timing.name or "dense" in timing.name else few,)
    ]


def tokens(batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv_heads, context, dim]."""
    size = (batch, KV_HEADS, context, DIM)
    made = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    return made[0], made[1]


class Step:
    """What a step of decoding is made of, of one cache."""

    def __init__(self, q: Tensor, keys: Tensor, values: Tensor, budget: int) -> None:
        batch, context = keys.shape[0], keys.shape[2]
        self.q, self.k = q, budget // PAGE
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        self.cache = contiguous_pages(keys, values, self.lengths, PAGE)
        shape = (batch, KV_HEADS, context // PAGE, DIM)
        self.blocks = KeyBlocks.empty(shape, block=PAGE, dtype=keys.dtype, device="cuda")
        append_keys(self.blocks, keys.transpose(1, 2), torch.zeros_like(self.lengths))
        self.newest, self.start = keys[:, :, -1:].transpose(1, 2), self.lengths - 1
        self.starts_early = EarlyStarts()
        angle = torch.rand(1, 1, DIM, device="cuda") * 6
        self.turns = (angle.cos().to(keys.dtype), angle.sin().to(keys.dtype))
        self.qkv = torch.randn(batch, 1, (HEADS + 2 * KV_HEADS) * DIM, device="cuda").to(keys.dtype)
        self.room = (keys, values)

    def contenders(self) -> dict[str, Callable[[], object]]:
        """attend_decode over lists; with scores and selection; all of a step; over all tokens."""
        scores = torch.rand(self.blocks.low.shape[:3], device="cuda")
        indices, counts = choose(scores, self.k)
        budget = BlockBudget(self.k, sink=1, recent=1)

        def scored() -> tuple[Tensor, Tensor]:
            found = score_blocks(self.q, self.blocks, self.lengths)
            return choose(found, self.k, sink=1, recent=1)

        def selected() -> tuple[Tensor, Tensor]:
            return select_blocks(self.q, self.blocks, self.lengths, budget)

        def taken() -> tuple[Tensor, Tensor]:
            return select_blocks(self.q, self.blocks, self.lengths, budget, keys=self.newest)

        step, fused = "append, score, select, attend", "append, select_blocks, attend"
        whole = "append in select_blocks, attend"
        return {
            "attend_decode": lambda: self.attend(indices, counts),
            "score_blocks": lambda: score_blocks(self.q, self.blocks, self.lengths),
            "score, select": scored,
            "select_blocks": selected,
            "select_blocks with the key": taken,
            "score, select, attend": lambda: self.attend(*scored()),
            "select_blocks, attend": lambda: self.attend(*selected()),
            step: lambda: self.whole(scored),
            f"{step}, early": lambda: self.early(lambda: self.whole(scored)),
            fused: lambda: self.whole(selected),
            f"{fused}, early": lambda: self.early(lambda: self.whole(selected)),
            whole: lambda: self.attend(*taken()),
            f"{whole}, early": lambda: self.early(lambda: self.attend(*taken())),
            f"rope_append, {fused}, early": lambda: self.early(lambda: self.layer(budget)),
            f"rope_append, {whole}, early": lambda: self.early(
                lambda: self.layer(budget, self.newest)
            ),
            "attend_decode, all tokens": lambda: attend_decode(self.q, self.cache, block=PAGE),
        }

    def attend(self, indices: Tensor, counts: Tensor) -> object:
        """To blocks of a list."""
        return attend_decode(self.q, self.cache, indices, counts, block=PAGE)

    def whole(self, chosen: Callable[[], tuple[Tensor, Tensor]]) -> object:
        """With the newest token taken in."""
        append_keys(self.blocks, self.newest, self.start)
        return self.attend(*chosen())

    def layer(self, budget: BlockBudget, keys: Tensor | None = None) -> object:
        """Behind what puts the newest key and value into the cache; `keys`: in the launch."""
        q = rope_append(self.qkv, self.turns, self.room, self.lengths)[:, 0]
        if keys is None:
            append_keys(self.blocks, self.newest, self.start)
        lists = select_blocks(q, self.blocks, self.lengths, budget, keys=keys)
        return attend_decode(q, self.cache, *lists, block=PAGE)

    def early(self, step: Callable[[], object]) -> object:
        """By kernels that start before the one ahead has ended."""
        with self.starts_early.use():
            return step()

    def clusters(self, sizes: list[int]) -> dict[str, Callable[[], object]]:
        """score_blocks and select_blocks by clusters of these sizes."""
        kept = (self.blocks.low, self.blocks.high, self.blocks.total)
        scores = torch.empty(self.blocks.low.shape[:3], device="cuda")
        wanted = device.Wanted("bound", DIM**-0.5, False)
        lists = [
            torch.empty((*scores.shape[:2], *width), dtype=torch.int32, device="cuda")
            for width in ((self.k,), ())
        ]
        choice = choose_device.Choice(None, [self.k, self.k, 1, 1])
        asked = (self.lengths, PAGE, wanted, choice)
        found: dict[str, Callable[[], object]] = {}
        for size in sizes:
            found[f"score_blocks, clusters of {size}"] = partial(
                device.enqueue, scores, self.q, kept, self.lengths, PAGE, wanted, size
            )
            found[f"select_blocks, clusters of {size}"] = partial(
                choose_device.enqueue, lists, self.q, kept, asked, size
            )
        return found


def dense(q: Tensor, keys: Tensor, values: Tensor, name: str) -> Callable[[], object]:
    """Attention of torch over all tokens."""

    def run() -> object:
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

    return run


if __name__ == "__main__":
    main()

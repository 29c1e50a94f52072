"""attend_prefill against FlexAttention on the same masks, and against dense attention of torch.

    PYTHONPATH=src python benchmarks/attention_prefill.py --out attention_prefill.jsonl

bfloat16, one prompt, 32 query heads, 8 of keys, dim 128, blocks of 128 x 128, lists for heads of
keys (`--per-query-head`: for query heads). Every block of queries keeps its diagonal and random
blocks before it, a part of all that it sees. Contenders of a case: both with their lists at hand,
and both from a boolean mask of blocks on the GPU; where all is kept also attend_prefill without
lists, and scaled_dot_product_attention by cuDNN and flash. `--every-config` adds the other tiles.
Appends one JSON row a case and contender; `tflops` counts kept blocks whole, the diagonal too.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from hopsparse.measure import record
from hopsparse.measure.clock import Call, Contender, gpu, time_side_by_side
from hopsparse.measure.timing import Timing
from hopsparse.ops import PagedKV, attend_prefill, contiguous_pages
from hopsparse.ops.attend_prefill import plan
from hopsparse.ops.attend_prefill.device import enqueue

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 128
CASES = tuple((context, part) for context in (32_768, 131_072) for part in (0.1, 0.25, 1.0))
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_NO_Q_BLOCKS: dict[str, Any] = (
    {"compute_q_blocks": False}
    if "compute_q_blocks" in inspect.signature(BlockMask.from_kv_blocks).parameters
    else {}
)


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget-s", type=float, default=400.0, help="seconds for all cases")
    parser.add_argument("--only", type=int, help="one context")
    parser.add_argument("--per-query-head", action="store_true")
    parser.add_argument("--every-config", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    facts, end = record.environment(gpu()), time.monotonic() + options.budget_s
    for context, part in CASES:
        left = end - time.monotonic()
        if options.only not in (None, context):
            continue
        if left < 0:
            print(f"{context} at {part}: no time left")
            continue
        case = Case.made(context, part, HEADS if options.per_query_head else KV_HEADS)
        for row in measured(case, options.rounds, left, options.every_config):
            us = row["us"]
            told = "refused" if us is None else f"{us:11.1f} us {row['tflops']:7.1f} TFLOP/s"
            print(f"{context:<7} {part:<5} {row['contender']:<34} {told}", flush=True)
            record.append(options.out, facts | row)


@dataclass(frozen=True)
class Case:
    """One prompt and its mask.

    Attributes:
        part: Of the blocks before and on the diagonal that are kept.
        q: [1, heads, context, dim], a view of [context, heads, dim].
        keys: [1, kv_heads, context, dim].
        values: As keys.
        mask: bool [lists, q_blocks, k_blocks].
    """

    part: float
    q: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor

    @classmethod
    def made(cls, context: int, part: float, lists: int) -> Case:
        """Random numbers and a random mask, on the GPU."""
        torch.manual_seed(0)
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        q = torch.randn(context, HEADS, DIM, **kind).transpose(0, 1)[None]
        keys, values = (torch.randn(1, KV_HEADS, context, DIM, **kind) for _ in range(2))
        return cls(part, q, keys, values, random_mask(context // BLOCK, part, lists))

    @property
    def context(self) -> int:
        """Tokens of the prompt."""
        return self.q.shape[2]

    @property
    def flops(self) -> float:
        """Of kept blocks, for all query heads."""
        kept = int(self.mask.sum()) * (HEADS // self.mask.shape[0])
        return 4.0 * kept * BLOCK * BLOCK * DIM


def random_mask(blocks: int, part: float, lists: int) -> Tensor:
    """Bool [lists, blocks, blocks]: the diagonal, and random ones before it."""
    row = torch.arange(blocks, device="cuda")
    score = torch.rand(lists, blocks, blocks, device="cuda")
    score = score.masked_fill(row == row[:, None], 2.0).masked_fill(row > row[:, None], -1.0)
    wanted = ((row + 1) * part).round().clamp(min=1)
    return score.argsort(-1, descending=True).argsort(-1) < wanted[:, None]


def ordered(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of a mask that are set, first, and how many; as FlexAttention makes its own."""
    order = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return order.int(), mask.sum(-1, dtype=torch.int32)


def rows_of(
    case: Case, timings: Sequence[Timing], apart: float, passes: Mapping[str, float] | None = None
) -> list[record.Row]:
    """A row a contender; `passes` are how many forwards its work is, 1 where it says nothing."""
    works = {each.name: (passes or {}).get(each.name, 1) * case.flops for each in timings}
    return [
        {
            "context": case.context,
            "part": case.part,
            "lists": case.mask.shape[0],
            "kept_blocks": int(case.mask.sum()),
            "largest_difference_to_flex": apart,
            "contender": timing.name,
            "error": timing.error,
            "us": None if timing.error else timing.us,
            "tflops": None if timing.error else works[timing.name] / timing.us * 1e-6,
        }
        for timing in timings
    ]


def measured(case: Case, rounds: int, budget_s: float, every_config: bool) -> list[record.Row]:
    """Rows of one case."""
    ours, rival = hopsparse_calls(case, every_config), flex_calls(case)
    calls = ours | rival | (dense_calls(case) if case.part == 1 else {})
    # The copies of results are not kept: two of them are as large as the keys.
    apart = (ours["attend_prefill"]()[0] - rival["FlexAttention"]()).abs().max().item()
    contenders = [Contender(name, [call]) for name, call in calls.items()]
    timings = time_side_by_side(contenders, rounds=rounds, budget_s=budget_s)
    return rows_of(case, timings, apart)


def hopsparse_calls(case: Case, every_config: bool) -> dict[str, Call]:
    """attend_prefill over lists, from a mask, and over all tokens."""
    q = case.q[0].transpose(0, 1)
    starts = torch.tensor([0, case.context], dtype=torch.int32, device="cuda")
    cache = contiguous_pages(case.keys, case.values, starts[1:].clone(), BLOCK)
    indices, counts = (each[None] for each in ordered(case.mask))

    def whole() -> tuple[Tensor, Tensor]:
        made = ordered(case.mask)
        return run(q, starts, cache, made[0][None], made[1][None])

    calls: dict[str, Call] = {
        "attend_prefill": lambda: run(q, starts, cache, indices, counts),
        "attend_prefill, from a mask": whole,
    }
    if case.part == 1:
        calls["attend_prefill, all tokens"] = lambda: run(q, starts, cache, None, None)
    for config in plan.CANDIDATES if every_config else ():
        if config.dim == DIM and config != plan.CHOSEN[DIM]:
            calls[f"attend_prefill, {config.name}"] = with_config(
                q, starts, cache, (indices, counts), config
            )
    return calls


def run(
    q: Tensor, starts: Tensor, cache: PagedKV, indices: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """attend_prefill, as [1, heads, tokens, dim]."""
    out, lse = attend_prefill(q, starts, cache, indices, counts, block=BLOCK)
    return out.transpose(0, 1)[None], lse


def with_config(
    q: Tensor,
    starts: Tensor,
    cache: PagedKV,
    lists: tuple[Tensor | None, Tensor | None],
    config: plan.Config,
) -> Call:
    """attend_prefill by another tile."""
    results = (torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32))
    return lambda: enqueue(results, q, starts, cache, lists, BLOCK, DIM**-0.5, config)


def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What FlexAttention asks inside of the blocks on the diagonal."""
    return query >= key


def flex_calls(case: Case) -> dict[str, Call]:
    """FlexAttention with a mask of blocks at hand, and from a boolean mask."""
    compiled, q = torch.compile(flex_attention, dynamic=False), case.q.contiguous()
    diagonal = torch.eye(case.mask.shape[-1], dtype=torch.bool, device="cuda")
    partial = [each.expand(1, HEADS, *each.shape).contiguous() for each in ordered(diagonal)]
    ready = block_mask(case, diagonal, partial)

    def attend(mask: BlockMask) -> Tensor:
        found = compiled(q, case.keys, case.values, block_mask=mask, enable_gqa=True)
        assert isinstance(found, Tensor)
        return found

    return {
        "FlexAttention": lambda: attend(ready),
        "FlexAttention, from a mask": lambda: attend(block_mask(case, diagonal, partial)),
    }


def block_mask(case: Case, diagonal: Tensor, partial: list[Tensor]) -> BlockMask:
    """The mask as FlexAttention takes it: the diagonal is asked for, the rest is whole."""
    sharers = HEADS // case.mask.shape[0]
    whole = [each.repeat_interleave(sharers, 0)[None] for each in ordered(case.mask & ~diagonal)]
    return BlockMask.from_kv_blocks(
        partial[1],
        partial[0],
        whole[1],
        whole[0],
        BLOCK_SIZE=BLOCK,
        mask_mod=causal,
        seq_lengths=(case.context, case.context),
        **_NO_Q_BLOCKS,
    )


def dense_calls(case: Case) -> dict[str, Call]:
    """Attention of torch over all tokens, causally."""
    q = case.q.contiguous()

    def by(backend: SDPBackend) -> Callable[[], Tensor]:
        def run_dense() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(
                    q, case.keys, case.values, is_causal=True, enable_gqa=True
                )

        return run_dense

    return {f"dense, {name}": by(backend) for name, backend in BACKENDS.items()}


if __name__ == "__main__":
    main()

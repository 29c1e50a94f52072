"""A training step of attend_prefill against FlexAttention's on the same masks, and dense ones.

    PYTHONPATH=src python benchmarks/attention_training.py --out attention_training.jsonl

Forward and gradients of q, keys and values, by the shapes and masks of attention_prefill.py, with
lists and masks at hand; what sorts lists the other way round is timed. FlexAttention sorts its
masks before, once. Also the forwards alone, whose results are kept for a gradient; where all is
kept, scaled_dot_product_attention by cuDNN and flash. Appends one JSON row a case and contender;
`tflops` counts kept blocks whole, two products of a block forward and five back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention_prefill import (
    BACKENDS,
    BLOCK,
    HEADS,
    KV_HEADS,
    Case,
    causal,
    ordered,
    rows_of,
)
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from hopsparse.measure import record
from hopsparse.measure.clock import Call, Contender, gpu, time_side_by_side
from hopsparse.ops import attend_prefill, contiguous_pages

#: Context, and part of the blocks.
CASES = tuple((context, part) for context in (8_192, 32_768) for part in (0.1, 0.25, 1.0))
_WITH_GRADIENTS = 3.5  # of the work of a forward


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=40.0, help="seconds for all cases")
    parser.add_argument("--only", type=int, help="one context")
    parser.add_argument("--part", type=float, help="one part of the blocks")
    parser.add_argument("--per-query-head", action="store_true")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    facts, end = record.environment(gpu()), time.monotonic() + options.budget_s
    for context, part in CASES:
        left = end - time.monotonic()
        if options.only not in (None, context) or options.part not in (None, part):
            continue
        if left < 0:
            print(f"{context} at {part}: no time left")
            continue
        case = Case.made(context, part, HEADS if options.per_query_head else KV_HEADS)
        for row in measured(case, options.rounds, left):
            us = row["us"]
            told = "refused" if us is None else f"{us:11.1f} us {row['tflops']:7.1f} TFLOP/s"
            print(f"{context:<7} {part:<5} {row['contender']:<34} {told}", flush=True)
            record.append(options.out, facts | row)


def measured(case: Case, rounds: int, budget_s: float) -> list[record.Row]:
    """Rows of one case."""
    torch.manual_seed(1)
    leaves = [each.clone().requires_grad_() for each in (case.q, case.keys, case.values)]
    grad = torch.randn_like(case.q)
    attention = {"attend_prefill": ours(case), "FlexAttention": flex(case)}
    if case.part == 1:
        attention |= {f"dense, {name}": dense(name) for name in BACKENDS}
    calls: dict[str, Call] = {}
    for name, attend in attention.items():
        calls[f"{name}, step"] = step(attend, leaves, grad)
        calls[f"{name}, forward"] = lambda attend=attend: attend(*leaves)  # type: ignore[misc]
    apart = difference(calls["attend_prefill, step"](), calls["FlexAttention, step"]())
    contenders = [Contender(name, [call]) for name, call in calls.items()]
    timings = time_side_by_side(contenders, rounds=rounds, budget_s=budget_s)
    passes = {each.name: _WITH_GRADIENTS for each in timings if each.name.endswith("step")}
    return rows_of(case, timings, apart, passes)


#: Attention of q, keys and values [1, heads, tokens, dim], as one of q.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def step(attend: Attend, leaves: list[Tensor], grad: Tensor) -> Call:
    """The forward, and gradients of the leaves."""
    return lambda: torch.autograd.grad(attend(*leaves), leaves, grad)


def difference(mine: Any, other: Any) -> float:
    """The largest, of gradients of all three, as part of the largest entry of each."""
    pairs = zip(mine, other, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def ours(case: Case) -> Attend:
    """attend_prefill over lists, keys and values read where they lie."""
    starts = torch.tensor([0, case.context], dtype=torch.int32, device="cuda")
    indices, counts = (each[None] for each in ordered(case.mask))
    lengths = starts[1:].clone()

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache = contiguous_pages(keys, values, lengths, BLOCK)
        rows = q[0].transpose(0, 1)
        out, _ = attend_prefill(rows, starts, cache, indices, counts, block=BLOCK)
        return out.transpose(0, 1)[None]

    return attend


def flex(case: Case) -> Attend:
    """FlexAttention, with its mask of blocks for both directions at hand."""
    compiled = torch.compile(flex_attention, dynamic=False)
    diagonal = torch.eye(case.mask.shape[-1], dtype=torch.bool, device="cuda")
    sharers = HEADS // case.mask.shape[0]
    partial = [each.expand(1, HEADS, *each.shape).contiguous() for each in ordered(diagonal)]
    whole = [each.repeat_interleave(sharers, 0)[None] for each in ordered(case.mask & ~diagonal)]
    mask = BlockMask.from_kv_blocks(
        partial[1],
        partial[0],
        whole[1],
        whole[0],
        BLOCK_SIZE=BLOCK,
        mask_mod=causal,
        seq_lengths=(case.context, case.context),
    )

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = compiled(q, keys, values, block_mask=mask, enable_gqa=True)
        assert isinstance(found, Tensor)
        return found

    return attend


def dense(name: str) -> Attend:
    """Attention of torch over all tokens, causally."""

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

    return attend


if __name__ == "__main__":
    main()

"""attend_decode, and the whole step, against dense attention of torch by its flash and cuDNN.

    PYTHONPATH=src python benchmarks/attention_decode.py --out attention_decode.jsonl

bfloat16, 32 query heads, 8 of keys, dim 128, pages of 64. Contenders of a case: attend_decode over
random lists of the budget; score_blocks, select and attend_decode in one graph; the same behind
append_keys of the newest token, also with kernels that start before the one ahead has ended;
attend_decode over all tokens; and scaled_dot_product_attention. Keys of two caches are used in
turns, so that the L2 cache holds no long one. Appends one JSON row a case and contender, with the
bytes of keys and values that it reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hopsparse.launch import EarlyStarts
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, gpu, time_side_by_side
from hopsparse.ops import KeyBlocks, append_keys, attend_decode, contiguous_pages, score_blocks
from hopsparse.ops import select as choose

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
    options = parser.parse_args()
    for name, least in (("rounds", 1), ("budget", PAGE)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: at least {least}")
    facts = record.environment(gpu())
    for batch, context in CASES:
        for row in measured(batch, context, options.budget, options.rounds):
            told = "refused" if row["us"] is None else f"{row['us']:9.2f} us"
            print(f"{batch:>3} x {context:<8} {row['contender']:<38} {told}")
            record.append(options.out, facts | row)


def measured(batch: int, context: int, budget: int, rounds: int) -> list[record.Row]:
    """Rows of one case."""
    caches = [tokens(batch, context) for _ in range(2)]
    q = torch.randn(batch, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    few, every = budget * TOKEN_BYTES * batch, context * TOKEN_BYTES * batch
    steps = [step(q, keys, values, budget) for keys, values in caches]
    contenders = [
        *(
            (Contender(name, [each[name] for each in steps]), every if "all" in name else few)
            for name in steps[0]
        ),
        *(
            (Contender(f"dense, {name}", [dense(q, *each, name) for each in caches]), every)
            for name in BACKENDS
        ),
    ]
    timings = time_side_by_side([each for each, _ in contenders], rounds=rounds)
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
        for timing, (_, nbytes) in zip(timings, contenders, strict=True)
    ]


def tokens(batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv_heads, context, dim]."""
    size = (batch, KV_HEADS, context, DIM)
    made = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    return made[0], made[1]


def step(q: Tensor, keys: Tensor, values: Tensor, budget: int) -> dict[str, Callable[[], object]]:
    """attend_decode over lists; with scores and selection; with all of a step; over all tokens."""
    batch, context = keys.shape[0], keys.shape[2]
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    cache = contiguous_pages(keys, values, lengths, PAGE)
    shape = (batch, KV_HEADS, context // PAGE, DIM)
    blocks = KeyBlocks.empty(shape, block=PAGE, dtype=keys.dtype, device="cuda")
    append_keys(blocks, keys.transpose(1, 2), torch.zeros_like(lengths))
    scores = torch.rand(batch, KV_HEADS, context // PAGE, device="cuda")
    indices, counts = choose(scores, budget // PAGE)
    newest, start, starts_early = keys[:, :, -1:].transpose(1, 2), lengths - 1, EarlyStarts()

    def chosen() -> object:
        found = choose(score_blocks(q, blocks, lengths), budget // PAGE, sink=1, recent=1)
        return attend_decode(q, cache, *found, block=PAGE)

    def whole() -> object:
        append_keys(blocks, newest, start)
        return chosen()

    def early() -> object:
        with starts_early.use():
            return whole()

    return {
        "attend_decode": lambda: attend_decode(q, cache, indices, counts, block=PAGE),
        "score, select, attend": chosen,
        "append, score, select, attend": whole,
        "append, score, select, attend, early": early,
        "attend_decode, all tokens": lambda: attend_decode(q, cache, block=PAGE),
    }


def dense(q: Tensor, keys: Tensor, values: Tensor, name: str) -> Callable[[], object]:
    """Attention of torch over all tokens."""

    def run() -> object:
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

    return run


if __name__ == "__main__":
    main()

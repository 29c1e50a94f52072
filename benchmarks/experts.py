"""The 2:4 product of several experts in one launch, against torch's grouped and single products.

    PYTHONPATH=src:. python benchmarks/experts.py --out experts.jsonl

Weights of bfloat16, tokens dealt to experts at random. Rivals are `torch._grouped_mm` on dense
weights, one `F.linear` an expert and one `spmm_nm` an expert, with the counts on the host, which an
engine would have to wait for. Results are compared with float64 first. Experts are many enough to
leave the L2 cache. Appends one JSON row a case and contender.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hopsparse.formats import NM, NMPattern
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, gpu, time_side_by_side
from hopsparse.measure.error import product_bound
from hopsparse.ops import spmm_nm, spmm_nm_experts
from hopsparse.prune import magnitude

# Experts, and out and k of each: up projections of Mixtral-8x7B and of Qwen3-30B-A3B.
MODELS = {"mixtral-8x7b": (8, 14336, 4096), "qwen3-30b-a3b": (128, 768, 2048)}
TOKENS = (16, 128, 1024, 4096)  # dealt to all experts together


def main() -> None:
    """Measure what the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    facts = record.environment(gpu())
    known = record.done(options.out, ("model", "tokens"))
    for model, (experts, out, k) in MODELS.items():
        dense = torch.randn(experts * out, k, device="cuda").bfloat16()
        dense = magnitude(dense, NMPattern(2, 4))
        for tokens in options.tokens:
            if (model, tokens) in known:
                continue
            for row in measured(dense.view(experts, out, k), tokens, options.rounds):
                record.append(options.out, {"model": model} | row | facts)
                print(f"{model:<14} {tokens:>5} tokens {row['contender']:<24}{row['us']:9.1f} us")


def measured(dense: Tensor, tokens: int, rounds: int) -> list[record.Row]:
    """Rows of one case."""
    experts, out, k = dense.shape
    whose = torch.randint(experts, (tokens,)).sort().values
    counts = torch.bincount(whose, minlength=experts).tolist()
    offs = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    packed = NM.from_dense(dense.flatten(0, 1))
    single = [NM.from_dense(each) for each in dense]
    parts = torch.split(x, counts)
    across = dense.transpose(1, 2)

    def one_by_one(product: Callable[[int, Tensor], Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: [product(e, part) for e, part in enumerate(parts) if len(part)]

    ways: dict[str, Callable[[], Tensor | list[Tensor]]] = {
        "spmm_nm_experts": lambda: spmm_nm_experts(packed, x, offs),
        "torch._grouped_mm": lambda: torch._grouped_mm(x, across, offs=offs),
        "F.linear an expert": one_by_one(lambda e, part: F.linear(part, dense[e])),
        "spmm_nm an expert": one_by_one(lambda e, part: spmm_nm(single[e], part)),
    }
    for name, run in ways.items():
        made = run()
        check(name, made if isinstance(made, Tensor) else torch.cat(made), x, dense, whose)
    rows = []
    for timing in time_side_by_side(
        [Contender(n, [run]) for n, run in ways.items()], rounds=rounds
    ):
        if timing.error:
            raise SystemExit(f"{timing.name}: {timing.error}")
        rows.append(
            {
                "experts": experts,
                "out": out,
                "k": k,
                "tokens": tokens,
                "busy_experts": sum(count > 0 for count in counts),
                "contender": timing.name,
                "us": timing.us,
            }
        )
    return rows


def check(name: str, y: Tensor, x: Tensor, dense: Tensor, whose: Tensor) -> None:
    """Stop if a token is not what its expert makes of it."""
    for token in range(0, len(x), max(1, len(x) // 8)):
        one, w = x[token : token + 1], dense[whose[token]]
        bound = product_bound(one, w, torch.float32, y.dtype)
        if not ((y[token] - one.double() @ w.double().T).abs() <= bound).all():
            raise SystemExit(f"{name} is wrong")


if __name__ == "__main__":
    main()

"""Every tile of spmm_nm that could be meant for a problem, timed: what the cost model is fitted to.

    PYTHONPATH=src python benchmarks/candidates.py --out rows.jsonl     # on an H200
    PYTHONPATH=src python benchmarks/candidates.py --fit rows.jsonl     # anywhere

A row is one tile, or the dense product, of one problem. Weights are rotated past the L2 cache.
With --fit nothing is timed: the model of ops/spmm_nm/cost.py is held against the rows, and what its
first choice costs against the fastest tile is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from hopsparse.formats import NM
from hopsparse.measure.clock import Contender, copies_to_defeat_l2, time_side_by_side
from hopsparse.measure.contest import random_24
from hopsparse.measure.record import append, done, environment, read
from hopsparse.ops import pack_nm, spmm_nm
from hopsparse.ops.spmm_nm.cost import predicted_us, suits
from hopsparse.ops.spmm_nm.plan import CANDIDATES, Problem, candidates

LAYERS = (
    (576, 576),
    (1536, 576),
    (576, 1536),
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
    (6144, 4096),
    (12288, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (8192, 28672),
)
TOKENS = (1, 16, 32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 16384)
SMS = 132
FAR = 2.5  # times the prediction of the best: not timed


def measure(problem: Problem, rounds: int) -> list[dict[str, Any]]:
    """One row a tile, and one for cuBLAS."""
    make = torch.Generator("cuda").manual_seed(problem.out)
    stored = problem.out * problem.k * 9 // 8
    count = copies_to_defeat_l2(stored, 60 * 2**20, most=48)
    first = random_24((problem.out, problem.k), torch.bfloat16, make)
    dense = [first.clone() for _ in range(count)]
    packed = pack_nm(first)
    weights = [
        NM(packed.shape, packed.values.clone(), packed.meta.clone(), packed.pattern)
        for _ in range(count)
    ]
    x = torch.randn(problem.tokens, problem.k, device="cuda", dtype=torch.bfloat16)
    predictions = {c: predicted_us(c, problem, SMS) for c in CANDIDATES}
    least = min(predictions.values())
    near = [c for c in candidates(problem, SMS) if predictions[c] <= FAR * least]
    contenders = [Contender("cublas", [partial(F.linear, x, w) for w in dense])]
    contenders += [
        Contender(c.name, [partial(spmm_nm, w, x, config=c) for w in weights]) for c in near
    ]
    timings = time_side_by_side(contenders, rounds=rounds, min_ms=2.0, warm_s=0.02, budget_s=6.0)
    return [
        {
            "tokens": problem.tokens,
            "out": problem.out,
            "k": problem.k,
            "tile": timing.name,
            "us": round(timing.us, 3) if timing.samples_us else None,
            "error": timing.error,
        }
        for timing in timings
    ]


def run(out: Path, budget_s: float, rounds: int, only: list[int] | None) -> None:
    """Measure what the file lacks, as long as there is time."""
    end = time.monotonic() + budget_s
    known = done(out, ("tokens", "out", "k"))
    facts = environment()
    for tokens in TOKENS if only is None else only:
        for shape in LAYERS:
            if (tokens, *shape) in known or time.monotonic() > end:
                continue
            rows = measure(Problem(tokens, *shape), rounds)
            for row in rows:
                append(out, {**row, "gpu": facts["gpu"], "commit": facts["commit"]})
            best = min(rows[1:], key=lambda row: row["us"] or 1e9)
            print(
                f"{tokens:6} {shape} cublas {rows[0]['us']} {best['tile']} {best['us']}", flush=True
            )


def fit(path: Path) -> None:
    """How far off the model is, and what that costs."""
    problems: dict[Problem, dict[str, float]] = defaultdict(dict)
    for row in read(path):
        if row["us"]:
            problem = Problem(row["tokens"], row["out"], row["k"])
            problems[problem][row["tile"]] = row["us"]
    regrets, ratios, offs = [], [], []
    for problem, times in problems.items():
        tiles = {c: times[c.name] for c in CANDIDATES if c.name in times}
        suited = [c for c in tiles if suits(c, problem, SMS)]
        chosen = min(suited, key=lambda c: predicted_us(c, problem, SMS))
        best = min(tiles, key=lambda c: tiles[c])
        regrets.append(tiles[chosen] / tiles[best])
        dense = f" dense {times['cublas']:8.1f}" if "cublas" in times else ""
        if dense:
            ratios.append(times["cublas"] / tiles[chosen])
        offs += [predicted_us(c, problem, SMS) / tiles[c] for c in suited]
        print(
            f"{problem.tokens:6} {problem.out:6}x{problem.k:<6} chosen {chosen.name:28}"
            f" {tiles[chosen]:8.1f} ({predicted_us(chosen, problem, SMS):8.1f}) best {best.name:28}"
            f" {tiles[best]:8.1f} regret {regrets[-1]:.3f}{dense}"
        )
    print(
        f"{len(problems)} problems: regret geomean {statistics.geometric_mean(regrets):.4f}, worst"
        f" {max(regrets):.3f}; predicted/measured median {statistics.median(offs):.2f}, worst"
        f" {min(offs):.2f} and {max(offs):.2f}; dense/chosen geomean"
        f" {statistics.geometric_mean(ratios):.2f}, worst {min(ratios):.2f}"
    )


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="*", help="only these counts")
    options = parser.parse_args()
    if options.fit:
        fit(options.fit)
    elif options.out:
        run(options.out, options.budget_s, options.rounds, options.tokens)
    else:
        parser.error("--out FILE to measure, or --fit FILE")


if __name__ == "__main__":
    main()

"""Products with 4 bits on one side against the same 2:4 weight in 16 and 8 bits, and dense.

    PYTHONPATH=src:. python benchmarks/four_bits.py --out four_bits.jsonl
    PYTHONPATH=src:. python benchmarks/four_bits.py --out FILE --tokens 16 --only int4 bfloat16

Weights are 2:4: int4 with a scale for 128 columns by inputs of bfloat16 and of E4M3
(`spmm_nm_int4`), beside bfloat16; E4M3 by inputs of int4, as the plan has it, and widened in every
tile, beside E4M3 by E4M3, all with fast sums (`spmm_nm_scaled`). Dense is `F.linear`. `quantize`
names what users pay: rows of bfloat16 to codes (`quantize_rows`), and the product. First all of
them must give small whole numbers, whose sums are exact, bit for bit. Weights are rotated past the
L2 cache. Appends one JSON row a case and contender, and prints a table of what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hopsparse.formats import NM, NMPattern
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, copies_to_defeat_l2, gpu, time_side_by_side
from hopsparse.ops import quantize_rows, spmm_nm
from hopsparse.ops.spmm_nm.cost import Problem
from hopsparse.ops.spmm_nm.int4.op import plan_int4, spmm_nm_int4
from hopsparse.ops.spmm_nm.scaled.op import Scaling, plan_scaled, spmm_nm_scaled
from hopsparse.ops.spmm_nm.scaled.plan import choose_scaled, numbers_for
from hopsparse.prune import magnitude
from hopsparse.quant import quantize_matrix
from hopsparse.tune import machine_of

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672))
TOKENS = (1, 16, 64, 256, 1024)
FAST = Scaling(sums="fast")
E4M3 = torch.float8_e4m3fn


class Weights:
    """One weight in every form: small whole numbers, which all forms hold exactly."""

    def __init__(self, out: int, k: int) -> None:
        dense = torch.randint(-7, 8, (out, k), device="cuda").bfloat16()
        dense = magnitude(dense, NMPattern(2, 4))
        self.dense, self.sparse = dense, NM.from_dense(dense)
        ones = torch.ones(out, -(-k // 128), device="cuda")
        self.int4 = quantize_matrix(dense, "2:4+int4:128", ones)
        self.e4m3 = NM.from_dense(dense.to(E4M3))


class Inputs:
    """Tokens in every form."""

    def __init__(self, tokens: int, k: int, largest: int) -> None:
        self.bfloat16 = torch.randint(-largest, largest + 1, (tokens, k), device="cuda").bfloat16()
        self.bfloat16[:, 0] = 7  # so that the scale of a row is one
        self.e4m3 = self.bfloat16.to(E4M3)
        self.int4, scales = quantize_rows(self.bfloat16, "int4")[:2]
        assert (scales == 1).all()


def quantized(w: Weights, x: Inputs, dtype: torch.dtype | str) -> Tensor:
    """Rows to codes and scales, and the product."""
    codes, scales = quantize_rows(x.bfloat16, dtype)
    return spmm_nm_scaled(w.e4m3, codes, Scaling(x=scales, sums="fast"))


def in_the_tile(w: Weights, x: Inputs) -> Tensor:
    """The product whose blocks widen x, whatever the plan says."""
    problem = Problem(x.int4.shape[0], *w.e4m3.shape)
    numbers = numbers_for("float8_e4m3fn/int4", "fast")
    machine = machine_of(x.int4.get_device())
    config = choose_scaled(problem, numbers, machine.sm_count, machine=machine)
    return spmm_nm_scaled(w.e4m3, x.int4, FAST, config=config)


Product = Callable[[Weights, Inputs], Tensor]
WAYS: dict[str, Product] = {
    "int4 2:4 x bfloat16": lambda w, x: spmm_nm_int4(w.int4, x.bfloat16),
    "bfloat16 2:4": lambda w, x: spmm_nm(w.sparse, x.bfloat16),
    "bfloat16 dense": lambda w, x: F.linear(x.bfloat16, w.dense),
    "int4 2:4 x e4m3": lambda w, x: spmm_nm_int4(w.int4, x.e4m3),
    "e4m3 2:4 x int4": lambda w, x: spmm_nm_scaled(w.e4m3, x.int4, FAST),
    "e4m3 2:4 x int4, in the tile": in_the_tile,
    "e4m3 2:4 x e4m3": lambda w, x: spmm_nm_scaled(w.e4m3, x.e4m3, FAST),
    "quantize to int4, e4m3 2:4": lambda w, x: quantized(w, x, "int4"),
    "quantize to int4 in e4m3, e4m3 2:4": lambda w, x: quantized(w, x, "int4_in_e4m3"),
    "quantize to e4m3, e4m3 2:4": lambda w, x: quantized(w, x, E4M3),
}
PLANS: dict[str, Callable[[Weights, Inputs], str]] = {
    "int4 2:4 x bfloat16": lambda w, x: plan_int4(w.int4, x.bfloat16).why,
    "int4 2:4 x e4m3": lambda w, x: plan_int4(w.int4, x.e4m3).why,
    "e4m3 2:4 x int4": lambda w, x: plan_scaled(w.e4m3, x.int4, FAST).why,
    "e4m3 2:4 x e4m3": lambda w, x: plan_scaled(w.e4m3, x.e4m3, FAST).why,
}


def main() -> None:
    """Measure what the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--shapes", nargs="+", help="of w, as 4096x14336; all if left out")
    parser.add_argument("--only", nargs="+", help="contenders whose names have one of these words")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    ways = [way for way in WAYS if not options.only or any(word in way for word in options.only)]
    if not ways:
        parser.error(f"--only {options.only}: none of {', '.join(WAYS)}")
    shapes = [(out, k) for out, k in SHAPES if f"{out}x{k}" in (options.shapes or [f"{out}x{k}"])]
    if not shapes:
        parser.error(f"--shapes {options.shapes}: none of {SHAPES}")
    facts = record.environment(gpu())
    known = record.done(options.out, ("out", "k", "tokens", "contender"))
    table: dict[str, list[float]] = {}
    for out, k in shapes:
        missing = [n for n in options.tokens if any((out, k, n, way) not in known for way in ways)]
        if not missing:
            continue
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        weights = [Weights(out, k) for _ in range(copies_to_defeat_l2(out * k * 7 // 16, l2_bytes))]
        for tokens in missing:
            for row in measured(weights, tokens, options.rounds, ways):
                record.append(options.out, row | facts)
                table.setdefault(f"{tokens:>5} by {out} x {k}", []).append(row["us"])
    print("us of:", *(f"{i}: {way}" for i, way in enumerate(ways)), sep="\n")
    for case, times in table.items():
        print(f"{case:<24}", *(f"{us:8.1f}" for us in times))


def measured(weights: list[Weights], tokens: int, rounds: int, ways: list[str]) -> list[record.Row]:
    """Rows of one case."""
    out, k = weights[0].dense.shape
    check(weights[0], tokens, ways)
    x = Inputs(tokens, k, largest=7)
    contenders = [
        Contender(name, [lambda w=w, way=WAYS[name]: way(w, x) for w in weights])  # type: ignore[misc]
        for name in ways
    ]
    rows = []
    for timing in time_side_by_side(contenders, rounds=rounds):
        if timing.error:
            raise SystemExit(f"{timing.name}: {timing.error}")
        row: dict[str, Any] = {"out": out, "k": k, "tokens": tokens, "contender": timing.name}
        said = PLANS.get(timing.name)
        row["plan"] = None if said is None else said(weights[0], x)
        rows.append(row | {"us": timing.us, "tflops": 2e-6 * tokens * out * k / timing.us})
    return rows


def check(w: Weights, tokens: int, ways: list[str]) -> None:
    """Stop if a result is not that of float64: fast sums hold whole numbers below 2^13 exactly."""
    x = Inputs(tokens, w.dense.shape[1], largest=1)
    rows = slice(None, None, 61)
    want = (x.bfloat16.double() @ w.dense[rows].double().T).bfloat16()
    for name in ways:
        if not torch.equal(WAYS[name](w, x)[:, rows], want):
            raise SystemExit(f"{name} is wrong")


if __name__ == "__main__":
    main()

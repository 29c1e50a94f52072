"""The SwiGLU MLP block in 8 bits, ours against the best chains of peers' kernels, in CUDA graphs.

    PYTHONPATH=src python benchmarks/mlp.py --out rows.jsonl

Ours are three or four launches: rows of x to codes; gate and up with SwiGLU in one product; its
results to codes, which the product may do itself where a scale is known beforehand; down. `_gate`
leaves SwiGLU to the quantiser, as the peers must: dense 8-bit products of cuBLAS and 2:4 ones of
cuSPARSELt, each with our quantiser (which gates in the same pass) and with one that torch.compile
made. Every stage is compared with float64 before anything is timed. Weights are rotated past the L2
cache. Appends one JSON row a contender and problem, with the environment; run again, it goes on
behind what is in the file. The table comes last: the best of ours over the best rival.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mlp_chains import KINDS, Chain, Check, Weights, described, our_chains, peer_chains
from torch import Tensor

from hopsparse.errors import GpuLostError
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, copies_to_defeat_l2, gpu, ratio, time_side_by_side
from hopsparse.measure.codes import LARGEST
from hopsparse.measure.fault import named, wait_for
from hopsparse.measure.power import Sampler
from hopsparse.measure.record import Row
from hopsparse.measure.timing import Timing

#: Hidden and intermediate sizes.
MODELS = {"llama-3-8b": (4096, 14336), "qwen3-8b": (4096, 12288)}
TOKENS = (16, 256, 1024, 4096)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KINDS}
SUMS = {"int8": ("exact",), "float8_e4m3fn": ("fast", "promoted")}
OURS = "hopsparse"
PROBLEM = ("model", "tokens", "dtype")


def main() -> None:
    """Measure what the file does not have yet, then print the table of all of it."""
    options = parse()
    problems = [
        (model, tokens, dtype)
        for dtype in options.dtype
        for model in MODELS
        for tokens in TOKENS
        if all(word in (model, str(tokens), dtype) for word in options.only)
    ]
    known, facts = record.done(options.out, PROBLEM), record.environment()
    end = time.monotonic() + options.budget_s
    for problem in problems:
        if problem in known:
            continue
        if time.monotonic() > end:
            print("the time is spent: the same command goes on")
            break
        for row in measured(*problem, options.rounds):
            record.append(options.out, row | facts)
            print(line(row), flush=True)
        torch.cuda.empty_cache()
    print_table(record.read(options.out), problems)


def measured(model: str, tokens: int, dtype: str, rounds: int) -> list[Row]:
    """One row for each chain of a problem."""
    torch.compiler.reset()
    (hidden, intermediate), device = MODELS[model], gpu()
    generator = torch.Generator(device).manual_seed(0)
    first = Weights.random(hidden, intermediate, DTYPES[dtype], generator)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    count = copies_to_defeat_l2(first.stored_bytes, l2_bytes, most=8)
    copies = [first] + [
        Weights.random(hidden, intermediate, DTYPES[dtype], generator) for _ in range(count - 1)
    ]
    x = torch.randn(tokens, hidden, generator=generator, device=device).bfloat16()
    with torch.no_grad():
        step = static_step(x, first, SUMS[dtype][0])
        chains = [chains_of(each, dtype, step) for each in copies]
        checks = [Check(x, first), Check(x, copies[-1])]
        found = {}
        for number, chain in enumerate(chains[0]):
            found[chain.name] = checked([chain, chains[-1][number]], checks, x)
        good = [n for n, chain in enumerate(chains[0]) if not found[chain.name][2]]
        contenders = [
            Contender(chains[0][n].name, [partial(each[n], x) for each in chains]) for n in good
        ]
        with Sampler(device) as seen:
            timings = {each.name: each for each in time_side_by_side(contenders, rounds=rounds)}
    shared = {"model": model, "hidden": hidden, "intermediate": intermediate, "tokens": tokens}
    shared |= {"dtype": dtype, "copies": count, "watts": seen.watts, "sm_mhz": seen.sm_mhz}
    plans = {sums: described(first, tokens, sums) for sums in SUMS[dtype]}
    return [
        {
            **shared,
            "contender": chain.name,
            "plan": plans[chain.sums] if chain.folds else "",
            **row_of(chain, timings, found[chain.name], 6 * tokens * hidden * intermediate),
        }
        for chain in chains[0]
    ]


def static_step(x: Tensor, weights: Weights, sums: str) -> Tensor:
    """What a code must stand for so that the largest result of SwiGLU is the largest code."""
    one = torch.ones(1, device=x.device)
    inner = our_chains(weights, sums, one)[0].stages(x).inner
    assert inner is not None
    return inner.abs().amax().float().view(1) / LARGEST[weights.gate.codes.dtype]


def chains_of(weights: Weights, dtype: str, step: Tensor) -> list[Chain]:
    """Ours, then those of peers."""
    ours = [chain for sums in SUMS[dtype] for chain in our_chains(weights, sums, step)]
    return ours + peer_chains(weights)


def checked(
    chains: Sequence[Chain], checks: Sequence[Check], x: Tensor
) -> tuple[float | None, float | None, str]:
    """Excess over the bounds, error against float64, and why a chain is not timed, or ""."""
    try:
        with named(chains[0].name, wait_for(x.device)):
            excess = max(check.excess(chain) for chain, check in zip(chains, checks, strict=True))
            rms = checks[0].rms_error(chains[0])
    except GpuLostError:
        raise
    except Exception as error:
        return None, None, " ".join(f"{type(error).__name__}: {error}".split())
    if not excess <= 1:
        known = excess if math.isfinite(excess) else None
        return known, None, f"wrong: an error of {excess:.3g} times the bound, so it was not timed"
    return excess, rms, ""


def row_of(
    chain: Chain,
    timings: dict[str, Timing],
    found: tuple[float | None, float | None, str],
    flops: int,
) -> Row:
    """What is known of a chain, as JSON values; ratios are to the first that was timed."""
    excess, rms, error = found
    timing = timings.get(chain.name, Timing(chain.name, error=error))
    low, high = timing.quartiles_us
    known, ours = bool(timing.samples_us), next(iter(timings.values()), timing)
    to_ours = ratio(timing, ours) if known and ours.samples_us else None
    return {
        "us": timing.us if known else None,
        "q1_us": low if known else None,
        "q3_us": high if known else None,
        "tflops": flops / timing.us / 1e6 if known else None,
        "ratio": to_ours.value if to_ours else None,
        "ratio_low": to_ours.low if to_ours else None,
        "ratio_high": to_ours.high if to_ours else None,
        "excess": excess,
        "rms_error": rms,
        "samples": len(timing.samples_us),
        "calls_per_sample": timing.calls_per_sample,
        "error": error or timing.error,
    }


def line(row: Row) -> str:
    """One row for people."""
    head = f"{row['model']} {row['tokens']} {row['dtype']} {row['contender']}"
    if row["us"] is None:
        return f"{head}: {row['error']}"
    return f"{head}: {row['us']:.1f} us, {row['tflops']:.0f} TF, rms {row['rms_error']:.4f}"


def print_table(rows: Sequence[Row], problems: Sequence[tuple[str, int, str]]) -> None:
    """The best of ours, the best of ours with a static scale in between, and the best rival."""
    heads = ("model", "tokens", "dtype", "ours", "us", "static us", "rival", "us", "ratio")
    print("".join(f"{head:>20}" for head in heads))
    ratios = []
    for problem in problems:
        us = {
            row["contender"]: row["us"]
            for row in rows
            if tuple(row[each] for each in PROBLEM) == problem and row["us"]
        }
        mine = {n: t for n, t in us.items() if n.startswith(OURS) and not n.endswith("_static")}
        static = [t for n, t in us.items() if n.startswith(OURS) and n.endswith("_static")]
        theirs = {n: t for n, t in us.items() if not n.startswith(OURS)}
        if not mine or not theirs:
            continue
        best, rival = (min(each, key=lambda n: us[n]) for each in (mine, theirs))
        ratios.append(us[rival] / us[best])
        shown: list[Any] = [*problem, best, f"{us[best]:.1f}"]
        shown += [f"{min(static):.1f}" if static else "-", rival, f"{us[rival]:.1f}"]
        print("".join(f"{cell:>20}" for cell in (*shown, f"{ratios[-1]:.2f}")))
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean of rival / ours: {mean:.3f} ({len(ratios)} problems)")


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", nargs="*", default=["float8_e4m3fn"], choices=sorted(DTYPES))
    parser.add_argument("--only", nargs="*", default=[], help="model, tokens or dtype")
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--rounds", type=int, default=25)
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""How often `hopsparse bench --gate` is wrong: alarms without a change, and with one of 5 %.

    python benchmarks/gate.py --case "nm 4096x4096 256" --runs 100 -o rows.jsonl

Both builds are this one, loaded twice. `A/A` runs compare them as they are; `slower` runs let the
second one make every twentieth call twice, which takes 5 % longer. One row for each kind of run.
`--busy 4` has four processes beside it that compute, move memory and sleep in bursts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hopsparse
from hopsparse.cli.gate import BASE_NAME, Sampler
from hopsparse.cli.gate_cases import SUITES, Case, cases_of
from hopsparse.measure.gate import Limits, Verdict, decide
from hopsparse.measure.other_build import load_build
from hopsparse.measure.pairs import Call, slowed
from hopsparse.measure.record import append, environment

_FRESH = 10  # Runs after which weights are drawn and placed anew.


def case_of(name: str) -> Case:
    """The case of a name, such as `nm 4096x4096 256`; any sides will do."""
    kind, sides, *tokens = name.split()
    out, k = sides.split("x")
    return Case(kind, int(out), int(k), int(tokens[0]) if tokens else 0)


def changed(part: float, base: list[Call], new: list[Call]) -> tuple[list[Call], list[Call]]:
    """The calls of both, as many of each, and those of the second slower by a part."""
    every = 1 / part if part else 20
    plain, _ = slowed(base, 1 / every)
    same, slower = slowed(new, 1 / every)
    return plain, slower if part else same


def _neighbour(seed: int) -> None:
    """Bursts of products, of memory traffic, of Python, and of naps."""
    random = np.random.default_rng(seed)
    large, small = np.ones(8 << 20), np.ones((256, 256))
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        end, kind = time.monotonic() + random.uniform(0.01, 0.5), random.integers(4)
        while time.monotonic() < end:
            if kind == 0:
                large[:] = large * 1.0001
            elif kind == 1:
                small @ small
            elif kind == 2:
                sum(number * number for number in range(3000))
            else:
                time.sleep(random.uniform(0.0005, 0.01))


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many busy processes for as long as it lasts."""
    started = multiprocessing.get_context("spawn")
    running = [started.Process(target=_neighbour, args=(seed,)) for seed in range(count)]
    try:
        for each in running:
            each.start()
        yield
    finally:
        for each in running:
            each.kill()
            each.join()


def measured(case: Case, part: float, runs: int, limits: Limits, least: int) -> dict[str, Any]:
    """Decide so often, and count alarms."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    other = load_build(Path(hopsparse.__file__).parents[1], BASE_NAME)
    sample = Sampler(case, (other, hopsparse), device, partial(changed, part))
    found: list[tuple[Verdict, Verdict | None]] = []
    started, used = time.monotonic(), time.process_time()
    for number in range(runs):
        if number % _FRESH == 0:
            sample(0)
        found.append(decide(sample, limits, least=least))
    ratios = sorted(verdict.ratio for verdict, _ in found)
    firsts = [first or verdict for verdict, first in found]
    return {
        "case": case.name,
        "kind": "slower" if part else "A/A",
        "part": part,
        "runs": runs,
        "alarms": sum(verdict.slower for verdict, _ in found),
        "first_alarms": sum(first.slower for first in firsts),
        "least_ratio": ratios[0],
        "median_ratio": ratios[len(ratios) // 2],
        "most_ratio": ratios[-1],
        "base_us": sorted(verdict.base_us for verdict, _ in found)[len(found) // 2],
        "rounds": max(verdict.rounds for verdict, _ in found),
        "median_rounds": sorted(verdict.rounds for verdict, _ in found)[len(found) // 2],
        "limit": limits.ratio,
        "floor_us": limits.floor_us,
        "most_rounds": limits.most,
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
    }


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", action="append", help="Name of a case; repeatable.")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--part", type=float, default=0.05)
    parser.add_argument("--slower-only", action="store_true", help="No A/A runs.")
    parser.add_argument("--most", type=int, default=Limits().most, help="Rounds of a decision.")
    parser.add_argument("--least", type=int, default=25, help="Rounds of a batch.")
    parser.add_argument("--busy", type=int, default=0, help="Processes beside it.")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = Limits(floor_us=0.3 if device.type == "cuda" else 2.0, most=options.most)
    for name in options.case or [cases_of(SUITES[0], device)[0].name]:
        for part in (options.part,) if options.slower_only else (0.0, options.part):
            with neighbours(options.busy):
                row = measured(case_of(name), part, options.runs, limits, options.least)
            row["busy"] = options.busy
            if options.out is not None:
                append(options.out, row | environment())
            told = f"{row['alarms']} alarms (first: {row['first_alarms']}) in {row['runs']}"
            spread = f"{row['least_ratio']:.4f} to {row['most_ratio']:.4f}"
            print(f"{name}, {row['kind']}: {told}, ratios {spread}, {row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()

"""Every tile of spmm_nm that could be meant for a problem, timed: what the cost model is fitted to.

    PYTHONPATH=src python benchmarks/candidates.py --out rows.jsonl     # on an H200
    PYTHONPATH=src python benchmarks/candidates.py --out rows.jsonl --suite anchors \
        --dtype float8_e4m3fn --sums promoted                           # codes, every tile
    PYTHONPATH=src python benchmarks/candidates.py --fit rows.jsonl     # anywhere

A row is one tile, or the dense product, of one problem. Weights are rotated past the L2 cache. A
tile is checked first, as the tuner does it; one that is wrong has no time and says why. With --fit
nothing is timed: the model of ops/spmm_nm/cost.py is held against the rows, and what its first
choice costs against the fastest tile is printed. With --search too, constants that fit the rows
better are looked for first, from those of the model, and printed; with names, of those alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hopsparse.errors import GpuLostError
from hopsparse.measure.clock import Contender, gpu, time_side_by_side
from hopsparse.measure.coded_peers import coded_ways
from hopsparse.measure.codes import CodedWeight
from hopsparse.measure.fault import named
from hopsparse.measure.record import append, done, environment, read
from hopsparse.measure.reference import cold_copies
from hopsparse.measure.suite import read_suite
from hopsparse.ops.spmm_nm.chooser import coded_us
from hopsparse.ops.spmm_nm.cost import FITTED, Constants, predicted_us, suits
from hopsparse.ops.spmm_nm.int4.plan import KINDS as FOUR_BITS
from hopsparse.ops.spmm_nm.int4.plan import Kind as FourBits
from hopsparse.ops.spmm_nm.int4.plan import candidates_int4
from hopsparse.ops.spmm_nm.int4.tuning import Int4Layer
from hopsparse.ops.spmm_nm.kernel import Config, Numbers
from hopsparse.ops.spmm_nm.plan import CANDIDATES, Problem, candidates, eight_bit, four_bit
from hopsparse.ops.spmm_nm.scaled.plan import (
    CODES,
    SUMS,
    candidates_scaled,
    numbers_for,
    sums_of,
)
from hopsparse.ops.spmm_nm.scaled.tuning import CodesLayer, Ready
from hopsparse.ops.spmm_nm.tuning import Layer
from hopsparse.tune import Steps

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
FAR, FAR_OF_CODES = 2.5, 6.0  # times the prediction of the best: not timed
KEY = ("tokens", "out", "k", "dtype", "sums")
DENSE = "cublas"

Calls = Sequence[Callable[[], Tensor]]


@dataclass(frozen=True)
class Kind:
    """What is multiplied.

    Attributes:
        dtype: Of w and x.
        numbers: Of codes; None for 16 bits.
        four: A weight of 4 bits by group; None for another.
    """

    dtype: str
    numbers: Numbers | None = None
    four: FourBits | None = None

    @property
    def sums(self) -> str:
        """How codes are summed; "" for 16 bits."""
        return "" if self.numbers is None else sums_of(self.numbers)

    @property
    def configs(self) -> Sequence[Config]:
        """Every tile."""
        if self.numbers is None:
            return CANDIDATES
        return eight_bit(self.numbers) if self.four is None else four_bit(self.numbers)

    def predicted_us(self, config: Config, problem: Problem) -> float:
        """By the cost model."""
        if self.numbers is None:
            return predicted_us(config, problem, SMS)
        return coded_us(config, problem, self.numbers, SMS)

    def near(self, problem: Problem, far: float) -> list[Config]:
        """Tiles that suit a problem, and are predicted to take at most `far` times the best."""
        if self.numbers is None:
            suited = candidates(problem, SMS)
        elif self.four is None:
            suited = candidates_scaled(problem, self.numbers, SMS)
        else:
            suited = candidates_int4(problem, self.numbers, SMS)
        most = far * self.predicted_us(suited[0], problem)
        return [config for config in suited if self.predicted_us(config, problem) <= most]


def measure(problem: Problem, kind: Kind, rounds: int, far: float) -> list[dict[str, Any]]:
    """One row a tile, and one for cuBLAS."""
    near, device = kind.near(problem, far), gpu()
    ready: dict[str, Calls] = {}
    if kind.numbers is None:
        plain = Layer(problem, kind.dtype, device).steps()
        steps: Steps[Any, Any] = plain
        ready[DENSE] = plain.prepare(None)
    elif kind.four is not None:
        decoded = Int4Layer(problem, kind.four, device)
        steps = decoded.steps()
        ready[DENSE] = decoded_of(decoded)
    else:
        layer = CodesLayer(problem, kind.numbers, device)
        steps = layer.steps()
        ready[DENSE] = dense_of(layer)
    list(steps.compile(near))  # Side by side; one that does not compile fails where it is run.
    wrong = {DENSE: ""}
    for config in near:
        made, wrong[config.name] = tried(steps, config)
        ready[config.name] = made.timed if isinstance(made, Ready) else made
    contenders = [Contender(name, calls) for name, calls in ready.items() if not wrong[name]]
    with torch.no_grad():
        timings = time_side_by_side(
            contenders, rounds=rounds, min_ms=2.0, warm_s=0.02, budget_s=6.0
        )
    found = {timing.name: timing for timing in timings}
    return [
        {
            "tokens": problem.tokens,
            "out": problem.out,
            "k": problem.k,
            "dtype": kind.dtype,
            "sums": kind.sums,
            "tile": name,
            "us": round(found[name].us, 3) if name in found and found[name].samples_us else None,
            "error": wrong[name] or found[name].error,
        }
        for name in ready
    ]


def tried(steps: Steps[Any, Any], config: Config) -> tuple[Any, str]:
    """What runs a tile, and why it is not timed, or ""."""
    try:
        with named(config.name, steps.wait):
            made = steps.prepare(config)
            excess = steps.verify(made)
    except GpuLostError:
        raise
    except Exception as error:
        return (), " ".join(f"{type(error).__name__}: {error}".split())
    return made, "" if excess <= 1 else f"wrong: an error of {excess:.3g} times the bound"


def dense_of(layer: CodesLayer) -> Calls:
    """The dense product of the same codes, on as many copies; a user's library, so not checked."""
    way = coded_ways(layer.first.codes.dtype)[0]
    first = layer.first
    # Dense codes are twice the packed ones: fewer copies would do.
    copies = [CodedWeight(first.codes.clone(), first.scale) for _ in range(layer.copies)]
    return [partial(way.prepare(each, None), layer.input) for each in copies]


def decoded_of(layer: Int4Layer) -> Calls:
    """The dense product in 16 bits of what a weight of 4 bits stands for."""
    wide, x = layer.first.to_dense(), layer.whole.wide_x
    copies = [wide.clone() for _ in range(cold_copies(tuple(wide.shape), 16, layer.device))]
    return [partial(torch.nn.functional.linear, x, each) for each in copies]


def run(options: argparse.Namespace, kind: Kind) -> None:
    """Measure what the file lacks, as long as there is time."""
    end = time.monotonic() + options.budget_s
    known = done(options.out, KEY)
    facts = environment()
    far = (FAR_OF_CODES if kind.numbers else FAR) if options.far is None else options.far
    for problem in problems_of(options, kind):
        key = (problem.tokens, problem.out, problem.k, kind.dtype, kind.sums)
        if key in known or time.monotonic() > end:
            continue
        rows = measure(problem, kind, options.rounds, far)
        for row in rows:
            append(options.out, {**row, "gpu": facts["gpu"], "commit": facts["commit"]})
        torch.cuda.empty_cache()
        best = min(rows[1:], key=lambda row: row["us"] or math.inf)
        bad = "".join(f"; {row['tile']} {row['error']}" for row in rows if row["error"])
        shape = f"{problem.tokens:6} {problem.out}x{problem.k} {kind.dtype} {kind.sums}"
        print(
            f"{shape}: cublas {rows[0]['us']} {best['tile']} {best['us']}, of {len(rows)}{bad}",
            flush=True,
        )


def problems_of(options: argparse.Namespace, kind: Kind) -> list[Problem]:
    """Those of a suite, or all layers and token counts of this file."""
    if options.suite is None:
        found = [Problem(tokens, *shape) for tokens in TOKENS for shape in LAYERS]
    else:
        suite = read_suite(options.suite)
        found = list(dict.fromkeys(Problem(each.tokens, each.out, each.k) for each in suite))
    return [
        each
        for each in found
        if (options.tokens is None or each.tokens in options.tokens)
        and (options.layers is None or f"{each.out}x{each.k}" in options.layers)
    ]


def fit(path: Path, look: Sequence[str] | None) -> None:
    """How far off the model is, and what that costs, for each kind of product in the file."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in read(path):
        rows[row.get("dtype", "bfloat16"), row.get("sums", "")].append(row)
    kinds = {words: kind_of_words(*words) for words in rows}
    for bits in {kind.configs[0].bits for kind in kinds.values()} if look is not None else ():
        search(bits, [(k, rows[w]) for w, k in kinds.items() if k.configs[0].bits == bits], look)
    for words, found in rows.items():
        print(" ".join(words).rstrip())
        fit_kind(kinds[words], found)


def search(
    bits: int, found: Sequence[tuple[Kind, Sequence[dict[str, Any]]]], only: Sequence[str]
) -> None:
    """Change one constant after the other as long as that helps; leaves them so.

    What counts is the mean square of log(predicted / measured) of tiles within FAR of the fastest,
    and ten times the mean log of what the first choice costs against the fastest tile.
    """
    problems: dict[tuple[Kind, Problem], dict[Config, float]] = defaultdict(dict)
    for kind, rows in found:
        named = {config.name: config for config in kind.configs}
        for row in rows:
            problem, config = Problem(row["tokens"], row["out"], row["k"]), named.get(row["tile"])
            if row["us"] and config is not None and suits(config, problem, SMS):
                problems[kind, problem][config] = row["us"]

    def loss(constants: Constants) -> float:
        FITTED[bits] = constants
        off, costs = [], []
        for (kind, problem), times in problems.items():
            best = min(times.values())
            predicted = {config: kind.predicted_us(config, problem) for config in times}
            near = [config for config, us in times.items() if us <= FAR * best]
            off += [math.log(predicted[config] / times[config]) ** 2 for config in near]
            costs.append(math.log(times[min(times, key=lambda c: predicted[c])] / best))
        return statistics.fmean(off) + 10 * statistics.fmean(costs)

    facts = ("clocks_us", "least_tokens")
    names = [
        field.name
        for field in fields(Constants)
        if (field.name in only if only else field.name not in facts)
    ]
    known = FITTED[bits]
    least, step = loss(known), 0.2
    while step > 0.01:
        before = least
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                other = replace(known, **{name: getattr(known, name) * factor})
                if (now := loss(other)) < least:
                    least, known = now, other
        step = step if least < 0.999 * before else step / 2
    FITTED[bits] = known
    print(f"{bits} bits, {len(problems)} problems, loss {least:.4f}: {known}")


def fit_kind(kind: Kind, rows: Sequence[dict[str, Any]]) -> None:
    """The same for one."""
    problems: dict[Problem, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["us"]:
            problem = Problem(row["tokens"], row["out"], row["k"])
            problems[problem][row["tile"]] = row["us"]
    regrets, ratios, offs = [], [], []
    for problem, times in problems.items():
        tiles = {c: times[c.name] for c in kind.configs if c.name in times}
        suited = [c for c in tiles if suits(c, problem, SMS)]
        if not suited:
            continue
        chosen = min(suited, key=lambda c: kind.predicted_us(c, problem))
        best = min(tiles, key=lambda c: tiles[c])
        regrets.append(tiles[chosen] / tiles[best])
        dense = f" dense {times[DENSE]:8.1f}" if DENSE in times else ""
        if dense:
            ratios.append(times[DENSE] / tiles[chosen])
        offs += [kind.predicted_us(c, problem) / tiles[c] for c in suited]
        print(
            f"{problem.tokens:6} {problem.out:6}x{problem.k:<6} chosen {chosen.name:28}"
            f" {tiles[chosen]:8.1f} ({kind.predicted_us(chosen, problem):8.1f}) best {best.name:28}"
            f" {tiles[best]:8.1f} regret {regrets[-1]:.3f}{dense}"
        )
    if not regrets:
        return
    against = ""
    if ratios:
        mean, least = statistics.geometric_mean(ratios), min(ratios)
        against = f"; dense/chosen geomean {mean:.2f}, worst {least:.2f}"
    print(
        f"{len(regrets)} problems: regret geomean {statistics.geometric_mean(regrets):.4f}, worst"
        f" {max(regrets):.3f}; predicted/measured median {statistics.median(offs):.2f}, worst"
        f" {min(offs):.2f} and {max(offs):.2f}{against}"
    )


def kind_of_words(dtype: str, sums: str) -> Kind:
    """A kind by the words of a row."""
    if dtype in FOUR_BITS:
        four = FourBits.parse(dtype)
        return Kind(dtype, four.numbers, four)
    if dtype not in CODES:
        return Kind(dtype)
    how = sums if sums in SUMS else SUMS[0]
    return Kind(dtype, numbers_for(dtype, how, grouped=sums == "grouped"))


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fit", type=Path)
    parser.add_argument(
        "--search", nargs="*", metavar="NAME", help="look for better constants, or for these alone"
    )
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--suite", help="its layers and tokens, instead of those of this file")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", *CODES, *FOUR_BITS),
        help="of w and x",
    )
    parser.add_argument(
        "--sums", default=SUMS[0], choices=(*SUMS, "grouped"), help="of 8-bit floats"
    )
    parser.add_argument(
        "--far",
        type=float,
        help=f"times the best prediction: not timed; {FAR}, of codes {FAR_OF_CODES}",
    )
    parser.add_argument("--tokens", type=int, nargs="*", help="only these counts")
    parser.add_argument("--layers", nargs="*", help="only these, as 28672x4096")
    options = parser.parse_args()
    if options.fit and not options.fit.is_file():
        parser.error(f"--fit {options.fit}: no such file")
    if min(options.tokens or (1,)) < 1 or options.rounds < 1:
        parser.error("--tokens and --rounds of at least 1")
    if options.fit:
        fit(options.fit, options.search)
    elif options.out:
        run(options, kind_of_words(options.dtype, options.sums))
    else:
        parser.error("--out FILE to measure, or --fit FILE")


if __name__ == "__main__":
    main()

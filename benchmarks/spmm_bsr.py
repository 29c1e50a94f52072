"""The block-sparse product against dense and against PyTorch's own, block size by sparsity.

    PYTHONPATH=src python benchmarks/spmm_bsr.py --out rows.jsonl
    PYTHONPATH=src python benchmarks/spmm_bsr.py --out rows.jsonl --tokens 16,256 --blocks 64

Every tile that the weight may run is a contender of its own, and so is the Triton version, beside
`SparseLinear`, which runs what is predicted to be fastest, dense included. Each is checked against
float64 before it is timed. With `--two-four` the kept blocks are 2:4 inside, and Triton reads them
so as well.
Appends one JSON row a contender and problem, with what was predicted for it; run again, it goes on
behind the problems that are in the file. `tflops` counts the dense product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from rivals import torch_bsr
from torch import Tensor

from hopsparse.formats import BSR, BSR24, NMPattern
from hopsparse.measure import record
from hopsparse.measure.clock import gpu
from hopsparse.measure.contest import Layer, Way, as_rows, prepared
from hopsparse.measure.peers import CuBLAS, Product
from hopsparse.measure.record import Row
from hopsparse.measure.reference import cold_copies
from hopsparse.measure.suite import Problem
from hopsparse.nn import SparseLinear
from hopsparse.ops import spmm_bsr
from hopsparse.ops.spmm_bsr.device import target_of
from hopsparse.ops.spmm_bsr.fragments import Fragments, fragments_of, height_of
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.kernel import Config
from hopsparse.ops.spmm_bsr.ready import takes_fragments
from hopsparse.ops.spmm_bsr.schedule import Problem as Sizes
from hopsparse.ops.spmm_bsr.strips import Strips, panels_of, strips_of, width_of
from hopsparse.prune import magnitude

plan = import_module("hopsparse.ops.spmm_bsr.plan")
by_triton = import_module("hopsparse.ops.spmm_bsr.triton")
BLOCKS, SPARSITIES, TOKENS = (128, 64, 32, 16), (0.5, 0.8, 0.9), (2048,)
KEY = ("out", "k", "tokens", "dtype", "block", "sparsity", "two_four", "contender")


@dataclass(frozen=True)
class Weight:
    """A random block-sparse weight.

    Attributes:
        out: Rows.
        k: Columns.
        block: Side of a block.
        sparsity: Part of the blocks that is not kept.
        two_four: Whether those that are kept are 2:4 inside.
    """

    out: int
    k: int
    block: int
    sparsity: float
    two_four: bool

    def drawn(self, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """A dense tensor with its zeros, on the device of the generator."""
        shape = (self.out // self.block, self.k // self.block)
        where = {"generator": generator, "device": generator.device}
        kept = torch.rand(shape, **where) >= self.sparsity
        numbers = torch.randn(self.out, self.k, dtype=dtype, **where)
        tiles = numbers.view(shape[0], self.block, shape[1], self.block)
        dense = (tiles * kept[:, None, :, None]).view(self.out, self.k)
        return magnitude(dense, NMPattern(2, 4)) if self.two_four else dense

    def copies(self, dtype: torch.dtype) -> list[Tensor]:
        """As many as it takes to defeat the L2 cache with what is kept of each."""
        where = gpu(None)
        stored = 9 / 16 if self.two_four else 1
        bits = max(1, round(8 * dtype.itemsize * (1 - self.sparsity) * stored))
        generator = torch.Generator(where).manual_seed(0)
        count = cold_copies((self.out, self.k), bits, where)
        return [self.drawn(dtype, generator) for _ in range(count)]


def main() -> None:
    """Measure what the file does not have yet."""
    options = parse()
    gpu(None)
    record.check_can_append(options.out)
    facts = record.environment()
    # The first rows were written before blocks could be 2:4 inside.
    known = {tuple(row.get(key, False) for key in KEY) for row in record.read(options.out)}
    end = time.monotonic() + options.budget_s
    for block in options.blocks:
        for sparsity in options.sparsities:
            weight = Weight(*options.shape, block, sparsity, options.two_four)
            missing = [each for each in options.tokens if not is_done(weight, each, known, options)]
            for rows in measured(weight, missing, options, end):
                for row in rows:
                    record.append(options.out, row | facts)
                print(line(rows), flush=True)


def is_done(
    weight: Weight, tokens: int, known: set[tuple[object, ...]], options: argparse.Namespace
) -> bool:
    """Whether the file has the first contender of a problem."""
    head = (weight.out, weight.k, tokens, options.dtype, weight.block, weight.sparsity)
    return (*head, weight.two_four, "SparseLinear") in known


def measured(
    weight: Weight, tokens: Sequence[int], options: argparse.Namespace, end: float
) -> Iterator[list[Row]]:
    """Rows token count by token count; weights are made once for all of them."""
    if not tokens:
        return
    dtype = Problem.DTYPES[options.dtype]
    copies = weight.copies(dtype)
    made = layouts(weight, copies[0])
    layer = Layer(ways(weight), copies)
    layer.products = [prepared(way, copies) for way in layer.ways]
    for count in tokens:
        if time.monotonic() > end:
            print("the time is spent: the same command goes on")
            return
        problem = Problem("blocks", weight.out, weight.k, count, options.dtype)
        rows = as_rows(problem, layer.contest(count, rounds=options.rounds))
        yield [row | told(weight, made, problem, row["contender"]) for row in rows]
    torch.cuda.empty_cache()


def ways(weight: Weight) -> list[Way]:
    """What users get, each of our tiles, and the rivals."""
    block = weight.block
    rival = partial(torch_bsr.prepare, block=block)
    return [
        Way("SparseLinear", partial(module, block), lambda by, x: by.plan(x).describe()),
        *(
            Way(each.name, partial(by_tile, block, each), lambda by, x: "kernel")
            for each in (*tiles(block), *small_tiles(block))
        ),
        Way("triton", partial(portable, BSR, block), lambda by, x: "the portable kernel"),
        *(
            [Way("triton 2:4", partial(portable, BSR24, block), lambda by, x: "the same, 2:4")]
            if weight.two_four
            else []
        ),
        Way.of(CuBLAS),
        Way(torch_bsr.NAME, rival, torch_bsr.describe),
    ]


def tiles(block: int) -> list[Config]:
    """Those that square blocks of a side may run."""
    width = width_of((block, block))
    found: list[Config] = plan.candidates(panels_of((block, block)), width)
    return found


def small_tiles(block: int) -> list[FragmentConfig]:
    """Those of the kernel of small blocks."""
    height = height_of((block, block))
    if height is None or not takes_fragments((block, block)):
        return []
    found: list[FragmentConfig] = plan.fragment_candidates(height)
    return found


def layouts(weight: Weight, dense: Tensor) -> tuple[Strips, Fragments | None]:
    """Of both kernels; None where the second has no tile."""
    w = BSR.from_dense(dense, (weight.block, weight.block))
    return strips_of(w), fragments_of(w) if small_tiles(weight.block) else None


def module(block: int, weight: Tensor, bias: Tensor | None) -> Product:
    """`SparseLinear`, as models use it."""
    return SparseLinear(BSR.from_dense(weight, (block, block)), bias)


def by_tile(
    block: int, config: Config | FragmentConfig, weight: Tensor, bias: Tensor | None
) -> Product:
    """The operator by one tile of either kernel."""
    stored = BSR.from_dense(weight, (block, block))
    return lambda x: spmm_bsr(stored, x, bias=bias, config=config)


def portable(kind: type[BSR | BSR24], block: int, weight: Tensor, bias: Tensor | None) -> Product:
    """The Triton version of the operator; its reason is the row's error where it cannot run."""
    return partial(by_triton.run, kind.from_dense(weight, (block, block)), bias=bias)


def told(
    weight: Weight, made: tuple[Strips, Fragments | None], problem: Problem, contender: str
) -> Row:
    """What a row has beside the measurement: the weight, and what was predicted.

    What is multiplied and how much of it was stored is told of strips; fragments are all stored.
    """
    strips, fragments = made
    sizes = Sizes(problem.tokens, problem.out, problem.k)
    target = target_of(torch.cuda.current_device())
    facts = (strips.lengths, tiles(weight.block), sizes)
    timed = plan.all_predicted_us(*facts, target, fragments=fragments)
    predicted = {config.name: us for config, us in timed.items()}
    predicted["cublas"] = plan.dense_us(sizes, problem.dtype, target)
    return {
        "block": weight.block,
        "sparsity": weight.sparsity,
        "two_four": weight.two_four,
        "multiplied": strips.steps * strips.rows * 64 / (weight.out * weight.k),
        "filled": strips.filled,
        "predicted_us": predicted.get(contender),
    }


def line(rows: Sequence[Row]) -> str:
    """One problem: each contender's time and its ratio to dense, or its error."""
    first = rows[0]
    dense = next((row["us"] for row in rows if row["contender"] == "cublas"), None)
    parts = [
        f"{row['contender']} {row['us']:.1f} us"
        + (f" ({dense / row['us']:.2f} x dense)" if dense else "")
        if row["us"] is not None
        else f"{row['contender']}: {row['error']}"
        for row in rows
    ]
    head = f"{first['out']}x{first['k']} {first['tokens']} tokens"
    return f"{head}, blocks of {first['block']}, {first['sparsity']:.0%}: {'; '.join(parts)}"


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", type=sides, default=(16384, 4096), help="OUTxK")
    parser.add_argument("--tokens", type=whole, default=TOKENS)
    parser.add_argument("--blocks", type=whole, default=BLOCKS)
    parser.add_argument("--sparsities", type=parts, default=SPARSITIES)
    parser.add_argument("--dtype", choices=list(Problem.DTYPES), default="bfloat16")
    parser.add_argument("--two-four", action="store_true", help="2:4 inside the kept blocks")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--budget-s", type=float, default=400.0)
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    for block in options.blocks:
        if width_of((block, block)) is None or any(side % block for side in options.shape):
            parser.error(f"--blocks {block}: a multiple of 16 that divides both sides")
    return options


def sides(text: str) -> tuple[int, ...]:
    """OUTxK."""
    found = tuple(int(side) for side in text.split("x"))
    if len(found) != 2 or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: OUTxK, such as 16384x4096")
    return found


def whole(text: str) -> tuple[int, ...]:
    """Numbers above zero."""
    found = tuple(int(number) for number in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1")
    return found


def parts(text: str) -> tuple[float, ...]:
    """Numbers from 0 to below 1."""
    found = tuple(float(number) for number in text.split(","))
    if not all(0 <= number < 1 for number in found):
        raise argparse.ArgumentTypeError(f"{text!r}: from 0 to below 1")
    return found


if __name__ == "__main__":
    main()

"""What it costs to store blocks, or tokens, off 128-byte lines: time, and traffic by counters.

    PYTHONPATH=src python benchmarks/alignment.py --out rows.jsonl
    PYTHONPATH=src python benchmarks/alignment.py --out counters.jsonl --counters
    PYTHONPATH=src python benchmarks/alignment.py --out counters.jsonl --parse raw.csv --order FILE

The same product of spmm_bsr, by the kernels of wgmma and of mma.sync and by the Triton version,
which reads blocks as they are stored. Blocks begin 0, 16, 32 or 64 bytes behind a line of 128
bytes, or all rows of x do, by 32. A sector of L2 is 32 bytes: 32 and 64 move lines, 16 also cuts
sectors. Every variant is checked against float64 first; ratios are to the aligned one of its
kernel. A few tokens ask for little but the blocks, many for little but x.

--counters runs this script under `ncu` (--ncu PATH), one launch a variant, with caches flushed and
clocks left alone; --for-ncu FILE is that run, and writes the order of its launches. Rows then have
sectors a request of L2 and L1, bytes from memory over those that the product needs, and both over
time; a counter that this ncu does not know is null.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from counters import counted, parsed, under_ncu
from torch import Tensor

from hopsparse.formats import BSR
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, Timing, gpu, ratio, time_side_by_side
from hopsparse.measure.reference import cold_copies, first_and_last, largest_excess
from hopsparse.ops.spmm_bsr.choose import by_model
from hopsparse.ops.spmm_bsr.device import launch_for, target_of
from hopsparse.ops.spmm_bsr.fragments import fragments_of
from hopsparse.ops.spmm_bsr.fragments_device import fragment_launch_for
from hopsparse.ops.spmm_bsr.grains import counts_of, grain_of
from hopsparse.ops.spmm_bsr.launching import Epilogue
from hopsparse.ops.spmm_bsr.schedule import Problem
from hopsparse.ops.spmm_bsr.strips import strips_of

by_triton = import_module("hopsparse.ops.spmm_bsr.triton")
LINE = 128
KERNELS, OFFSETS = ("wgmma", "mma", "triton"), (0, 16, 32, 64)
KEY = ("out", "k", "tokens", "block", "kernel", "of", "offset")


@dataclass(frozen=True)
class Variant:
    """One kernel with something off its line.

    Attributes:
        kernel: One of KERNELS.
        of: What is moved: `blocks` or `x`.
        offset: Bytes behind a line.
    """

    kernel: str
    of: str
    offset: int

    @property
    def name(self) -> str:
        """As tables call it."""
        return f"{self.kernel}, {self.of} + {self.offset}"


VARIANTS = tuple(
    Variant(kernel, of, offset)
    for kernel in KERNELS
    for of, offsets in (("blocks", OFFSETS), ("x", (32,)))
    for offset in offsets
)


def moved(tensor: Tensor, offset: int) -> Tensor:
    """A copy whose rows all begin so many bytes behind a line; as contiguous as what it is of.

    Of two dimensions, rows are as long as they were, and a whole number of lines apart; of more,
    they follow each other.

    Example:
        >>> x = moved(torch.ones(3, 80, dtype=torch.bfloat16), 32)
        >>> x.data_ptr() % 128, x.stride(), bool((x == 1).all())
        (32, (128, 1), True)
    """
    size, shift = tensor.element_size(), offset // tensor.element_size()
    line = LINE // size
    rows, columns = tensor.shape if tensor.ndim == 2 else (1, tensor.numel())
    pitch = -(-columns // line) * line
    buffer = torch.zeros(rows * pitch + 2 * line, dtype=tensor.dtype, device=tensor.device)
    first = -buffer.data_ptr() % LINE // size + shift
    if tensor.ndim == 2:
        made = buffer.as_strided((rows, columns), (pitch, 1), first)
        return made.copy_(tensor)
    return buffer[first : first + columns].view(tensor.shape).copy_(tensor)


@dataclass
class Product:
    """A random block-sparse product with everything where a variant wants it.

    Attributes:
        shape: [out, k].
        block: Side of a block.
        zeros: Part of the blocks that is not kept.
        tokens: Rows of x.
        copies: Weights, as many as defeat the L2 cache.
    """

    shape: tuple[int, int]
    block: int
    zeros: float
    tokens: int
    copies: int
    dense: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        where = torch.device("cuda", torch.cuda.current_device())
        generator = torch.Generator(where).manual_seed(0)
        facts: dict[str, Any] = {"generator": generator, "device": where}
        (out, k), b = self.shape, self.block
        kept = torch.rand(out // b, k // b, **facts) >= self.zeros
        mask = kept.repeat_interleave(b, 0).repeat_interleave(b, 1)
        self.dense = [
            torch.randn(out, k, dtype=torch.bfloat16, **facts) * mask for _ in range(self.copies)
        ]
        self.weights = [BSR.from_dense(each, (b, b)) for each in self.dense]
        self.x = torch.randn(self.tokens, k, dtype=torch.bfloat16, **facts)

    @property
    def needed_bytes(self) -> int:
        """Blocks, x and y once: what no kernel can do without."""
        (out, k), stored = self.shape, self.weights[0].values.numel()
        return 2 * (stored + self.tokens * (out + k))

    def calls(self, variant: Variant) -> list[Callable[[], Tensor]]:
        """The product with each weight."""
        x = moved(self.x, variant.offset if variant.of == "x" else 0)
        offset = variant.offset if variant.of == "blocks" else 0
        if variant.kernel == "triton":
            return [by_blocks(w, x, offset) for w in self.weights]
        return [self._launch(w, x, offset, variant.kernel) for w in self.weights]

    def _launch(self, w: BSR, x: Tensor, offset: int, kernel: str) -> Callable[[], Tensor]:
        device, problem = x.get_device(), Problem(self.tokens, *self.shape)
        config = chosen(w, kernel, problem)
        y = x.new_empty(self.tokens, self.shape[0])
        facts = (x.dtype, Epilogue(x.dtype), device, config)
        if kernel == "wgmma":
            strips = strips_of(w, config.panels, config.width)
            values = moved(strips.pack(w.values), offset)
            launch = launch_for(problem, strips.lengths.numel(), *facts)
            return lambda: (launch((strips, values), x, y), y)[1]
        fragments = fragments_of(w, config.height)
        values = moved(fragments.pack(w.values), offset)
        launch = fragment_launch_for(problem, len(fragments.pairs), *facts)
        return lambda: (launch((fragments, values), x, y), y)[1]


def by_blocks(w: BSR, x: Tensor, offset: int) -> Callable[[], Tensor]:
    """The Triton version, which reads the stored blocks themselves."""
    there = BSR(w.shape, moved(w.values, offset), w.indices, w.indptr, w.block)
    return lambda: by_triton.run(there, x)


def chosen(w: BSR, kernel: str, problem: Problem) -> Any:
    """The tile of a kernel that the model chooses, in the grain of the blocks or of 16 or 32."""
    if kernel == "wgmma":
        side = min(64, w.block[0])
        grain = (128, 64) if w.block[0] == 128 else (64, side)
    else:
        grain = (16 if w.block[0] == 16 else 32, 16)
    counts, target = {grain: counts_of(w, grain)}, target_of(torch.cuda.current_device())
    found = by_model(counts, w.block, problem, "bfloat16", target).config
    assert grain_of(found) == grain
    return found


def timed(product: Product, rounds: int) -> Iterator[dict[str, Any]]:
    """Check and time all variants side by side; one row each."""
    references = first_and_last(product.x, product.dense)
    contenders, told = [], {}
    for variant in VARIANTS:
        calls = product.calls(variant)
        excess = largest_excess(lambda i, calls=calls: calls[i](), references, product.x)
        told[variant] = excess
        if excess <= 1:
            contenders.append(Contender(variant.name, calls))
    timings = {each.name: each for each in time_side_by_side(contenders, rounds=rounds, min_ms=2.0)}
    for variant in VARIANTS:
        found = timings.get(variant.name, Timing(variant.name, error="wrong: it was not timed"))
        first = timings.get(Variant(variant.kernel, "blocks", 0).name)
        known = bool(found.samples_us)
        beside = ratio(found, first) if known and first and first.samples_us else None
        yield {
            **described(product, variant),
            "us": found.us if known else None,
            "ratio": beside.value if beside else None,
            "ratio_low": beside.low if beside else None,
            "ratio_high": beside.high if beside else None,
            "useful_tb_s": product.needed_bytes / found.us / 1e6 if known else None,
            "excess": told[variant] if told[variant] < float("inf") else None,
            "error": found.error,
        }


def described(product: Product, variant: Variant) -> dict[str, Any]:
    """What a row is of."""
    out, k = product.shape
    return {
        "out": out,
        "k": k,
        "tokens": product.tokens,
        "block": product.block,
        "zeros": product.zeros,
        "needed_bytes": product.needed_bytes,
        **asdict(variant),
    }


def for_ncu(products: Iterable[Product], order: Path) -> None:
    """One launch of each variant between cudaProfilerStart and Stop; the order goes to a file."""
    rows = []
    for product in products:
        for variant in VARIANTS:
            run = product.calls(variant)[0]
            run()  # compiles and loads
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            rows.append(described(product, variant))
    order.write_text(json.dumps(rows), encoding="utf-8")


def line(row: Mapping[str, Any]) -> str:
    """A row as people read it."""
    shown = {name: row[name] for name in SHOWN if row.get(name) is not None}
    what = f"{row['tokens']} tokens, blocks of {row['block']}, {row['kernel']}"
    facts = ", ".join(f"{name} {value:.3g}" for name, value in shown.items())
    return f"{what}, {row['of']} + {row['offset']}: {facts or row.get('error', '')}"


SHOWN = (
    *("us", "ratio", "useful_tb_s", "ncu_us", "l2_sectors_a_request", "l1_sectors_a_request"),
    *("l2_sectors_over_needed", "memory_over_needed"),
)


def products(options: argparse.Namespace) -> Iterator[Product]:
    """One a token count; with counters a single weight, which caches are flushed of."""
    shape = (16384, 4096)
    for tokens in options.tokens:
        bits = max(1, round(16 * (1 - options.zeros)))
        count = 1 if options.for_ncu else cold_copies(shape, bits, gpu(None))
        yield Product(shape, options.block, options.zeros, tokens, count)


def main() -> None:
    """Time, count, or parse what was counted."""
    options = parse()
    if options.for_ncu:
        with torch.no_grad():
            for_ncu(products(options), options.for_ncu)
        return
    record.check_can_append(options.out)
    if options.counters or options.parse:
        if options.parse:
            text = options.parse.read_text(encoding="utf-8")
            order = json.loads(options.order.read_text(encoding="utf-8"))
        else:
            text, order = under_ncu(options.ncu, __file__, passed_on(options))
        launches = parsed(text)
        if len(launches) != len(order):
            raise SystemExit(f"{len(launches)} launches were counted, and {len(order)} were made")
        rows = [counted(*each) for each in zip(order, launches, strict=True)]
    else:
        with torch.no_grad():
            rows = [row for product in products(options) for row in timed(product, options.rounds)]
    facts = record.environment()
    for row in rows:
        record.append(options.out, row | facts)
        print(line(row), flush=True)


def passed_on(options: argparse.Namespace) -> list[str]:
    """The options that the run under ncu has too."""
    tokens = ",".join(map(str, options.tokens))
    return ["--tokens", tokens, "--block", str(options.block), "--zeros", str(options.zeros)]


def whole(text: str) -> list[int]:
    """Numbers above zero."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1")
    return found


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[16, 2048]
    )
    parser.add_argument("--block", type=int, default=64, choices=(16, 32, 64, 128))
    parser.add_argument("--zeros", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--counters", action="store_true", help="run under ncu, and count")
    parser.add_argument("--ncu", default="ncu", metavar="PATH")
    parser.add_argument("--for-ncu", type=Path, metavar="ORDER", help="the run that ncu profiles")
    parser.add_argument("--parse", type=Path, metavar="CSV", help="what such a run printed")
    parser.add_argument("--order", type=Path, metavar="ORDER", help="what it wrote")
    options = parser.parse_args()
    if options.out is None and options.for_ncu is None:
        parser.error("--out FILE")
    if options.parse is not None and options.order is None:
        parser.error("--parse needs --order")
    return options


if __name__ == "__main__":
    main()

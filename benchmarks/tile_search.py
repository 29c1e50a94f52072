"""Tiles searched for a pattern against one fixed tile of 16 x 16: FFN weights and GNN layers.

    PYTHONPATH=src python benchmarks/tile_search.py --predict
    PYTHONPATH=src python benchmarks/tile_search.py --out rows.jsonl
    PYTHONPATH=src python benchmarks/tile_search.py --out rows.jsonl --only gnn

Contenders, all of them spmm_bsr on the same stored blocks: `fixed` is one tile of mma.sync whose
cells are 16 x 16, whatever the pattern; `16x16` the fastest of all tiles with such cells; `model`
what the cost model chooses among the tiles of every grain, without a measurement; `search` the
fastest that `tune_weight` found. `cublas` is the dense product. Each is checked against float64
before it is timed, side by side; ratios are to `fixed`.

An FFN weight keeps a tenth of its blocks at random. A GNN layer is A @ x of an adjacency with both
directions of every edge, normalised by degree, stored in blocks of 16 x 16; x has the features of a
node in a column. Its graphs: `batch`, communities of 64 to 512 nodes (a power law, exponent 1.5)
without an edge between them, as a batch of small graphs; `community`, the same with 5 % of all
edges to popular nodes anywhere; `powerlaw`, both ends of every edge popular. --predict prints what
the model says, without a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from hopsparse.formats import BSR
from hopsparse.measure import record
from hopsparse.measure.clock import gpu
from hopsparse.measure.contest import Layer, Way, as_rows, prepared
from hopsparse.measure.peers import CuBLAS, Product
from hopsparse.measure.record import Row
from hopsparse.measure.reference import cold_copies
from hopsparse.measure.suite import Problem
from hopsparse.ops import spmm_bsr
from hopsparse.ops.spmm_bsr.choose import DENSE, TILES, Tile, versions
from hopsparse.ops.spmm_bsr.device import target_of
from hopsparse.ops.spmm_bsr.fragments_kernel import FragmentConfig
from hopsparse.ops.spmm_bsr.grains import grain_of
from hopsparse.ops.spmm_bsr.schedule import Problem as Sizes
from hopsparse.ops.spmm_bsr.tuning import Candidates, named_candidates, tune_weight
from hopsparse.plan import TARGETS, Target

plan = import_module("hopsparse.ops.spmm_bsr.plan")
KEY = ("layer", "block", "tokens", "contender")
FIXED = FragmentConfig(1, tokens=128, cluster=2)
SMALL = [tile for tile in TILES if grain_of(tile) == (16, 16)]
NODES, DEGREE = 16384, 32
GRAPHS = ("batch", "community", "powerlaw")


@dataclass(frozen=True)
class Case:
    """One pattern and the rows of x that it is multiplied by.

    Attributes:
        layer: How rows call it.
        out: Rows.
        k: Columns.
        block: Side of the blocks that are stored.
        tokens: Rows of x.
        places: Draws rows and columns, in blocks, of those that are kept.
    """

    layer: str
    out: int
    k: int
    block: int
    tokens: int
    places: Callable[[Case], Tensor]

    def kept(self) -> Tensor:
        """Which blocks are kept, [block rows, block columns], on the CPU."""
        return self.places(self)


def random_blocks(case: Case) -> Tensor:
    """A tenth of all blocks."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.out // case.block, case.k // case.block)
    return torch.rand(shape, generator=generator) >= 0.9


def graph(name: str) -> Callable[[Case], Tensor]:
    """Blocks of an adjacency that hold an edge."""

    def places(case: Case) -> Tensor:
        row, column = edges(name, case.out)
        kept = torch.zeros(case.out // case.block, case.k // case.block, dtype=torch.bool)
        kept[row // case.block, column // case.block] = True
        return kept

    return places


def edges(name: str, nodes: int) -> tuple[Tensor, Tensor]:
    """Both directions of DEGREE edges a node; some of them more than once."""
    generator = torch.Generator().manual_seed(0)
    count = nodes * DEGREE

    def popular() -> Tensor:
        drawn = (nodes * torch.rand(count, generator=generator) ** 3).long()
        return drawn.clamp_max(nodes - 1)

    if name == "powerlaw":
        one, other = popular(), popular()
        return torch.cat([one, other]), torch.cat([other, one])
    sizes = communities(nodes, generator)
    first = sizes.cumsum(0) - sizes
    of_node = torch.repeat_interleave(sizes)
    one = torch.arange(nodes).repeat_interleave(DEGREE)
    mine = of_node[one]
    near = first[mine] + (torch.rand(count, generator=generator) * sizes[mine]).long()
    away = torch.rand(count, generator=generator) < {"batch": 0.0, "community": 0.05}[name]
    other = torch.where(away, popular(), near)
    return torch.cat([one, other]), torch.cat([other, one])


def communities(nodes: int, generator: torch.Generator) -> Tensor:
    """Sizes from 64 to 512 by a power law of exponent 1.5; the last one is what is left."""
    drawn = torch.rand(nodes // 64, generator=generator)
    least, most = 64**-0.5, 512**-0.5
    sizes = (least + drawn * (most - least)) ** -2
    ends = sizes.long().cumsum(0).clamp_max(nodes)
    sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64))
    return sizes[sizes > 0]


def cases() -> list[Case]:
    """All, those that are asked about most first."""
    weights = {
        (out, block, tokens): Case(f"ffn {out}x{k}", out, k, block, tokens, random_blocks)
        for out, k in ((4096, 14336), (14336, 4096))
        for block in (64, 128, 32)
        for tokens in (2048, 256)
    }
    graphs = [
        Case(f"gnn {name}", NODES, NODES, 16, features, graph(name))
        for name in GRAPHS
        for features in (64, 256)
    ]
    first = [weights.pop((4096, block, 2048)) for block in (64, 128)]
    return [*first, *graphs, *weights.values()]


def stored(case: Case, kept: Tensor) -> BSR:
    """The pattern, whose values nobody asks for."""
    row, column = kept.nonzero().unbind(1)
    counts = torch.bincount(row, minlength=len(kept))
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    values = torch.zeros(1, dtype=torch.bfloat16).expand(len(column), case.block, case.block)
    return BSR((case.out, case.k), values, column.int(), indptr, (case.block, case.block))


def drawn(case: Case, kept: Tensor) -> list[Tensor]:
    """Dense weights of one pattern, as many as it takes to defeat the L2 cache with what is kept.

    Entries of a graph's adjacency that are no edges are zeros inside kept blocks.
    """
    where = gpu(None)
    count = cold_copies((int(kept.sum()), case.block**2), 16, where)
    generator = torch.Generator(where).manual_seed(0)
    if case.layer.startswith("gnn"):
        adjacency = normalised(case, where)
        signs = [1 if i < count - 1 else -1 for i in range(count)]
        return [adjacency * sign for sign in signs]
    mask = kept.to(where).repeat_interleave(case.block, 0).repeat_interleave(case.block, 1)
    facts = {"generator": generator, "device": where, "dtype": torch.bfloat16}
    return [torch.randn(case.out, case.k, **facts) * mask for _ in range(count)]


def normalised(case: Case, where: torch.device) -> Tensor:
    """D^-1/2 A D^-1/2, [nodes, nodes] in bfloat16."""
    row, column = (end.to(where) for end in edges(case.layer.split()[1], case.out))
    adjacency = torch.zeros(case.out, case.k, dtype=torch.bfloat16, device=where)
    adjacency[row, column] = 1
    scale = adjacency.sum(1, dtype=torch.float32).clamp_min(1).rsqrt()
    return (adjacency * scale[:, None] * scale[None, :]).bfloat16()


def ways(case: Case, tiles: dict[str, Tile]) -> list[Way]:
    """The tiles by what they are, and the dense product."""
    made: dict[int, BSR] = {}

    def blocks(weight: Tensor) -> BSR:
        # Once for all contenders, which lay it out for themselves.
        if (known := made.get(weight.data_ptr())) is None:
            known = made[weight.data_ptr()] = BSR.from_dense(weight, (case.block, case.block))
        return known

    def by_tile(tile: Tile) -> Callable[[Tensor, Tensor | None], Product]:
        def prepare(weight: Tensor, bias: Tensor | None) -> Product:
            w = blocks(weight)
            return lambda x: spmm_bsr(w, x, bias=bias, config=tile)

        return prepare

    def told(tile: Tile) -> Callable[[object, object], str]:
        return lambda *_: f"tile {tile.name}"

    found = [Way(name, by_tile(tile), told(tile)) for name, tile in tiles.items()]
    return [*found, Way.of(CuBLAS)]


def measured(case: Case, options: argparse.Namespace) -> list[Row]:
    """Search, then time what it found beside the rest."""
    kept = case.kept()
    copies = drawn(case, kept)
    w = BSR.from_dense(copies[0], (case.block, case.block))
    sizes = Sizes(case.tokens, case.out, case.k)
    found = named_candidates(w, sizes, here(), few=options.few, also=SMALL)
    started = time.monotonic()
    budget = {"few": options.few, "budget_s": options.search_s}
    ranking = tune_weight(w, case.tokens, also=SMALL, **budget)
    seconds = time.monotonic() - started
    known = versions("bfloat16")
    order = [known[name] for name in ranking.order if name != DENSE]
    tiles = {
        "fixed": FIXED,
        "16x16": next((tile for tile in order if tile in SMALL), FIXED),
        "model": found.choice,
        "search": order[0],
    }
    layer = Layer(ways(case, tiles), copies)
    layer.products = [prepared(way, copies) for way in layer.ways]
    problem = Problem(case.layer, case.out, case.k, case.tokens)
    contest = layer.contest(case.tokens, rounds=options.rounds, min_ms=2.0)
    facts = {
        "block": case.block,
        "kept": float(kept.float().mean()),
        "searched": len(ranking.timed),
        "search_s": round(seconds, 2),
        "failed": dict(ranking.failed),
    }
    rows = as_rows(problem, contest)
    for row in rows:
        tile = tiles.get(row["contender"])
        row |= facts | {
            "tile": None if tile is None else tile.name,
            "predicted_us": predicted(found, tile),
        }
    return rows


def predicted(found: Candidates, tile: Tile | None) -> float | None:
    """What the model says of a tile that was a candidate."""
    names = {each: name for name, each in found.by_name.items()}
    return None if tile is None or tile not in names else found.predicted_us[names[tile]]


def here() -> Target:
    """The GPU of the run."""
    return target_of(torch.cuda.current_device())


def by_model(case: Case) -> str:
    """A line of what is predicted on an H200."""
    w, sizes = stored(case, case.kept()), Sizes(case.tokens, case.out, case.k)
    found = named_candidates(w, sizes, TARGETS["h200"], also=SMALL)
    us = {tile.name: predicted(found, tile) or 0.0 for tile in (FIXED, found.choice)}
    small = min(predicted(found, tile) or 0.0 for tile in SMALL)
    fixed, chosen = us[FIXED.name], us[found.choice.name]
    dense = plan.dense_us(sizes, "bfloat16", TARGETS["h200"])
    return (
        f"{head(case)}: fixed {fixed:.1f} us, 16x16 {small:.1f}, {found.choice.name} {chosen:.1f} "
        f"({fixed / chosen:.2f} x fixed), dense {dense:.1f}"
    )


def head(case: Case) -> str:
    """What a line is about."""
    return f"{case.layer}, blocks of {case.block}, {case.tokens} tokens"


def line(case: Case, rows: Sequence[Row]) -> str:
    """One case: each contender's time and how many times faster than the fixed tile it is."""
    parts = [
        f"{row['contender']} {row['us']:.1f} us"
        + (f" ({1 / row['ratio']:.2f} x, {row['tile']})" if row["ratio"] and row["tile"] else "")
        if row["us"] is not None
        else f"{row['contender']}: {row['error']}"
        for row in rows
    ]
    return f"{head(case)}: {'; '.join(parts)}"


def table(found: Sequence[tuple[Case, Sequence[Row]]]) -> Iterator[str]:
    """All cases, in us, and the ratio of the search to the fixed tile."""
    yield "| layer | block | tokens | fixed | 16x16 | model | search | x fixed | cublas | tile |"
    for case, rows in found:
        by_name = {row["contender"]: row for row in rows}
        times = [by_name[name]["us"] for name in ("fixed", "16x16", "model", "search", "cublas")]
        told = ["-" if us is None else f"{us:.1f}" for us in times]
        ratio = by_name["search"]["ratio"]
        told.insert(4, f"{1 / ratio:.2f}" if ratio else "-")
        cells = [case.layer, str(case.block), str(case.tokens), *told, by_name["search"]["tile"]]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure what the file does not have yet."""
    options = parse()
    wanted = [case for case in cases() if all(word in head(case) for word in options.only)]
    if options.predict:
        for case in wanted:
            print(by_model(case), flush=True)
        return
    gpu(None)
    record.check_can_append(options.out)
    facts, known = record.environment(), record.done(options.out, KEY)
    end, found = time.monotonic() + options.budget_s, []
    for case in wanted:
        if (case.layer, case.block, case.tokens, "fixed") in known:
            continue
        if time.monotonic() > end:
            print("the time is spent: the same command goes on")
            break
        rows = measured(case, options)
        for row in rows:
            record.append(options.out, row | facts)
        found.append((case, rows))
        print(line(case, rows), flush=True)
        torch.cuda.empty_cache()
    print("\n".join(table(found)))


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--predict", action="store_true", help="no GPU: what the model says")
    parser.add_argument("--only", nargs="*", default=[], help="words that a case has, such as gnn")
    parser.add_argument("--few", type=int, default=6, help="tiles that a search times")
    parser.add_argument("--search-s", type=float, default=8.0, help="seconds of a search, at most")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=60.0)
    options = parser.parse_args()
    if options.out is None and not options.predict:
        parser.error("--out FILE, or --predict")
    if min(options.rounds, options.few) < 1:
        parser.error("--rounds and --few: at least 1")
    return options


if __name__ == "__main__":
    main()

"""Layers of Llama-3-8B on one GPU and shared by two: peers' memory read by kernels, or NCCL.

    PYTHONPATH=src python benchmarks/tensor_parallel.py --out rows.jsonl    # two H100 or H200
    PYTHONPATH=src python benchmarks/tensor_parallel.py --shapes mlp --tokens 16,4096

A shape is a chain of products that ends with a sum of all ranks: `mlp` (gate and up with SwiGLU in
one product, down), `attention` (q, k and v in one, o of q's columns), `down` and `o` alone, and
`sum`, the sum alone of [tokens, 4096]. Copies of a layer with weights of their own follow one
another, so that no cache holds them, in one CUDA graph whose kernels start early; a row has the
time of one layer. Ranks start together; the time is that of the slower one. Before it is timed the
result of both GPUs is compared: with each other bit by bit, with one GPU's in float64.

Appends one JSON row a way, with the environment.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.formats import NM, bounds_of, columns_of, rows_of, stack_rows
from hopsparse.launch import Graph, capture
from hopsparse.measure import record
from hopsparse.nn import SparseLinear
from hopsparse.ops import interleave_gate_up, pack_nm
from hopsparse.parallel import Peers, RowParallelSparseLinear

HIDDEN, INTERMEDIATE, KV = 4096, 14336, 1024
SHAPES = ("mlp", "attention", "down", "o", "sum")
_BYTES_AT_LEAST = 256 << 20  # of weights in a chain: five times the L2 cache
_CAPACITY_BYTES = 48 << 20
_LEAST_MS, _ROUNDS = 3.0, 7
_PATIENCE_S = 20.0

Layer = Callable[[Tensor], Tensor]
Ways = Iterator[tuple[str, int, list[Layer]]]  # name, GPUs, copies of the layer


def main() -> None:
    """Start two ranks; the first one prints and appends."""
    options = parse()
    if torch.cuda.device_count() < 2:
        raise SystemExit("two GPUs are needed: H100 or H200")
    # Multicast is set up on few machines, and is never used here.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(on_rank, args=(options, f"{folder}/store"), nprocs=2)


def parse() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tensor_parallel.jsonl"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="16,64,256,4096")
    parser.add_argument("--in-turn", action="store_true", help="no kernel starts early")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    options.tokens = [int(each) for each in options.tokens.split(",")]
    for shape in options.shapes:
        if shape not in SHAPES:
            parser.error(f"--shapes {shape!r}: one of {', '.join(SHAPES)}")
    if min(options.tokens) < 1:
        parser.error(f"--tokens {min(options.tokens)}: at least 1")
    return options


def on_rank(rank: int, options: argparse.Namespace, store: str) -> None:
    """One rank measures its part of everything."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    both = {
        "nccl": Peers(peer_reads=False),
        "peers": Peers(capacity_bytes=_CAPACITY_BYTES, patience_s=_PATIENCE_S),
    }
    if rank == 0:
        print("; ".join(each.describe() for each in both.values()), flush=True)
    facts = record.environment()
    rows = []
    with torch.no_grad():
        for shape in options.shapes:
            ways = list(ways_of(shape, rank, both))
            for tokens in options.tokens:
                for row in raced(shape, tokens, rank, ways, early=not options.in_turn):
                    row |= {"peers": both["peers"].reason or "symmetric memory"}
                    rows.append(row)
                    if rank == 0:
                        record.append(options.out, row | facts)
            del ways
            torch.cuda.empty_cache()
    if rank == 0:
        table(rows)
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


# ---- layers --------------------------------------------------------------------------------


def packed(out: int, k: int, seed: int) -> NM:
    """The same random 2:4 weight on every rank; what it gives is as large as what it gets."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dense = torch.randn(out, k, device="cuda", generator=generator) * (1.2 / k) ** 0.5
    return pack_nm(dense.bfloat16(), select="magnitude")


def ways_of(shape: str, rank: int, both: dict[str, Peers]) -> Ways:
    """Each way to run a shape, with as many copies as no cache holds."""
    if shape == "sum":
        for name, peers in both.items():
            yield name, 2, [partial(sum_alone, peers)] * 8
        return
    entries = {"mlp": 3 * INTERMEDIATE, "down": INTERMEDIATE, "o": HIDDEN}
    stored = entries.get(shape, 2 * HIDDEN + 2 * KV) * HIDDEN * 2 * 9 // 16
    # Half of the weights are on each of two GPUs: twice as many copies there.
    copies = max(2, -(-_BYTES_AT_LEAST // stored))
    whole = [weights_of(shape, number) for number in range(copies)]
    yield "dense", 1, [dense_layer(shape, each) for each in whole[: max(2, copies // 2)]]
    yield "2:4", 1, [one_gpu(shape, each) for each in whole]
    del whole
    shared = [weights_of(shape, number, rank) for number in range(2 * copies)]
    for name, peers in both.items():
        yield name, 2, [two_gpus(shape, each, rank, peers) for each in shared]


def weights_of(shape: str, number: int, rank: int | None = None) -> list[NM]:
    """The weights of one copy of a layer, or a rank's part of them."""
    seed = 10 * number

    def part_of(w: NM, *, rows: bool, whole: int = 64) -> NM:
        if rank is None:
            return w
        start, stop = bounds_of(w.shape[0 if rows else 1], 2, whole)[rank : rank + 2]
        return (rows_of if rows else columns_of)(w, start, stop)

    if shape == "mlp":
        joined = packed(2 * INTERMEDIATE, HIDDEN, seed)
        down = packed(HIDDEN, INTERMEDIATE, seed + 1)
        return [part_of(joined, rows=True, whole=128), part_of(down, rows=False)]
    if shape == "attention":
        rows = [packed(out, HIDDEN, seed + place) for place, out in enumerate((HIDDEN, KV, KV))]
        joined = stack_rows([part_of(each, rows=True) for each in rows])
        return [joined, part_of(packed(HIDDEN, HIDDEN, seed + 3), rows=False)]
    k = INTERMEDIATE if shape == "down" else HIDDEN
    return [part_of(packed(HIDDEN, k, seed), rows=False)]


def first_of(shape: str, weights: list[NM]) -> Layer | None:
    """The product ahead of the sum; its rows of gate and up are interleaved already."""
    if len(weights) == 1:
        return None
    layer = SparseLinear(weights[0])
    if shape == "mlp":
        layer.act = "swiglu"
        return layer
    width = weights[1].shape[1]
    return lambda x: layer(x)[:, :width]


def given_to(x: Tensor, k: int) -> Tensor:
    """What a product alone gets of [tokens, 4096]: as many columns as it has."""
    return x[:, :k] if k <= x.shape[1] else x.repeat(1, -(-k // x.shape[1]))[:, :k]


def one_gpu(shape: str, weights: list[NM]) -> Layer:
    """All of it here, 2:4."""
    first, last = first_of(shape, weights), SparseLinear(weights[-1])
    if first is None:
        return last
    return lambda x: last(first(x))


def dense_layer(shape: str, weights: list[NM]) -> Layer:
    """All of it here, dense, by PyTorch."""
    dense = [each.to_dense() for each in weights]
    if len(dense) == 1:
        return lambda x: F.linear(x, dense[0])
    if shape == "attention":
        return lambda x: F.linear(F.linear(x, dense[0])[:, :HIDDEN], dense[1])
    # Rows of gate, then of up: as dense models have them.
    inside = dense[0].view(-1, 2, 8, HIDDEN)
    joined = torch.cat([inside[:, 0].flatten(0, 1), inside[:, 1].flatten(0, 1)])
    assert torch.equal(interleave_gate_up(*joined.chunk(2)), dense[0])

    def mlp(x: Tensor) -> Tensor:
        gate, up = F.linear(x, joined).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, dense[1])

    return mlp


def two_gpus(shape: str, weights: list[NM], rank: int, peers: Peers) -> Layer:
    """A rank's part, and the sum of both."""
    k = weights[-1].shape[1]
    bounds = (0, k, 2 * k)
    last: nn.Module = RowParallelSparseLinear(SparseLinear(weights[-1]), peers, bounds)
    first = first_of(shape, weights)
    if first is None:
        return last
    return lambda x: last(first(x))


def sum_alone(peers: Peers, x: Tensor) -> Tensor:
    """X of both ranks."""
    return peers.sum_of(lambda part: part.copy_(x), torch.empty_like(x), x.dtype)


# ---- measuring -----------------------------------------------------------------------------


def raced(
    shape: str,
    tokens: int,
    rank: int,
    ways: list[tuple[str, int, list[Layer]]],
    *,
    early: bool,
) -> Iterator[dict[str, Any]]:
    """A row for each way; every rank goes through all of them."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    k = {"down": INTERMEDIATE, "o": HIDDEN}.get(shape)
    found: dict[str, Tensor] = {}
    for name, gpus, layers in ways:
        given = x
        if k is not None:
            given = given_to(x, k)
            if gpus == 2:
                start, stop = bounds_of(k, 2, 64)[rank : rank + 2]
                given = given[:, start:stop]
            given = given.contiguous()
        found[name] = layers[0](given) if gpus == 2 or rank == 0 else x
        row = {
            "suite": "tensor_parallel",
            "shape": shape,
            "tokens": tokens,
            "way": name,
            "gpus": gpus,
            "copies": len(layers),
        }
        if gpus == 2:
            row |= compared(found[name], found.get("2:4"), rank)
        run = partial(chain, layers, given, k is None)
        graph = capture(run, early=early) if gpus == 2 or rank == 0 else None
        yield row | timed(graph, len(layers))


def chain(layers: list[Layer], x: Tensor, follow: bool) -> Tensor:
    """One copy after the other, each with what the one before it gave, where sizes allow that."""
    y = x
    for layer in layers:
        y = layer(y if follow else x)
    return y


def compared(y: Tensor, one: Tensor | None, rank: int) -> dict[str, Any]:
    """Whether both ranks have the same bits, and how far off they are from one GPU."""
    both = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(both, y)
    same = bool(torch.equal(both[0].view(torch.int16), both[1].view(torch.int16)))
    assert same, "the ranks have other results"
    if rank or one is None:
        return {"same_on_ranks": same}
    off = float((y.double() - one.double()).abs().max() / one.double().abs().max())
    # Each of two parts is rounded to 8 bits, and their sum.
    assert off < 2**-6, f"off by {off} of the largest"
    return {"same_on_ranks": same, "off": off}


def timed(graph: Graph[Tensor] | None, layers: int) -> dict[str, Any]:
    """Microseconds of a layer: the median of some rounds, each that of the slower rank."""
    times = torch.zeros(_ROUNDS + 1, device="cuda", dtype=torch.float64)
    replays = 2
    for number in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        if graph is not None:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()  # ranks meet in it, so that none waits for the other's start
            start.record()
            for _ in range(replays):
                graph.replay()
            stop.record()
            stop.synchronize()
            times[number] = start.elapsed_time(stop) / replays
        slower = times[number : number + 1]
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        if number == 0:  # says how many replays a round is long enough with
            replays = min(100, max(2, int(_LEAST_MS / float(slower)) + 1))
    of_layer = [1e3 * each / layers for each in times[1:].tolist()]
    return {
        "us": statistics.median(of_layer),
        "us_least": min(of_layer),
        "us_most": max(of_layer),
        "early": graph.early if graph is not None else 0,
        "replays": replays,
    }


def table(rows: list[dict[str, Any]]) -> None:
    """Times of a layer, and what two GPUs gain."""
    ways = ("dense", "2:4", "nccl", "peers")
    titles = " ".join(f"{each:>9}" for each in ("dense", "2:4", "2 x nccl", "2 x peers"))
    print(f"{'shape':10} tokens {titles}  2:4/peers  nccl/peers")
    for shape, tokens in dict.fromkeys((row["shape"], row["tokens"]) for row in rows):
        us = {r["way"]: r["us"] for r in rows if (r["shape"], r["tokens"]) == (shape, tokens)}
        cells = " ".join(f"{us[way]:9.2f}" if way in us else " " * 9 for way in ways)
        gain = f"{us['2:4'] / us['peers']:9.2f}x" if "2:4" in us else " " * 10
        print(f"{shape:10} {tokens:6} {cells} {gain} {us['nccl'] / us['peers']:10.2f}x")


if __name__ == "__main__":
    main()

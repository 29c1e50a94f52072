"""A chain of small layers, each with an activation, where launches cost as much as products.

    PYTHONPATH=src python benchmarks/chain.py --out rows.jsonl     # on an H100 or H200

So many layers, [tokens, side] to [tokens, side], one behind the other, with ReLU: dense layers, the
best of cuSPARSELt, and ours, eagerly and in a CUDA graph; `early` is `hopsparse.accelerate`, whose
kernels start before the one ahead has ended. The weights together fit into L2 and stay there, for
every contender alike. Each result is checked against that of the first contender. Device time is
from before the first layer to behind the last, host time until the last call has returned. Appends
one JSON row a contender, with the environment; the table comes last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from launches import timed
from torch import Tensor, nn
from torch.nn import functional as F

import hopsparse
from hopsparse.launch import capture
from hopsparse.measure import record
from hopsparse.measure.clock import gpu
from hopsparse.measure.peers import CuSPARSELt
from hopsparse.nn import SparseLinear
from hopsparse.ops import pack_nm


def main() -> None:
    """Measure, print and append."""
    options = parse()
    device = gpu()
    facts = record.environment() | {"layers": options.layers, "side": options.side}
    weights = [weight(options.side, device) for _ in range(options.layers)]
    for tokens in options.tokens:
        x = torch.randn(tokens, options.side, device=device).bfloat16()
        right = None
        for name, run, result in contenders(weights, x):
            run()
            found = result().float()
            right = found if right is None else right
            # All round to bfloat16 after each layer, in sums of another order.
            off = (found - right).abs().max().item() / right.abs().max().item()
            row = timed(name, run, tokens, options.layers, options.rounds)
            row = row | {"tokens": row.pop("blocks"), "largest_difference": round(off, 5)}
            record.append(options.out, row | facts)
            print(line(row), flush=True)


def weight(side: int, device: torch.device) -> Tensor:
    """A 2:4 weight that keeps the size of what is positive about the same."""
    dense = torch.randn(side, side, device=device) * (4 / side) ** 0.5
    return pack_nm(dense.bfloat16(), select="magnitude").to_dense()


def contenders(
    weights: list[Tensor], x: Tensor
) -> Iterator[tuple[str, Callable[[], object], Callable[[], Tensor]]]:
    """Ways to run the chain: name, run, and what the last run gave."""
    with torch.no_grad():
        dense: list[Callable[[Tensor], Tensor]] = [partial(F.linear, weight=w) for w in weights]
        for name, products in (("dense", dense), ("cusparselt", sparselt(weights, x))):
            if not products:
                continue
            eager = partial(one_by_one, products, x)
            yield f"{name}, eager", eager, eager
            graph = capture(eager)
            yield f"{name}, graph", graph.replay, graph.outputs.clone
        model = layers(weights)
        yield "hopsparse, not fused, eager", partial(model, x), partial(model, x)
        run = hopsparse.accelerate(model, x, reuse_outputs=True)
        yield "hopsparse, eager", partial(model, x), partial(model, x)
        graph = capture(partial(model, x))
        yield "hopsparse, graph", graph.replay, graph.outputs.clone
        own = run.inputs_for()[0]
        yield "hopsparse, graph, early", run.recordings[0].replay, partial(run, own.copy_(x))


def layers(weights: list[Tensor]) -> nn.Sequential:
    """Our layers, with an activation behind each."""
    pairs = [(SparseLinear(pack_nm(w)), nn.ReLU()) for w in weights]
    return nn.Sequential(*(each for pair in pairs for each in pair)).eval()


def sparselt(weights: list[Tensor], x: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Products of cuSPARSELt by its best algorithm; none where it is missing."""
    if (why := CuSPARSELt.available()) is not None:
        print(f"cusparselt is left out: {why}", flush=True)
        return []
    products = [CuSPARSELt.prepare(w) for w in weights]
    products[0](x)  # The search, outside of what is timed and captured.
    return list(products)


def one_by_one(products: list[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Layers with an activation behind each."""
    for product in products:
        x = product(x).relu_()
    return x


def line(row: record.Row) -> str:
    """One contender, for people."""
    return (
        f"{row['tokens']:5} tokens  {row['way']:28}{row['us']:9.2f} us a layer, "
        f"host {row['host_us']:7.2f}, off by {row['largest_difference']:.5f}"
    )


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("chain.jsonl"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--side", type=int, default=1024, help="features of every layer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=21, help="samples of each contender")
    options = parser.parse_args()
    for name in ("layers", "side", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    if min(options.tokens) < 1:
        parser.error(f"--tokens {min(options.tokens)}: at least 1")
    return options


if __name__ == "__main__":
    main()

"""Products with CSR matrices against cuSPARSE, torch_geometric and dense, in one run.

    PYTHONPATH=src python benchmarks/spmm_csr.py --out rows.jsonl

Graphs: y = A @ x, its gradient of x (A.T @ y') and that of the values (sddmm_csr), over power-law
graphs. Rivals are cuSPARSE through torch.sparse, and torch_geometric's SimpleConv over edge_index,
which gathers and scatters; the transposed matrix of cuSPARSE is built ahead, as ours is. Weights:
1 to 512 tokens by an unstructured weight, against cuSPARSE and the dense product; with `--tiles`
also by every tile of wgmma that is predicted to take at most twice as long as the best, and by
those of mma.sync. Ours is checked first, for graphs in some rows, the longest among them. Weights
are rotated through more than the L2 cache; a graph is larger than that. Appends one JSON row a
case, job and contender. `tbps` counts the bytes that entries gather, which L2 serves in part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hopsparse.formats import CSR
from hopsparse.measure import record
from hopsparse.measure.clock import Contender, copies_to_defeat_l2, gpu, time_side_by_side
from hopsparse.measure.error import product_bound
from hopsparse.ops import Case, csr_matmul, sddmm_csr, spmm_csr
from hopsparse.ops.spmm_csr import dispatch, plan, plan_matmul
from hopsparse.ops.spmm_csr.cases import DECODE, GRAPHS, WIDE, Graph, power_law
from hopsparse.ops.spmm_csr.device import multiply_tiles
from hopsparse.ops.spmm_csr.packed import Packed
from hopsparse.ops.spmm_csr.wide import CANDIDATES
from hopsparse.ops.spmm_csr.wide_cost import predict
from hopsparse.ops.spmm_csr.wide_device import multiply_wide

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CHECKED_ROWS = 32


def main() -> None:
    """Measure, print and append."""
    options = parse()
    facts = record.environment(gpu())
    for graph in GRAPHS:
        for features in graph.features if options.only in graph.name else ():
            for dtype in options.dtypes.split(","):
                for row in of_graph(graph, features, dtype, options.rounds):
                    report(options.out, row | facts)
    for case in (*DECODE, *WIDE):
        if options.only in case.name:
            for row in of_weight(case, options.rounds, tiles=options.tiles):
                report(options.out, row | facts)


def report(out: Path, row: record.Row) -> None:
    """Append a row, and print it."""
    record.append(out, row)
    end = row["error"] or f"{row['us']:9.1f} us {row['tbps']:6.2f} TB/s"
    head = f"{row['case']:<20} {row['features']:>4} {row['dtype']:<9} {row['job']:<10}"
    print(f"{head} {row['contender']:<16} {end}", flush=True)


def of_graph(graph: Graph, features: int, dtype: str, rounds: int) -> Iterator[record.Row]:
    """Rows of one graph with one number of features."""
    indptr, indices = power_law(graph.nodes, graph.edges, device="cuda")
    values = torch.rand(graph.edges, device="cuda").to(DTYPES[dtype])
    x = torch.randn(graph.nodes, features, device="cuda").to(DTYPES[dtype])
    a = CSR((graph.nodes, graph.nodes), values, indices, indptr)
    check_graph(a, x)
    said = plan_matmul(a, x).why
    theirs = a.to_torch()
    forward = {
        "hopsparse": lambda: csr_matmul(a, x),
        "cusparse": lambda: torch.sparse.mm(theirs, x),
        **geometric(a, x),
    }
    parts = (indptr, indices, values)
    turned = turned_of(a)
    backward = {
        "hopsparse": lambda: dispatch.csr_matmul_t(*parts, x, graph.nodes),
        "cusparse": lambda: torch.sparse.mm(turned, x),
    }
    dots = {
        "hopsparse": lambda: sddmm_csr(a, x, x),
        "cusparse": lambda: torch.sparse.sampled_addmm(theirs, x, x.T, beta=0.0),
    }
    size = values.element_size()
    gathered = graph.edges * (features * size + size + 4)
    for job, ways in (("multiply", forward), ("transposed", backward), ("sample", dots)):
        contenders = [Contender(name, [run]) for name, run in ways.items()]
        for timing in time_side_by_side(contenders, rounds=rounds):
            yield {
                "case": graph.name,
                "rows": graph.nodes,
                "k": graph.nodes,
                "entries": graph.edges,
                "features": features,
                "dtype": dtype,
                "job": job,
                "contender": timing.name,
                "plan": said if timing.name == "hopsparse" and job == "multiply" else None,
                **result(timing, gathered),
            }


def of_weight(case: Case, rounds: int, *, tiles: bool) -> Iterator[record.Row]:
    """Rows of an unstructured weight, in bfloat16."""
    sparsity = float(case.pattern.partition(":")[2])
    copies = copies_to_defeat_l2(
        int(case.out * case.k * (1 - sparsity) * 6),
        torch.cuda.get_device_properties().L2_cache_size,
    )
    dense = []
    for _ in range(copies):
        kept = torch.rand(case.out, case.k, device="cuda") >= sparsity
        dense.append(torch.randn(case.out, case.k, device="cuda").bfloat16() * kept)
    stored = [CSR.from_dense(each) for each in dense]
    theirs = [each.to_torch() for each in stored]
    x = torch.randn(case.tokens, case.k, device="cuda").bfloat16()
    y = spmm_csr(stored[0], x)
    bound = product_bound(x, dense[0][:512], torch.float32, torch.bfloat16)
    want = x.double() @ dense[0][:512].double().T
    if not ((y[:, :512].double() - want).abs() <= bound).all():
        raise SystemExit(f"{case.name} is wrong")
    contenders = [
        Contender("hopsparse", [lambda w=w: spmm_csr(w, x) for w in stored]),  # type: ignore[misc]
        Contender("cusparse", [lambda w=w: w @ x.T for w in theirs]),  # type: ignore[misc]
        Contender("dense", [lambda w=w: F.linear(x, w) for w in dense]),  # type: ignore[misc]
    ]
    predicted: dict[str, float] = {}
    if tiles:
        contenders += by_tiles(case, stored, x, bound, want, predicted)
    entries = sum(each.values.numel() for each in stored) // copies
    for timing in time_side_by_side(contenders, rounds=rounds):
        yield {
            "case": case.name,
            "rows": case.out,
            "k": case.k,
            "entries": entries,
            "features": case.tokens,
            "dtype": "bfloat16",
            "job": "weight",
            "contender": timing.name,
            "plan": plan(stored[0], x).why if timing.name == "hopsparse" else None,
            "predicted_us": predicted.get(timing.name),
            **result(timing, entries * (2 * case.tokens + 6)),
        }


def by_tiles(
    case: Case,
    stored: list[CSR],
    x: Tensor,
    bound: Tensor,
    want: Tensor,
    predicted: dict[str, float],
) -> list[Contender]:
    """A contender for each promising tile, checked, whose prediction is put into `predicted`."""
    packed = [dispatch.packed_of(w.indptr, w.indices, w.values, case.k) for w in stored]
    ways: dict[str, Callable[[Packed], Tensor]] = {}
    sm_count = torch.cuda.get_device_properties().multi_processor_count
    if case.tokens <= 64:
        ways["mma.sync"] = lambda w: multiply_tiles(w, x, None)
    if case.tokens > dispatch.TILE_TOKENS:
        shape, nbytes = (case.out, case.k), packed[0].nbytes  # type: ignore[union-attr]
        each = [predict(config, shape, case.tokens, nbytes, sm_count) for config in CANDIDATES]
        least = min(found.us for found in each)
        for found in each:
            if found.us <= 2 * least:
                name = f"wide {found.config.name}"
                predicted[name] = found.us
                ways[name] = lambda w, config=found.config: multiply_wide(w, x, None, config)  # type: ignore[misc]
    for name, run in ways.items():
        if not ((run(packed[0])[:, :512].double() - want).abs() <= bound).all():  # type: ignore[arg-type]
            raise SystemExit(f"{case.name} by {name} is wrong")
    return [
        Contender(name, [lambda w=w, run=run: run(w) for w in packed])  # type: ignore[misc]
        for name, run in ways.items()
    ]


def result(timing: Any, gathered: int) -> record.Row:
    """Time of a contender, or why there is none, and the bytes a second of what entries gather."""
    failed = bool(timing.error)
    return {
        "error": timing.error,
        "us": None if failed else timing.us,
        "tbps": None if failed else gathered / timing.us * 1e-6,
    }


def turned_of(a: CSR) -> Tensor:
    """The transposed matrix as a tensor of torch."""
    pattern = dispatch.pattern_of(a.indptr, a.indices, a.shape[1])
    across = pattern.transpose(a.indptr, a.indices)
    values = a.values[across.order]
    return CSR((a.shape[1], a.shape[0]), values, across.indices, across.indptr).to_torch()


def geometric(a: CSR, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What torch_geometric computes, where it is installed."""
    try:
        conv = import_module("torch_geometric.nn").SimpleConv(aggr="sum")
    except ImportError:
        return {}
    target = torch.repeat_interleave(a.indptr.diff())
    edges = torch.stack((a.indices.long(), target))
    return {"torch_geometric": lambda: conv(x, edges, a.values)}


def check_graph(a: CSR, x: Tensor) -> None:
    """Stop if some rows of the product, or dot products of theirs, are wrong."""
    counts = a.row_counts()
    rows = torch.cat((counts.topk(4).indices, torch.randint(a.shape[0], (_CHECKED_ROWS,)).cuda()))
    y, dots = csr_matmul(a, x), sddmm_csr(a, x, x)
    for row in rows.tolist():
        where = slice(int(a.indptr[row]), int(a.indptr[row + 1]))
        gathered, weight = x[a.indices[where]], a.values[where].unsqueeze(0)
        bound = product_bound(weight, gathered.T, torch.float32, x.dtype)[0]
        want = (weight.double() @ gathered.double())[0]
        if not ((y[row].double() - want).abs() <= bound).all():
            raise SystemExit(f"row {row} of {a.shape} is wrong")
        bound = product_bound(x[row : row + 1], gathered, torch.float32, x.dtype)[0]
        want = gathered.double() @ x[row].double()
        if not ((dots[where].double() - want).abs() <= bound).all():
            raise SystemExit(f"dot products of row {row} of {a.shape} are wrong")


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("spmm_csr.jsonl"))
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of graphs, comma-separated")
    parser.add_argument("--only", default="", help="part of the name of a case")
    parser.add_argument("--tiles", action="store_true", help="of weights, every promising tile")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for word in options.dtypes.split(","):
        if word not in DTYPES:
            parser.error(f"--dtypes {word!r}: one of {', '.join(DTYPES)}")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    return options


if __name__ == "__main__":
    main()

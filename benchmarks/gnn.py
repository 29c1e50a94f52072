r"""Two graph layers end to end, training and inference, against torch_geometric and torch.sparse.

    PYTHONPATH=src python benchmarks/gnn.py --out rows.jsonl
    PYTHONPATH=src python benchmarks/gnn.py --out rows.jsonl --nodes 200000 --edges 4000000 \
        --dtype bfloat16

GCN, and SAGE with the mean of neighbours, over a power-law graph: features to hidden to classes,
ReLU between. A step is forward, cross entropy over one node in ten, backward and Adam. Rivals, with
the same weights: `torch_geometric` over edge_index, normalised once; `torch_geometric csr` and
`torch.sparse` over a sparse CSR tensor that was normalised ahead, of torch_geometric's layers and
of a plain one. Results of all are compared with ours before anything is timed. `graph` rows are of
CUDA graphs that take turns, `eager` rows of calls as users make them, with the host's time. On the
CPU there are eager rows alone. Appends one JSON row a layer, job, way of calling and contender.

With `--digits`: accuracy on 1,797 handwritten digits, each joined to its 8 nearest, after training
on the labels of one in ten (scikit-learn has them, `pip install hopsparse[gnn]`).
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.measure import record
from hopsparse.measure.clock import Contender, gpu, time_side_by_side
from hopsparse.measure.timing import Timing, ratio
from hopsparse.nn import Aggregation, SparseConv
from hopsparse.ops.spmm_csr.cases import power_law

LAYERS = {"gcn": "gcn", "sage": "mean"}
JOBS = ("inference", "training")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Results of rivals further from ours than this are of something else.
MOST_DISTANCE = {"float32": 1e-4, "bfloat16": 0.03}
OURS = "hopsparse"
EPOCHS = 100


@dataclass(frozen=True)
class Sizes:
    """Features of the nodes, of the layer between, and classes."""

    features: int
    hidden: int
    classes: int


@dataclass(frozen=True)
class Graph:
    """A graph as each contender takes it."""

    kind: str
    edges: Tensor
    aggregation: Aggregation

    @classmethod
    def of(cls, edges: Tensor, nodes: int, kind: str) -> Graph:
        """Sort the edges once."""
        return cls(kind, edges, Aggregation.from_edges(edges, nodes, kind))

    def sparse(self, dtype: torch.dtype, *, plain: bool = False) -> Tensor:
        """The matrix as a sparse CSR tensor; plain: ones, for a layer that divides itself."""
        matrix = self.aggregation.matrix
        values = torch.ones_like(matrix.values) if plain else matrix.values
        return matrix.with_parts({"values": values.to(dtype)}).to_torch()


class Net(nn.Module):
    """Two layers that are called with the same graph."""

    def __init__(self, first: nn.Module, second: nn.Module, graph: Any) -> None:
        super().__init__()
        self.first, self.second, self.graph = first, second, graph

    def forward(self, x: Tensor) -> Tensor:
        """[nodes, features] to [nodes, classes]."""
        scores: Tensor = self.second(self.first(x, self.graph).relu(), self.graph)
        return scores


class Plain(nn.Module):
    """A layer of torch alone: the smaller side is multiplied by the matrix, as ours does."""

    def __init__(self, like: SparseConv) -> None:
        super().__init__()
        self.weight, self.root, self.bias = (
            None if each is None else nn.Parameter(each.detach().clone())
            for each in (like.weight, like.root, like.bias)
        )

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        """As `SparseConv`."""
        assert self.weight is not None
        if self.weight.shape[1] < self.weight.shape[0]:
            y = F.linear(matrix @ x, self.weight, self.bias)
        else:
            y = matrix @ F.linear(x, self.weight)
            y = y if self.bias is None else y + self.bias
        return y if self.root is None else y + F.linear(x, self.root)


def networks(layer: str, graph: Graph, sizes: Sizes, dtype: torch.dtype) -> dict[str, Net]:
    """All contenders with the same weights."""
    pairs = ((sizes.features, sizes.hidden), (sizes.hidden, sizes.classes))
    ours = [SparseConv(*pair, LAYERS[layer]).to(graph.edges.device, dtype) for pair in pairs]
    found = {
        OURS: Net(*copy.deepcopy(ours), graph.aggregation),
        "torch.sparse": Net(*map(Plain, ours), graph.sparse(dtype)),
    }
    try:
        geometric = import_module("torch_geometric.nn")
    except ImportError:
        return found
    coo = [geometric_layer(geometric, layer, each, csr=False) for each in ours]
    csr = [geometric_layer(geometric, layer, each, csr=True) for each in ours]
    matrix = graph.sparse(dtype, plain=layer == "sage")
    return found | {
        "torch_geometric": Net(*coo, graph.edges),
        "torch_geometric csr": Net(*csr, matrix),
    }


def geometric_layer(geometric: Any, layer: str, like: SparseConv, *, csr: bool) -> nn.Module:
    """torch_geometric's layer with the weights of ours."""
    sizes = (like.in_features, like.out_features)
    if layer == "gcn":
        made = geometric.GCNConv(*sizes, cached=not csr, normalize=not csr)
        pairs = ((made.lin.weight, like.weight), (made.bias, like.bias))
    else:
        made = geometric.SAGEConv(*sizes)
        pairs = (
            (made.lin_l.weight, like.weight),
            (made.lin_l.bias, like.bias),
            (made.lin_r.weight, like.root),
        )
    with torch.no_grad():
        for theirs, mine in pairs:
            theirs.copy_(mine)
    moved: nn.Module = made.to(like.weight.device, like.weight.dtype)
    return moved


def trainer(net: Net, x: Tensor, labels: Tensor, shown: Tensor) -> Callable[[], Tensor]:
    """A step of training; a CUDA graph can capture it behind the first call."""
    capturable = x.is_cuda
    optimizer = torch.optim.Adam(net.parameters(), 0.01, weight_decay=5e-4, capturable=capturable)
    target = labels[shown]

    def step() -> Tensor:
        # Gradients stay where they are: a graph writes there.
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(net(x).index_select(0, shown).float(), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def inference(net: Net, x: Tensor) -> Callable[[], Tensor]:
    """A forward."""

    @torch.no_grad()
    def run() -> Tensor:
        return net(x)

    return run


def distances(nets: dict[str, Net], x: Tensor) -> dict[str, float | str]:
    """How far the results of all are from ours; or what was raised."""
    with torch.no_grad():
        want = nets[OURS](x).float()
        found: dict[str, float | str] = {}
        for name, net in nets.items():
            try:
                found[name] = float((net(x).float() - want).norm() / want.norm())
            except (RuntimeError, NotImplementedError, ValueError) as error:
                found[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return found


def eager(contenders: list[Contender], rounds: int) -> list[Timing]:
    """Times of calls as users make them, in turns, each waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    samples: dict[str, list[float]] = {each.name: [] for each in contenders}
    failed: dict[str, str] = {}
    for each in contenders:
        try:
            each.calls[0]()
        except (RuntimeError, NotImplementedError) as error:
            failed[each.name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    for _ in range(rounds):
        for each in (each for each in contenders if each.name not in failed):
            wait()
            started = time.perf_counter()
            each.calls[0]()
            wait()
            samples[each.name].append(1e6 * (time.perf_counter() - started))
    return [
        Timing(each.name, tuple(samples[each.name]), 1, failed.get(each.name, ""))
        for each in contenders
    ]


def measured(layer: str, options: Any, device: torch.device) -> list[record.Row]:
    """Rows of one kind of layer."""
    dtype, nodes = DTYPES[options.dtype], options.nodes
    sizes = Sizes(options.features, options.hidden, options.classes)
    indptr, sources = power_law(nodes, options.edges, device=device.type)
    targets = torch.repeat_interleave(indptr.diff(), output_size=sources.numel())
    graph = Graph.of(torch.stack((sources.long(), targets)), nodes, LAYERS[layer])
    x = torch.randn(nodes, sizes.features, device=device).to(dtype)
    labels = torch.randint(sizes.classes, (nodes,), device=device)
    shown = torch.randperm(nodes, device=device)[: max(1, nodes // 10)]
    nets = networks(layer, graph, sizes, dtype)
    far, rows = distances(nets, x), []
    limit = MOST_DISTANCE[options.dtype]
    wrong = {
        name: value if isinstance(value, str) else f"{value:.3g} from ours"
        for name, value in far.items()
        if isinstance(value, str) or not value < limit
    }
    facts = {"layer": layer, "nodes": nodes, "edges": options.edges, "dtype": options.dtype}
    facts |= vars(sizes)
    for job in options.jobs:
        contenders = [
            Contender(
                name, [inference(net, x) if job == "inference" else trainer(net, x, labels, shown)]
            )
            for name, net in nets.items()
            if name not in wrong
        ]
        hows = {"eager": lambda c=contenders: eager(c, options.rounds)}
        if device.type == "cuda":
            hows["graph"] = lambda c=contenders: time_side_by_side(
                c, rounds=options.rounds, budget_s=options.budget_s
            )
        for how, run in hows.items():
            timings = run()
            rows += rows_of(timings, facts | {"job": job, "how": how}, far)
        rows += [
            facts | {"job": job, "how": "eager", "contender": name, "us": None, "error": why}
            for name, why in wrong.items()
        ]
    return rows


def rows_of(timings: list[Timing], facts: record.Row, far: dict[str, Any]) -> list[record.Row]:
    """One row a contender, with how many times as long as ours it takes."""
    ours = next(each for each in timings if each.name == OURS)
    rows = []
    for each in timings:
        failed = not each.samples_us
        both = not failed and bool(ours.samples_us)
        rows.append(
            facts
            | {
                "contender": each.name,
                "us": None if failed else each.us,
                "us_quartiles": None if failed else list(each.quartiles_us),
                "times_ours": round(ratio(each, ours).value, 4) if both else None,
                "distance": far[each.name],
                "error": each.error,
            }
        )
    return rows


def digits(layer: str, seed: int, device: torch.device) -> list[record.Row]:
    """Accuracy on the digits whose labels were not shown, of every contender."""
    torch.manual_seed(seed)
    data = import_module("sklearn.datasets").load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    near = torch.cdist(x, x).topk(9, largest=False).indices[:, 1:]
    edges = torch.stack((near.flatten(), torch.arange(len(x)).repeat_interleave(8)))
    order = torch.randperm(len(x))
    shown, hidden = order[: len(x) // 10].to(device), order[len(x) // 10 :].to(device)
    graph = Graph.of(edges.to(device), len(x), LAYERS[layer])
    x, labels = x.to(device), torch.tensor(data.target).to(device)
    rows = []
    for name, net in networks(layer, graph, Sizes(64, 32, 10), torch.float32).items():
        started, step = time.monotonic(), trainer(net, x, labels, shown)
        for _ in range(EPOCHS):
            loss = step()
        right = (inference(net, x)().argmax(1) == labels)[hidden].double().mean().item()
        rows.append(
            {
                "job": "digits",
                "layer": layer,
                "contender": name,
                "seed": seed,
                "accuracy": right,
                "loss": float(loss),
                "epochs": EPOCHS,
                "seconds": time.monotonic() - started,
                "device": device.type,
            }
        )
    return rows


def main() -> None:
    """Measure, append, print."""
    options = parse()
    device = gpu() if options.device == "cuda" else torch.device("cpu")
    facts = record.environment() | {"suite": "gnn"}
    torch.manual_seed(0)
    for layer in options.layers:
        rows = measured(layer, options, device) if options.jobs else []
        for row in rows:
            record.append(options.out, row | facts)
            print(line(row), flush=True)
        for seed in range(options.digits):
            for row in digits(layer, seed, device):
                record.append(options.out, row | facts)
                told = f"{100 * row['accuracy']:.2f} %"
                print(f"{layer:<5} digits     seed {seed} {row['contender']:<20} {told}")


def line(row: record.Row) -> str:
    """A row as the table has it."""
    head = f"{row['layer']:<5} {row['job']:<10} {row['how']:<6} {row['contender']:<20}"
    if row["us"] is None:
        return f"{head} {row['error']}"
    times = "" if row["times_ours"] is None else f"{row['times_ours']:6.2f} x ours"
    return f"{head}{row['us'] / 1e3:10.3f} ms {times}"


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=JOBS)
    for name, size in (("nodes", 1_000_000), ("edges", 20_000_000), ("features", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    for name, size in (("hidden", 128), ("classes", 32), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--digits", type=int, default=0, help="seeds to train on the digits with")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    parser.add_argument("--budget-s", type=float, default=30.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    for name in ("nodes", "edges", "features", "hidden", "classes", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    return options


if __name__ == "__main__":
    main()

"""Graph layers: what they compute, whose drop-ins they are, and that they learn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.measure.error import gamma
from hopsparse.nn import Aggregation, SparseConv
from hopsparse.nn.aggregation import AGGREGATIONS

NODES = 30


def edges_of(count: int = 200) -> Tensor:
    """With edges to oneself, edges twice, and nodes that none ends in."""
    edges = torch.randint(0, NODES, (2, count))
    edges[1] = edges[1].clamp(max=NODES - 5)
    return torch.cat((edges, edges[:, :7], torch.tensor([[3, 3, 28], [3, 3, 28]])), 1)


def dense_of(edges: Tensor, kind: str, weight: Tensor | None = None) -> Tensor:
    """A of `Aggregation`, from its definition, in float64."""
    weight = torch.ones(edges.shape[1]) if weight is None else weight
    a = torch.zeros(NODES, NODES, dtype=torch.float64)
    for number, (source, target) in enumerate(edges.T.tolist()):
        if kind == "gcn" and source == target:
            a[target, source] = weight[number].double()  # the last one
        else:
            a[target, source] += weight[number].double()
    if kind == "mean":
        return a / torch.bincount(edges[1], minlength=NODES).clamp(min=1).unsqueeze(1)
    if kind == "gcn":
        own = torch.zeros(NODES, dtype=torch.bool)
        own[edges[0][edges[0] == edges[1]]] = True
        a += torch.diag((~own).double())
        degree = a.sum(1)
        root = torch.where(degree > 0, degree, torch.inf).rsqrt()
        return root.unsqueeze(1) * a * root
    return a


def matrix_of(over: Aggregation, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    row = torch.repeat_interleave(over.matrix.row_counts())
    at = (row, over.matrix.indices.long())
    values = over.values(dtype, weight)
    return torch.zeros(NODES, NODES, dtype=dtype).index_put(at, values, accumulate=True)


def allowed(dtype: torch.dtype, terms: int) -> float:
    """Relative to a sum of magnitudes: of two ways to add so many products, and normalise them."""
    return 2 * gamma(terms + 16, dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_the_matrix_is_that_of_its_definition(kind: str, weighted: bool) -> None:
    edges = edges_of()
    weight = torch.rand(edges.shape[1]) if weighted else None
    over = Aggregation.from_edges(edges, NODES, kind)
    if weighted and kind == "mean":
        with pytest.raises(ArgumentError, match="for gcn or sum"):
            over.values(torch.float32, weight)
        return
    want = dense_of(edges, kind, weight)
    for dtype in (torch.float32, torch.float64):
        error = (matrix_of(over, dtype, weight).double() - want).abs()
        assert (error <= allowed(dtype, edges.shape[1]) * want).all()
    assert torch.equal(over.matrix.values, over.values(torch.float32))


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5)])
@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_layer_is_its_formula(kind: str, sizes: tuple[int, int]) -> None:
    conv, edges = SparseConv(*sizes, kind).double(), edges_of()
    x = torch.randn(NODES, sizes[0], dtype=torch.float64)
    a = dense_of(edges, kind)
    want, size = a @ x @ conv.weight.T + conv.bias, a @ x.abs() @ conv.weight.abs().T
    if conv.root is not None:
        want, size = want + x @ conv.root.T, size + x.abs() @ conv.root.abs().T
    got = conv(x, edges)
    bound = allowed(torch.float64, edges.shape[1] + 2 * max(sizes)) * (size + conv.bias.abs())
    assert ((got - want).abs() <= bound).all()
    assert torch.equal(conv(x, Aggregation.from_edges(edges, NODES, kind)), got)
    assert (kind == "gcn") == (conv.root is None)


@pytest.mark.parametrize("kind", ["gcn", "sum"])
def test_gradients_reach_features_weights_and_parameters(kind: str) -> None:
    conv, edges = SparseConv(3, 2, kind).double(), edges_of(40)
    x = torch.randn(NODES, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(edges.shape[1], dtype=torch.float64, requires_grad=True)
    over = Aggregation.from_edges(edges, NODES, kind)

    def run(x: Tensor, weight: Tensor, transform: Tensor) -> Tensor:
        return torch.func.functional_call(conv, {"weight": transform}, (x, over, weight))

    transform = conv.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, weight, transform))


def test_edges_are_sorted_once_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x, edges = SparseConv(3, 2), torch.ones(NODES, 3), edges_of()
    made = []
    sort = Aggregation.from_edges
    monkeypatch.setattr(
        Aggregation, "from_edges", lambda *given: made.append(given) or sort(*given)
    )
    first = conv(x, edges)
    assert torch.equal(conv(x, edges), first)
    assert len(made) == 1
    edges[1, 0] = (edges[1, 0] + 1) % NODES
    assert not torch.equal(conv(x, edges), first)
    assert len(made) == 2
    assert len(conv._sorted) == 1
    assert len(copy.deepcopy(conv)._sorted) == 0
    assert sorted(conv.state_dict()) == ["bias", "weight"]


def test_under_autocast() -> None:
    conv, edges, x = SparseConv(8, 4, "mean"), edges_of(), torch.randn(NODES, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x, edges).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("edges", "told"),
    [
        (torch.ones(3, 2, dtype=torch.int64), r"edges \[3, 2\]"),
        (torch.ones(2, 2), "float32"),
        ([[0], [1]], "list"),
        (torch.tensor([[0], [30]]), "nodes 0 to 30 of a graph of 30"),
        (torch.tensor([[-1], [3]]), "nodes -1 to 3"),
    ],
)
def test_edges_that_are_none(edges: Tensor, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        SparseConv(3, 2)(torch.ones(NODES, 3), edges)


def test_what_does_not_fit_is_refused() -> None:
    edges = edges_of()
    with pytest.raises(ArgumentError, match="one of gcn, mean, sum"):
        SparseConv(3, 2, "max")
    with pytest.raises(ArgumentError, match="edges sorted for sum"):
        SparseConv(3, 2)(torch.ones(NODES, 3), Aggregation.from_edges(edges, NODES, "sum"))
    with pytest.raises(ArgumentError, match=r"x \[30, 4\]"):
        SparseConv(3, 2)(torch.ones(NODES, 4), edges)
    with pytest.raises(ArgumentError, match="a GCNConv or SAGEConv"):
        SparseConv.from_geometric(nn.Linear(2, 2))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sizes", [(5, 9), (9, 5)])
@pytest.mark.parametrize("kind", ["gcn", "mean", "sum", "sum, no root"])
def test_torch_geometric_computes_the_same(
    kind: str, sizes: tuple[int, int], weighted: bool
) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    edges, x = edges_of(), torch.randn(NODES, sizes[0], dtype=torch.float64)
    aggr, weight = kind.partition(",")[0], None
    if kind == "gcn":
        theirs = geometric.GCNConv(*sizes).double()
        weight = torch.rand(edges.shape[1], dtype=torch.float64) if weighted else None
    else:
        theirs = geometric.SAGEConv(*sizes, aggr=aggr, root_weight="no root" not in kind).double()
    more = () if weight is None else (weight,)
    ours = SparseConv.from_geometric(theirs)
    want, got = theirs(x, edges, *more), ours(x, edges, *more)
    a, size = dense_of(edges, aggr, weight), 0 * want
    for matrix, side in ((ours.weight, a @ x.abs()), (ours.root, x.abs())):
        size = size if matrix is None else size + side @ matrix.abs().T
    terms = edges.shape[1] + 2 * max(sizes)
    assert ((got - want).abs() <= allowed(torch.float64, terms) * (size + ours.bias.abs())).all()
    want.sum().backward()
    gradients = [parameter.grad.clone() for parameter in theirs.parameters()]
    theirs.zero_grad()
    got.sum().backward()
    # Each gradient is a sum over nodes of what enters a weight, or of ones.
    largest = max((a @ x.abs()).sum(0).max(), x.abs().sum(0).max(), torch.tensor(NODES))
    for mine, other in zip(theirs.parameters(), gradients, strict=True):
        assert ((mine.grad - other).abs() <= allowed(torch.float64, terms + NODES) * largest).all()


def test_options_of_torch_geometric_that_are_not_here_are_refused() -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    for theirs in (
        geometric.GCNConv(3, 2, improved=True),
        geometric.SAGEConv(3, 2, aggr="max"),
        geometric.SAGEConv(3, 2, normalize=True),
    ):
        with pytest.raises(UnsupportedError, match="layer of your own"):
            SparseConv.from_geometric(theirs)


@pytest.mark.parametrize("kind", ["gcn", "mean"])
def test_a_graph_of_digits_is_learnt(kind: str) -> None:
    """1,797 handwritten digits, each joined to its 8 nearest; labels of one in ten are known."""
    datasets = pytest.importorskip("sklearn.datasets")
    data = datasets.load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    label = torch.tensor(data.target)
    near = torch.cdist(x, x).topk(9, largest=False).indices[:, 1:]
    edges = torch.stack((near.flatten(), torch.arange(len(x)).repeat_interleave(8)))
    known = torch.zeros(len(x), dtype=torch.bool)
    known[torch.randperm(len(x))[: len(x) // 10]] = True
    layers = nn.ModuleList((SparseConv(64, 32, kind), SparseConv(32, 10, kind)))
    over = Aggregation.from_edges(edges, len(x), kind)
    optimizer = torch.optim.Adam(layers.parameters(), 0.01, weight_decay=5e-4)
    for _ in range(100):
        optimizer.zero_grad()
        score = layers[1](layers[0](x, over).relu(), over)
        F.cross_entropy(score[known], label[known]).backward()
        optimizer.step()
    right = (score.argmax(1) == label)[~known].float().mean()
    assert right > 0.95  # two linear layers alone reach 0.93

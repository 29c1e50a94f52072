"""benchmarks/gnn.py from its words to its rows, on a small graph without a GPU."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from hopsparse.measure import record

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ("--nodes", "60", "--edges", "500", "--features", "6", "--hidden", "9", "--classes", "4")
GEOMETRIC = ["torch_geometric", "torch_geometric csr"] if find_spec("torch_geometric") else []
# torch says of its sparse CSR tensors that they may change.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")


@pytest.fixture
def gnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("gnn")


def run(monkeypatch: pytest.MonkeyPatch, gnn: Any, out: Path, *words: str) -> list[record.Row]:
    always = ("--out", str(out), "--device", "cpu", "--rounds", "2", *SMALL)
    monkeypatch.setattr(sys, "argv", ["gnn.py", *always, *words])
    gnn.main()
    return record.read(out)


def test_rows_of_both_layers_and_jobs(
    monkeypatch: pytest.MonkeyPatch,
    gnn: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = run(monkeypatch, gnn, tmp_path / "rows.jsonl")
    found = [(row["layer"], row["job"], row["contender"]) for row in rows]
    names = ["hopsparse", "torch.sparse", *GEOMETRIC]
    assert found == [
        (layer, job, name)
        for layer in ("gcn", "sage")
        for job in ("inference", "training")
        for name in names
    ]
    for row in rows:
        assert row["error"] == ""
        assert row["us"] > 0
        assert row["distance"] < 1e-5
        assert row["times_ours"] > 0
    assert "x ours" in capsys.readouterr().out


@pytest.mark.parametrize("layer", ["gcn", "sage"])
def test_steps_of_all_contenders_learn_alike(gnn: Any, layer: str) -> None:
    torch.manual_seed(0)
    edges = torch.randint(40, (2, 80))
    graph = gnn.Graph.of(edges, 40, gnn.LAYERS[layer])
    x, labels, shown = torch.randn(40, 6), torch.randint(3, (40,)), torch.randperm(40)[:20]
    nets = gnn.networks(layer, graph, gnn.Sizes(6, 9, 3), torch.float32)
    losses = {}
    for name, net in nets.items():
        step = gnn.trainer(net, x, labels, shown)
        losses[name] = [float(step()) for _ in range(30)]
    assert losses["hopsparse"][-1] < 0.9 * losses["hopsparse"][0]
    for found in losses.values():
        assert found == pytest.approx(losses["hopsparse"], rel=1e-3)


def test_a_contender_that_computes_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, gnn: Any, tmp_path: Path
) -> None:
    class Wrong(gnn.Plain):  # type: ignore[misc, name-defined]
        def forward(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x, matrix)

    monkeypatch.setattr(gnn, "Plain", Wrong)
    words = ("--layers", "gcn", "--jobs", "inference")
    rows = run(monkeypatch, gnn, tmp_path / "rows.jsonl", *words)
    (row,) = (row for row in rows if row["contender"] == "torch.sparse")
    assert row["us"] is None
    assert row["error"].endswith("from ours")


def test_wrong_words_are_told(
    monkeypatch: pytest.MonkeyPatch, gnn: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, gnn, tmp_path / "rows.jsonl", "--hidden", "0")
    assert "--hidden 0: at least 1" in capsys.readouterr().err


def test_all_contenders_learn_the_digits(gnn: Any) -> None:
    pytest.importorskip("sklearn")
    rows = gnn.digits("gcn", 0, torch.device("cpu"))
    assert [row["contender"] for row in rows] == ["hopsparse", "torch.sparse", *GEOMETRIC]
    assert all(row["accuracy"] > 0.95 for row in rows)

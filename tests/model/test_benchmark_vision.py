"""benchmarks/vision.py from its words to its rows, on a small model without a GPU."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hopsparse.measure import record
from hopsparse.nn import Convolution, Pointwise, SparseLinear

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("vision_models")


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> list[record.Row]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    always = ("--out", str(out), "--device", "cpu", "--backend", "eager", "--tiny", "--batch", "3")
    monkeypatch.setattr(sys, "argv", ["vision.py", *always, "--rounds", "2", *words])
    import_module("vision").main()
    return record.read(out)


def test_rows_of_a_transformer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(monkeypatch, tmp_path / "rows.jsonl", "--model", "vit")
    names = ["eager", "compiled", "2:4", "2:4+fp8", "block:16x16:0.9", "block:32x32:0.9"]
    assert [row["variant"] for row in rows] == names
    for row in rows:
        assert row["why"] == ""
        assert row["images_per_s"] == pytest.approx(3e6 / row["us"])
        assert row["against"] == "compiled"
        assert row["error"] < (0.25 if "fp8" in row["variant"] else 1e-4)
    assert [row["layers"] for row in rows] == [0, 0, 8, 8, 8, 8]
    assert "images/s" in capsys.readouterr().out


def test_rows_of_a_residual_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("--model", "resnet", "--forms", "2:4", "--three", "sparse", "dense", "--most-mb", "1")
    rows = run(monkeypatch, tmp_path / "rows.jsonl", *words, "--rivals", "compiled")
    assert [row["variant"] for row in rows] == ["compiled", "2:4, 3x3 sparse", "2:4, 3x3 dense"]
    assert all(row["why"] == "" and row["error"] < 1e-4 for row in rows)
    # Three convolutions and one of the shortcut in each of two bottlenecks.
    assert [row["layers"] for row in rows] == [0, 8, 6]
    assert rows[1]["plans"] == {"reference": 8}


def test_the_full_models_are_those_of_the_papers(models: Any) -> None:
    with torch.device("meta"):
        vit, resnet = models.Vit(), models.ResNet()
    # As torchvision counts them.
    assert sum(each.numel() for each in vit.parameters()) == 304_326_632
    assert sum(each.numel() for each in resnet.parameters()) == 25_557_032


@pytest.mark.parametrize("three", ["sparse", "dense"])
def test_a_sparse_model_computes_what_its_dense_weights_say(models: Any, three: str) -> None:
    torch.manual_seed(0)
    dense = models.resnet(models.ResNetSizes(width=16, depths=(1, 2), image=32, classes=7))
    assert not any(isinstance(each, torch.nn.BatchNorm2d) for each in dense.modules())
    sparse = models.sparse_resnet(dense, "block:16x16:0.5", models.add_relu, three)
    images = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    torch.testing.assert_close(sparse(images), models.exact(sparse)(images))
    assert not torch.allclose(sparse(images), dense(images))
    kinds = {type(block.conv2) for block in sparse.blocks}
    assert kinds == {Convolution if three == "sparse" else torch.nn.Conv2d}
    assert all(isinstance(block.conv1, Pointwise) for block in sparse.blocks)
    assert all(block.conv1.linear.act == "relu" for block in sparse.blocks)
    layers = [each for each in sparse.modules() if isinstance(each, SparseLinear)]
    assert {layer.matrix.name for layer in layers} == {"bsr"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rounds", "0"), "--rounds 0: at least 1"),
        (("--batch", "1"), "--batch 1: at least 2"),
        (("--forms", "2-4"), "--forms 2-4"),
        (("--forms", "dense"), "--forms dense: no pattern"),
    ],
)
def test_wrong_words_are_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "rows.jsonl", "--model", "vit", *words)
    assert told in capsys.readouterr().err

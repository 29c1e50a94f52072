from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hopsparse.formats import CSR, write_matrices
from tests.cli.conftest import Run

RunJson = Callable[..., Any]


def test_layers_and_totals_of_a_checkpoint(run_json: RunJson, sparse_model: Path) -> None:
    found = run_json("inspect", sparse_model)
    assert found["kind"] == "hopsparse"
    assert found["pattern"] == "2:4"
    assert found["method"] == "sparsegpt"
    assert len(found["layers"]) == found["totals"]["layers"] == 14
    first = found["layers"][0]
    assert (first["format"], first["pattern"], first["dtype"]) == ("nm", "2:4", "bfloat16")
    assert first["density"] == pytest.approx(0.5, abs=0.01)
    assert first["bytes_dense"] == first["shape"][0] * first["shape"][1] * 2
    assert "lm_head" in found["kept_dense"]
    totals = found["totals"]
    assert totals["total_bytes"] == totals["bytes"] + totals["other_bytes"]


def test_table_names_every_layer_and_what_is_dense(run: Run, sparse_model: Path) -> None:
    result = run("inspect", sparse_model)
    assert result.exit_code == 0
    assert "model.layers.1.mlp.down_proj" in result.stdout
    assert "14 sparse layers" in result.stdout
    assert "kept dense (1)" in result.stdout


def test_dense_checkpoint_has_no_sparse_layers(run_json: RunJson, dense_model: Path) -> None:
    found = run_json("inspect", dense_model)
    assert (found["kind"], found["layers"]) == ("dense", [])
    assert found["totals"]["total_bytes"] > 0


def test_file_of_matrices(run_json: RunJson, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_matrices(path, {"w": CSR.from_dense(torch.eye(8)), "b": torch.zeros(3)})
    found = run_json("inspect", path)
    assert found["kind"] == "matrices"
    assert found["layers"][0]["density"] == 1 / 8
    assert found["totals"]["other_bytes"] == 12


def test_plain_tensors(run_json: RunJson, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    save_file({"w": torch.zeros(4, 4)}, path)
    found = run_json("inspect", path)
    assert (found["kind"], found["totals"]["total_bytes"]) == ("tensors", 64)


def test_newer_checkpoint_is_refused(run: Run, damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config["quantization_config"]["format_version"] = 99
    (damaged / "config.json").write_text(json.dumps(config))
    result = run("inspect", damaged)
    assert result.exit_code == 2
    assert "99" in result.stderr
    assert "upgrade" in result.stderr


@pytest.mark.parametrize("content", ["{", "[1, 2]", ""])
def test_broken_config_is_refused(run: Run, damaged: Path, content: str) -> None:
    (damaged / "config.json").write_text(content)
    result = run("inspect", damaged)
    assert result.exit_code == 2
    assert "config.json" in result.stderr


def test_missing_things_are_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    for name, words in (
        ("nowhere", "does not exist"),
        ("empty", "config.json"),
        ("model.bin", "never loaded"),
        ("cut.safetensors", "cannot be read"),
    ):
        result = run("inspect", tmp_path / name)
        assert result.exit_code == 2
        assert words in result.stderr

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hopsparse.cli.selfcheck as selfcheck
from hopsparse.formats import CSR, write_matrices
from tests.cli.conftest import Run, start

RunJson = Callable[..., Any]


def shard_with(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def rewrite(folder: Path, name: str, value: torch.Tensor) -> None:
    path = shard_with(folder, name)
    tensors = load_file(path)
    tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_self_check_passes_and_covers_all_formats(run_json: RunJson) -> None:
    found = run_json("verify")
    assert found["ok"]
    names = {check["name"] for check in found["checks"]}
    assert {f"product {fmt}" for fmt in ("nm", "bsr", "csr", "csc", "hyb", "bitmask")} <= names


def test_self_check_notices_a_wrong_product(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail proves nothing: one flipped sign must be seen."""
    monkeypatch.setattr(selfcheck, "_SHAPES", ((16, 16),))
    original = selfcheck.SparseLinear.forward

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = original(self, x)
        y[0, 0] = -y[0, 0] - 1
        return y

    monkeypatch.setattr(selfcheck.SparseLinear, "forward", wrong)
    result = run("verify")
    assert result.exit_code == 1
    assert "the first: product nm" in result.stdout
    assert "float64 gives" in result.stdout


def test_whole_checkpoint_passes(run_json: RunJson, sparse_model: Path) -> None:
    found = run_json("verify", sparse_model)
    assert found["ok"]
    details = [check["detail"] for check in found["checks"]]
    assert "21 weights agree" in details
    assert details[-1] == "as written"


def test_packed_checkpoint_passes(run_json: RunJson, sparse_model: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    run_json("convert", sparse_model, "-o", theirs, "--to", "sparse-24-bitmask")
    found = run_json("verify", theirs)
    details = [check["detail"] for check in found["checks"]]
    assert "21 weights agree" in details
    assert details[-1] == "as written"
    assert sum("sparse-24-bitmask" in check["detail"] for check in found["checks"]) == 14


def test_dense_checkpoint_passes(run: Run, dense_model: Path) -> None:
    assert run("verify", dense_model).exit_code == 0


@pytest.mark.parametrize("damage", ["missing", "truncated", "no index entry"])
def test_shards_are_present_and_readable(run_json: RunJson, damaged: Path, damage: str) -> None:
    shard = sorted(damaged.glob("*.safetensors"))[0]
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        path = damaged / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        del index["weight_map"]["model.layers.0.mlp.up_proj.meta"]
        path.write_text(json.dumps(index))
    found = run_json("verify", damaged, exit_code=1)
    assert not found["ok"]
    first = next(check for check in found["checks"] if not check["ok"])
    named = "up_proj" if damage == "no index entry" else shard.name
    assert named in first["name"] + first["detail"]


def test_damaged_index_words_are_found(run: Run, damaged: Path) -> None:
    name = "model.layers.0.mlp.up_proj.meta"
    meta = load_file(shard_with(damaged, name))[name]
    rewrite(damaged, name, torch.zeros_like(meta))
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "the first: model.layers.0.mlp.up_proj" in result.stdout


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.values"])
def test_values_that_are_no_numbers_are_found(run: Run, damaged: Path, name: str) -> None:
    values = load_file(shard_with(damaged, name))[name].clone()
    places = (values != 0).flatten().nonzero().flatten()
    values.view(-1)[places[3]] = float("nan")
    rewrite(damaged, name, values)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "not finite" in result.stdout


def test_sizes_must_agree_with_config(run: Run, damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config["intermediate_size"] = 128
    (damaged / "config.json").write_text(json.dumps(config))
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "config.json describes" in result.stdout


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_config_with_fewer_layers_than_are_stored(run: Run, damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    change_config(damaged, num_hidden_layers=config["num_hidden_layers"] - 1)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "is stored, config.json describes no such weight" in result.stdout


@pytest.mark.parametrize("changes", [{"hidden_size": "x"}, {"hidden_act": "nope"}])
def test_a_config_that_describes_no_model(
    run: Run, damaged: Path, changes: dict[str, object]
) -> None:
    change_config(damaged, **changes)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "no model can be built" in result.stdout


def test_a_flipped_bit_is_found(run: Run, damaged: Path) -> None:
    """The lowest bit of a value: still finite, of the same pattern, and wrong."""
    name = "model.layers.0.mlp.up_proj.values"
    shard = shard_with(damaged, name)
    data = bytearray(shard.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start = json.loads(data[8 : 8 + size])[name]["data_offsets"][0]
    data[8 + size + start] ^= 1
    shard.write_bytes(data)
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert f"the first: SHA-256 of {shard.name}" in result.stdout


def test_file_of_matrices(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_matrices(path, {"w": CSR.from_dense(torch.eye(8))})
    assert run("verify", path).exit_code == 0
    bad = tmp_path / "bad.safetensors"
    write_matrices(bad, {"w": CSR.from_dense(torch.full((2, 2), float("inf")))})
    result = run("verify", bad)
    assert result.exit_code == 1
    assert "not finite" in result.stdout


def test_nothing_there_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    assert run("verify", tmp_path / "nowhere").exit_code == 2


def test_exit_code_reaches_the_shell(damaged: Path) -> None:
    sorted(damaged.glob("*.safetensors"))[0].unlink()
    process = start("verify", damaged, "--json")
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert json.loads(told)["ok"] is False

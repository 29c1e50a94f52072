from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hopsparse.errors import CheckpointError
from hopsparse.formats import NM
from hopsparse.models._files import write_tensors
from hopsparse.models.checkpoint import (
    FORMAT_VERSION,
    CheckpointReader,
    CheckpointWriter,
    ModuleEntry,
    SparseConfig,
)


def write_checkpoint(out: Path) -> NM:
    dense = torch.zeros(8, 16, dtype=torch.bfloat16)
    dense[:, ::4] = torch.arange(1, 33).view(8, 4)
    matrix = NM.from_dense(dense)
    config = SparseConfig("2:4", "imported", {"a.b": ModuleEntry.of(matrix)}, {"c": "by name"})
    with CheckpointWriter(out) as writer:
        writer.write_shard(
            "model-00001-of-00002.safetensors",
            {f"a.b.{part}": value for part, value in matrix.parts().items()},
        )
        writer.write_shard("model-00002-of-00002.safetensors", {"c.weight": torch.ones(2, 3)})
        writer.commit({"model_type": "llama", "quantization_config": config.to_json()})
    return matrix


def edit_config(folder: Path, change: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(change)
    (folder / "config.json").write_text(json.dumps(config))


def test_round_trip(tmp_path: Path) -> None:
    matrix = write_checkpoint(tmp_path / "out")
    with CheckpointReader(tmp_path / "out") as reader:
        assert reader.names() == ["a.b.meta", "a.b.values", "c.weight"]
        assert reader.sparse is not None
        assert reader.sparse.kept_dense == {"c": "by name"}
        again = reader.matrix("a.b")
        assert isinstance(again, NM)
        assert torch.equal(again.values, matrix.values)
        assert torch.equal(again.meta, matrix.meta)
        assert again.pattern == matrix.pattern


def test_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "out")
    (tmp_path / "out" / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard 'model-00001-of-00002.safetensors'.*missing"):
        CheckpointReader(tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_truncated_shard(tmp_path: Path, keep: int) -> None:
    write_checkpoint(tmp_path / "out")
    shard = tmp_path / "out" / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with (
        CheckpointReader(tmp_path / "out") as reader,
        pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors cannot be read"),
    ):
        reader.matrix("a.b")


def test_index_that_points_outside_the_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "out")
    index = tmp_path / "out" / "model.safetensors.index.json"
    changed = json.loads(index.read_text())
    changed["weight_map"]["c.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(changed))
    write_tensors(tmp_path / "secret.safetensors", {"c.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match="missing"):
        CheckpointReader(tmp_path / "out")


def test_newer_version(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "out")
    edit_config(tmp_path / "out", {"format_version": FORMAT_VERSION + 1})
    with pytest.raises(CheckpointError, match=r"format version 2\. Required: version 1 or older"):
        CheckpointReader(tmp_path / "out")


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"format": "nm", "shape": [8], "dtype": "bfloat16", "attributes": {}},
        {"format": "zip", "shape": [8, 16], "dtype": "bfloat16", "attributes": {}},
        {"format": "nm", "shape": [8, 16], "dtype": "nn", "attributes": {}},
        {"format": "nm", "shape": [8, "x"], "dtype": "bfloat16", "attributes": {}},
        {"format": "nm", "shape": [-8, 16], "dtype": "bfloat16", "attributes": {}},
    ],
)
def test_malformed_entry(tmp_path: Path, entry: dict[str, object]) -> None:
    write_checkpoint(tmp_path / "out")
    edit_config(tmp_path / "out", {"modules": {"a.b": entry}})
    with pytest.raises(CheckpointError, match=r"a\.b"):
        CheckpointReader(tmp_path / "out")


@pytest.mark.parametrize("content", ["", "{", "[]", '"text"', "\x00\x01"])
def test_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    write_checkpoint(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="JSON object"):
        CheckpointReader(tmp_path / "out")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        CheckpointReader(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"modules": []},
        {"modules": None},
        {"modules": "a.b"},
        {"kept_dense": 3},
        {"kept_dense": {"c": 3}},
        {"pattern": None},
        {"format_version": True},
        {"format_version": 0},
        {"format_version": 1.0},
        {"format_version": "1"},
    ],
)
def test_malformed_config(tmp_path: Path, change: dict[str, object]) -> None:
    write_checkpoint(tmp_path / "out")
    edit_config(tmp_path / "out", change)
    with pytest.raises(CheckpointError):
        CheckpointReader(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"format": ["nm"]},
        {"dtype": 3},
        {"dtype": "float64"},
        {"shape": [True, 8]},
        {"shape": "88"},
        {"attributes": []},
        {"attributes": {"pattern": ["2:4"]}},
        {"attributes": {"pattern": 3}},
        {"attributes": {}},
    ],
)
def test_malformed_fact(tmp_path: Path, change: dict[str, object]) -> None:
    write_checkpoint(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    entry = config["quantization_config"]["modules"]["a.b"] | change
    edit_config(tmp_path / "out", {"modules": {"a.b": entry}})
    with pytest.raises(CheckpointError, match=r"a\.b"):
        CheckpointReader(tmp_path / "out")


@pytest.mark.parametrize("section", ["x", 3, [1], True])
def test_quantization_config_that_is_no_object(tmp_path: Path, section: object) -> None:
    write_checkpoint(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps({"quantization_config": section}))
    with pytest.raises(CheckpointError, match="quantization_config"):
        CheckpointReader(tmp_path / "out")


@pytest.mark.parametrize("shard", [3, None, ["a"], "\0", "x" * 5000, "", ".."])
def test_shard_name_that_is_none(tmp_path: Path, shard: object) -> None:
    write_checkpoint(tmp_path / "out")
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"c.weight": shard}}))
    with pytest.raises(CheckpointError):
        CheckpointReader(tmp_path / "out")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position in a JSON document."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.sampled_from(["nm", "csr", "bitmask", "bfloat16", "2:4", "hopsparse", "c.weight"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


@given(st.data())
@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_mutated_json_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """One position of config.json or the index becomes anything or nothing."""
    out = tmp_path / "out"
    if not out.exists():
        write_checkpoint(out)
        (out / "backup").mkdir()
        for path in out.glob("*.json"):
            (out / "backup" / path.name).write_bytes(path.read_bytes())
    name = data.draw(st.sampled_from(["config.json", "model.safetensors.index.json"]))
    document = json.loads((out / "backup" / name).read_text())
    changed = copy.deepcopy(document)
    place = data.draw(st.sampled_from(places(document)))
    value = data.draw(JSON)
    if not place:
        changed = value
    else:
        owner = changed
        for key in place[:-1]:
            owner = owner[key]
        if data.draw(st.booleans()):
            owner[place[-1]] = value
        else:
            del owner[place[-1]]
    (out / name).write_text(json.dumps(changed))
    try:
        with CheckpointReader(out) as reader:
            for module in reader.sparse.modules if reader.sparse else ():
                reader.matrix(module)
            for tensor in reader.names():
                reader.load(tensor)
    except CheckpointError:
        pass
    finally:
        (out / name).write_bytes((out / "backup" / name).read_bytes())

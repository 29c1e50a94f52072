from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hopsparse.errors import CheckpointError
from hopsparse.formats import NM
from hopsparse.models._files import write_json, write_tensors
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


def test_nothing_appears_before_the_commit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with CheckpointWriter(out) as writer:
        writer.write_shard("model-00001-of-00001.safetensors", {"w": torch.ones(1)})
    assert not out.exists()
    assert (tmp_path / "out.partial").is_dir()
    with pytest.raises(CheckpointError, match="--resume to continue it, or --overwrite"):
        CheckpointWriter(out)


def test_two_writers(tmp_path: Path) -> None:
    with (
        CheckpointWriter(tmp_path / "out"),
        pytest.raises(CheckpointError, match="being written by another process"),
        CheckpointWriter(tmp_path / "out", resume=True),
    ):
        pass


def test_full_disk(tmp_path: Path) -> None:
    """/dev/full answers every write as a full disk does."""
    (tmp_path / "w.json.tmp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="no space left.*--resume"):
        write_json(tmp_path / "w.json", {"w": 1})
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_a_shard(tmp_path: Path) -> None:
    """A limit on the size of files is real and needs no privileges; it is set in a child."""
    program = """
        import resource, signal, sys
        from pathlib import Path
        import torch
        from hopsparse.errors import CheckpointError
        from hopsparse.models._files import write_tensors
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            write_tensors(Path(sys.argv[1]), {"w": torch.ones(4096)})
        except CheckpointError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "w.safetensors")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no space left" in result.stdout
    assert list(tmp_path.iterdir()) == []


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

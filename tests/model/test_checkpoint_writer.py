from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hopsparse.errors import CheckpointError
from hopsparse.models._files import copy_extras, write_tensors
from hopsparse.models._resume import RunState
from hopsparse.models.checkpoint import (
    CheckpointWriter,
    SparseConfig,
)


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


@pytest.mark.parametrize(
    ("resumable", "hint"),
    [(True, "with --resume"), (False, "run the same command again.")],
)
def test_no_room(tmp_path: Path, resumable: bool, hint: str) -> None:
    """A limit on the size of files is real and needs no privileges; it is set in a child."""
    program = """
        import resource, signal, sys
        import torch
        from hopsparse.errors import CheckpointError
        from hopsparse.models.checkpoint import CheckpointWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for write in (
            lambda writer: writer.write_shard("w.safetensors", {"w": torch.ones(4096)}),
            lambda writer: writer.write_json("w.json", "w" * 5000),
        ):
            try:
                resumable = sys.argv[2] == "True"
                with CheckpointWriter(sys.argv[1], overwrite=True, resumable=resumable) as writer:
                    write(writer)
            except CheckpointError as error:
                print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "out")]
    result = subprocess.run([*command, str(resumable)], capture_output=True, text=True, check=True)
    assert result.stdout.count("no space left") == 2
    assert result.stdout.count(hint) == 2
    assert ("--resume" in result.stdout) == resumable
    # No part was finished: there is nothing to keep.
    assert not list(tmp_path.iterdir())


def write_checkpoint(out: Path) -> None:
    config = SparseConfig("2:4", "imported", {}, {})
    with CheckpointWriter(out) as writer:
        writer.write_shard("model-00001-of-00001.safetensors", {"c.weight": torch.ones(2, 3)})
        writer.commit({"model_type": "llama", "quantization_config": config.to_json()})


def foreign(folder: Path) -> Path:
    folder.mkdir()
    (folder / "thesis.txt").write_text("all of it")
    return folder


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_during_the_run_is_left_alone(
    tmp_path: Path, overwrite: bool
) -> None:
    out = tmp_path / "out"
    with CheckpointWriter(out, overwrite=overwrite) as writer:
        writer.write_json("run-state.json", {})
        writer.remove("run-state.json")
        foreign(out)
        with pytest.raises(CheckpointError, match="exists"):
            writer.commit({})
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    # Nothing of the run is lost either.
    assert (tmp_path / "out.partial" / "run-state.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]


@pytest.mark.parametrize("options", [{"overwrite": True}, {"resume": True}, {}])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_partial_folder_of_someone_else_is_left_alone(
    tmp_path: Path, options: dict[str, bool], when: str
) -> None:
    writer = CheckpointWriter(tmp_path / "out", **options) if when == "between" else None
    theirs = foreign(tmp_path / "out.partial")
    with (
        pytest.raises(CheckpointError, match="was not left by hopsparse"),
        writer or CheckpointWriter(tmp_path / "out", **options),
    ):
        pass
    assert (theirs / "thesis.txt").read_text() == "all of it"


def test_overwriting_clears_subfolders_of_an_interrupted_run(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.write_shard("model.safetensors", {"w": torch.ones(1)})
        (writer.partial / "additional_chat_templates").mkdir()
        (writer.partial / "additional_chat_templates" / "tool.jinja").write_text("{}")
    with CheckpointWriter(tmp_path / "out", overwrite=True) as writer:
        writer.commit({})
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"config.json", "model.safetensors.index.json"}


def test_resuming_sweeps_what_a_killed_process_was_writing(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.write_json("run-state.json", {})
        (writer.partial / ".w.safetensors.abc.tmp").write_text("half")
    with CheckpointWriter(tmp_path / "out", resume=True) as writer:
        names = {path.name for path in writer.partial.iterdir()}
    assert names == {".lock", ".hopsparse-unfinished", "run-state.json"}


def test_what_a_killed_conversion_left_is_no_hindrance(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", resumable=False).__enter__()
    writer.write_json("half.json", {})
    writer._stack.close()  # As the kernel does for a killed process.
    write_checkpoint(tmp_path / "out")
    assert not (tmp_path / "out" / "half.json").exists()


def test_overwriting_beside_what_an_earlier_overwrite_left(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "out")
    kept = foreign(tmp_path / "out.replaced")
    with CheckpointWriter(tmp_path / "out", overwrite=True) as writer:
        writer.commit({"model_type": "new"})
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "new"}
    assert (kept / "thesis.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.replaced"]


def test_the_lock_is_held_until_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second writer that comes just before the rename is refused, not let in."""
    refused = []

    def rename(self: Path, target: Path) -> Path:
        with pytest.raises(CheckpointError, match="being written by another process"):
            CheckpointWriter(tmp_path / "out", resume=True).__enter__()
        refused.append(self.name)
        os.rename(self, target)
        return target

    with CheckpointWriter(tmp_path / "out") as writer:
        monkeypatch.setattr(Path, "rename", rename)
        writer.commit({})
    assert refused == ["out.partial"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors.index.json"}


def test_a_lock_that_went_with_its_folder_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened before the rename, locked after it: the second writer must not go on."""
    (tmp_path / "out.partial").mkdir()
    flock = fcntl.flock

    def late(file: object, operation: int) -> None:
        (tmp_path / "out.partial").rename(tmp_path / "out")
        flock(file, operation)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="being written by another process"):
        CheckpointWriter(tmp_path / "out").__enter__()


def test_copy_extras(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    for name in (
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "config.json",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        "report.json",
        "recover.json",
        "plan.json",
        "model.safetensors",
        "original/params.json",
        "original/consolidated.pth",
        ".cache/meta.json",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    out.mkdir()
    copy_extras(source, out)
    copied = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert copied == {
        "plan.json",
        "tokenizer.json",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
    }
    assert (out / "additional_chat_templates/tool.jinja").read_text().endswith("tool.jinja")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"identity": [], "shards": []},
        {"identity": {}, "shards": {}},
        {"identity": {}, "shards": [3]},
        {"identity": {}, "shards": [{"file": "a", "sha256": "", "entries": {}, "layers": [{}]}]},
        {"identity": {}, "shards": [{"file": "../a", "sha256": "", "entries": {}, "layers": []}]},
        {"identity": {}, "shards": [{"file": 3, "sha256": "", "entries": {}, "layers": []}]},
        {"identity": {}, "shards": [{"file": "a", "sha256": "", "entries": [], "layers": []}]},
        {"identity": {}, "shards": [{"file": "a", "entries": {}, "layers": []}]},
    ],
)
def test_damaged_run_state(tmp_path: Path, state: object) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.write_json("run-state.json", state)
        with pytest.raises(CheckpointError, match="run-state.json is damaged"):
            RunState.resume(writer, {})


def interrupted(out: Path) -> Path:
    """What a run leaves that finished one block; the folder of its shards."""
    with CheckpointWriter(out) as writer:
        writer.write_shard("model-1.safetensors", {"a": torch.ones(4)})
        RunState({}).add(("model-1.safetensors", {}), [], writer)
    return writer.partial


def test_only_shards_of_the_run_enter_the_checkpoint(tmp_path: Path) -> None:
    partial = interrupted(tmp_path / "out")
    write_tensors(partial / "theirs.safetensors", {"z": torch.ones(1)})
    with CheckpointWriter(tmp_path / "out", resume=True) as writer:
        RunState.resume(writer, {})
        writer.write_shard("model-2.safetensors", {"b": torch.ones(1)})
        writer.commit({})
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    assert not (tmp_path / "out" / "theirs.safetensors").exists()
    for name, digest in index["metadata"]["sha256"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out") as writer:
        for name in ("model-1.safetensors", "model-2.safetensors"):
            writer.write_shard(name, {"a": torch.ones(1)})
        with pytest.raises(CheckpointError, match="tensor a is in both model-1"):
            writer.commit({})


def test_a_finished_shard_that_was_damaged_since(tmp_path: Path) -> None:
    path = interrupted(tmp_path / "out") / "model-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with (
        CheckpointWriter(tmp_path / "out", resume=True) as writer,
        pytest.raises(CheckpointError, match=r"model-1.*is damaged.*--overwrite"),
    ):
        RunState.resume(writer, {})
    assert path.exists()


def test_a_run_that_finished_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="input"), CheckpointWriter(tmp_path / "out"):
        raise ValueError("input")
    assert not list(tmp_path.iterdir())


def test_a_second_run_beside_the_first_is_told_so(tmp_path: Path) -> None:
    with (
        CheckpointWriter(tmp_path / "out"),
        pytest.raises(CheckpointError, match="being written by another process"),
    ):
        CheckpointWriter(tmp_path / "out")


@pytest.mark.parametrize("out", ["", ".", "/", "..", "a/.."])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_result_without_a_name(out: str, overwrite: bool) -> None:
    with pytest.raises(CheckpointError, match="a path that ends in a new name"):
        CheckpointWriter(out, overwrite=overwrite)


@pytest.mark.parametrize("name", ["out", "out.partial"])
@pytest.mark.parametrize("target", ["nothing", "empty"])
def test_symbolic_links_are_refused_at_once(tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(CheckpointError, match=f"{name} is a symbolic link"):
        CheckpointWriter(tmp_path / "out", overwrite=True)

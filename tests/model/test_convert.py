"""Conversion and verification of checkpoints from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hopsparse.errors import ArgumentError, CheckpointError, FormatError, VerificationError
from hopsparse.formats import NM, SparseMatrix, read_matrices, write_matrices
from hopsparse.models._files import write_json
from hopsparse.models.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    ModuleEntry,
    SparseConfig,
)
from hopsparse.models.convert import TARGETS, convert_checkpoint
from hopsparse.models.sparse24 import compress, export_sparse24, import_sparse24, read_packed
from hopsparse.models.verify import verify_checkpoint

FULL = torch.ones(8, 16)


def weight_2_4(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    weight = torch.randn(8, 16)
    groups = weight.view(-1, 4)
    groups[torch.rand_like(groups).argsort(-1) < 2] = 0
    return weight


def write_across_shards(out: Path) -> Tensor:
    """A checkpoint whose only matrix has its values in one shard and its meta in another."""
    weight = weight_2_4()
    matrix = NM.from_dense(weight)
    config = SparseConfig("2:4", "imported", {"a.proj": ModuleEntry.of(matrix)}, {"b": "by name"})
    with CheckpointWriter(out) as writer:
        writer.write_shard("model-1.safetensors", {"a.proj.meta": matrix.meta})
        writer.write_shard(
            "model-2.safetensors",
            {"a.proj.values": matrix.values, "a.proj.bias": torch.ones(8), "b.weight": FULL},
        )
        (writer.partial / "additional_chat_templates").mkdir()
        (writer.partial / "additional_chat_templates" / "tool.jinja").write_text("{}")
        writer.commit({"model_type": "none", "quantization_config": config.to_json()})
    return weight


def write_theirs(folder: Path, tensors: dict[str, Tensor], form: str) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sparsity = {"format": form, "sparsity_structure": "2:4", "ignore": []}
    section = {"quant_method": "compressed-tensors", "sparsity_config": sparsity}
    write_json(folder / "config.json", {"model_type": "none", "quantization_config": section})
    return folder


def packed(*modules: str) -> dict[str, Tensor]:
    return {
        f"{module}.{part}": tensor
        for seed, module in enumerate(modules)
        for part, tensor in compress(weight_2_4(seed)).items()
    }


@pytest.mark.parametrize("to", TARGETS)
def test_a_matrix_in_two_shards_is_converted_once(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = write_across_shards(tmp_path / "in")
    read = []
    original = CheckpointReader.matrix

    def counted(self: CheckpointReader, module: str) -> SparseMatrix:
        read.append(module)
        return original(self, module)

    monkeypatch.setattr(CheckpointReader, "matrix", counted)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to)
    assert (done.kind, done.layers, done.kept_dense) == ("hopsparse", 1, {"b": "by name"})
    assert read == ["a.proj"]
    monkeypatch.undo()
    stored = [name for path in (tmp_path / "out").glob("*.safetensors") for name in load_file(path)]
    assert len(stored) == len(set(stored))
    assert {"a.proj.bias", "b.weight"} <= set(stored)
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").exists()
    with CheckpointReader(tmp_path / "out") as reader:
        if to == "dense":
            assert torch.equal(reader.load("a.proj.weight"), weight)
        elif to == "sparse-24-bitmask":
            assert torch.equal(read_packed(reader, "a.proj").to_dense(), weight)
        else:
            assert reader.sparse is not None
            # It was nm, and stays so where nobody asks for another format.
            wanted = "nm" if to == "auto" else to
            assert reader.sparse.modules["a.proj"].format == wanted
            assert torch.equal(reader.matrix("a.proj").to_dense(), weight)


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    write_across_shards(tmp_path / "in")
    (tmp_path / "in" / "model.safetensors.index.json").unlink()
    shard = tmp_path / "in" / "model-1.safetensors"
    shard.rename(tmp_path / "in" / "model.safetensors")
    for to in ("csr", "sparse-24-bitmask"):
        with pytest.raises(CheckpointError, match=r"a\.proj\.values"):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to)
    assert not list(tmp_path.glob("out*"))


def test_files(tmp_path: Path) -> None:
    weight = weight_2_4()
    save_file({"w": weight}, tmp_path / "a.safetensors")
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="nm")
    (found,) = read_matrices(tmp_path / "b.safetensors").values()
    assert isinstance(found, NM)
    assert torch.equal(found.to_dense(), weight)
    assert [check.name for check in verify_checkpoint(tmp_path / "b.safetensors")] == ["w"]
    with pytest.raises(CheckpointError, match="exists"):
        convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="csr")


@pytest.mark.parametrize(
    "options",
    [
        {"to": "zip"},
        {"to": "csr", "pattern": "2:4"},
        {"to": "nm", "block": (4, 4)},
        {"to": "nm", "pattern": "unstructured:0.5"},
    ],
)
def test_options_that_mean_nothing(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        convert_checkpoint(tmp_path, tmp_path / "out", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("out", ["", ".", "/"])
def test_a_result_without_a_name(tmp_path: Path, out: str) -> None:
    source = tmp_path / "w.safetensors"
    save_file({"w": weight_2_4()}, source)
    with pytest.raises(CheckpointError, match="a path that ends in a new name"):
        convert_checkpoint(source, out, to="nm", overwrite=True)


def test_a_result_that_is_a_symbolic_link(tmp_path: Path) -> None:
    source, link = tmp_path / "w.safetensors", tmp_path / "out.safetensors"
    save_file({"w": weight_2_4()}, source)
    link.symlink_to(source)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        convert_checkpoint(source, link, to="nm", overwrite=True)


def test_failed_imports_and_exports_leave_nothing(tmp_path: Path) -> None:
    tensors = packed("a", "b")
    tensors["b.bitmask"] = tensors["b.bitmask"] | 15
    theirs = write_theirs(tmp_path / "theirs", tensors, "sparse-24-bitmask")
    with pytest.raises(CheckpointError, match="b in .* is damaged"):
        import_sparse24(theirs, tmp_path / "out")
    write_across_shards(tmp_path / "ours")
    path = tmp_path / "ours" / "model-1.safetensors"
    save_file({"a.proj.meta": load_file(path)["a.proj.meta"] * 0}, path)
    with pytest.raises(FormatError):
        export_sparse24(tmp_path / "ours", tmp_path / "out")
    with pytest.raises(FormatError):
        convert_checkpoint(tmp_path / "ours", tmp_path / "out", to="csr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.parametrize("ignore", [3, "x", [3], ["re:("]])
def test_ignore_that_is_no_list_of_names(tmp_path: Path, ignore: object) -> None:
    theirs = write_theirs(tmp_path / "theirs", {"a.proj.weight": weight_2_4()}, "dense")
    config = {"sparsity_config": {"format": "dense", "ignore": ignore}}
    write_json(theirs / "config.json", {"quantization_config": config})
    with pytest.raises(CheckpointError, match="ignore of the sparsity_config"):
        import_sparse24(theirs, tmp_path / "out")


def test_packed_checkpoint_passes(tmp_path: Path) -> None:
    theirs = write_theirs(tmp_path / "theirs", packed("a", "b"), "sparse-24-bitmask")
    found = {check.name: check.detail for check in verify_checkpoint(theirs)}
    assert found["a"] == found["b"] == "sparse-24-bitmask 8 x 16, valid"


def move_bit(mask: Tensor) -> Tensor:
    """Three bits in one group and one in the next: the total is right."""
    mask[2, 0] = 0b0001_0111
    return mask


@pytest.mark.parametrize(
    ("part", "damage", "words"),
    [
        ("bitmask", move_bit, "row 2, group 0 has 3 bits set"),
        ("bitmask", lambda mask: mask | 15, "bits set"),
        ("bitmask", lambda mask: mask[:, :-1], "mask"),
        ("compressed", lambda values: values[:, :-1], "compressed"),
        ("compressed", lambda values: values * float("nan"), "not finite"),
        ("compressed", lambda values: None, "no tensor 'a.compressed'"),
        ("shape", lambda shape: shape[:1], "shape"),
        ("shape", lambda shape: shape * -1, "shape"),
        ("shape", lambda shape: shape.double(), "shape"),
    ],
)
def test_damaged_packed_modules_are_found(
    tmp_path: Path, part: str, damage: Callable[[Tensor], Tensor | None], words: str
) -> None:
    tensors = packed("a")
    damaged = damage(tensors.pop(f"a.{part}"))
    if damaged is not None:
        tensors[f"a.{part}"] = damaged.contiguous()
    theirs = write_theirs(tmp_path / "theirs", tensors, "sparse-24-bitmask")
    with pytest.raises(VerificationError, match="the first: a: ") as caught:
        verify_checkpoint(theirs)
    assert words in caught.value.got


def test_damage_and_absence_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        verify_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError):
        verify_checkpoint(tmp_path)
    write_matrices(tmp_path / "w.safetensors", {"w": NM.from_dense(weight_2_4())})
    whole = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(whole[:100])
    with pytest.raises(VerificationError, match="truncated or corrupt"):
        verify_checkpoint(tmp_path / "w.safetensors")
    write_across_shards(tmp_path / "in")
    write_json(tmp_path / "in" / "config.json", {"quantization_config": "x"})
    with pytest.raises(VerificationError, match="quantization_config"):
        verify_checkpoint(tmp_path / "in")

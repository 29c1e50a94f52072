from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hopsparse.formats import FORMATS, NM, NMPattern, SparseMatrix, read_matrices, write_matrices
from hopsparse.models.checkpoint import CheckpointReader
from hopsparse.prune import magnitude
from tests.cli.conftest import Run
from tests.helpers.patterns import blocks, two_four

RunJson = Callable[..., Any]


def dense_weights(folder: Path) -> dict[str, Tensor]:
    """Every sparse weight of a checkpoint as a dense tensor."""
    with CheckpointReader(folder) as reader:
        assert reader.sparse is not None
        return {name: reader.matrix(name).to_dense() for name in reader.sparse.modules}


@pytest.fixture
def matrix_file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    weight = NM.from_dense(magnitude(torch.randn(32, 64), NMPattern(2, 4)))
    write_matrices(path, {"w": weight, "bias": torch.ones(32)})
    return path


@pytest.mark.parametrize("to", ["bitmask", "csr", "csc", "hyb", "bsr", "bsr24", "nm"])
def test_checkpoint_keeps_every_value(
    run_json: RunJson, sparse_model: Path, tmp_path: Path, to: str
) -> None:
    out = tmp_path / to
    extra = ("--block", "16x16") if to.startswith("bsr") else ()
    found = run_json("convert", sparse_model, "-o", out, "--to", to, *extra)
    assert found["layers"] == 14
    before, after = dense_weights(sparse_model), dense_weights(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (out / "tokenizer.json").exists()
    # A report is about the run that made the source.
    assert not (out / "report.json").exists()
    assert run_json("verify", out)["ok"]


def test_dense_is_a_plain_checkpoint(
    run_json: RunJson, sparse_model: Path, dense_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "dense"
    run_json("convert", sparse_model, "-o", out, "--to", "dense")
    with CheckpointReader(out) as ours, CheckpointReader(dense_model) as source:
        assert ours.sparse is None
        assert "quantization_config" not in ours.config
        assert ours.names() == source.names()
        for name, weight in dense_weights(sparse_model).items():
            assert torch.equal(ours.load(f"{name}.weight"), weight)


def test_sparse_24_bitmask_and_back(run_json: RunJson, sparse_model: Path, tmp_path: Path) -> None:
    away, back, other = tmp_path / "away", tmp_path / "back", tmp_path / "other"
    run_json("convert", sparse_model, "-o", away, "--to", "sparse-24-bitmask")
    found = run_json("inspect", away)
    assert (found["kind"], len(found["layers"])) == ("sparse-24-bitmask", 14)
    run_json("convert", away, "-o", back, "--to", "nm")
    run_json("convert", away, "-o", other, "--to", "csr")
    wanted = dense_weights(sparse_model)
    for folder in (back, other):
        found_weights = dense_weights(folder)
        assert all(torch.equal(found_weights[name], wanted[name]) for name in wanted)
    # The way over a temporary folder leaves nothing behind.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["away", "back", "other"]


@pytest.mark.parametrize("to", sorted({*FORMATS} - {"dense"}))  # A plain tensor on the outside.
def test_file_of_matrices(run_json: RunJson, matrix_file: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out.safetensors"
    run_json("convert", matrix_file, "-o", out, "--to", to)
    items, source = read_matrices(out, validate=True), read_matrices(matrix_file)
    assert isinstance(items["w"], SparseMatrix)
    assert isinstance(source["w"], SparseMatrix)
    assert items["w"].name == to
    assert torch.equal(items["w"].to_dense(), source["w"].to_dense())
    assert torch.equal(items["bias"], torch.ones(32))  # type: ignore[arg-type]


def test_plain_tensors_become_matrices_and_dense_again(run: Run, tmp_path: Path) -> None:
    source, packed, again = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "c"))
    weight = magnitude(torch.randn(16, 24), NMPattern(6, 8))
    save_file({"w": weight}, source)
    first = run("convert", source, "-o", packed, "--to", "nm", "--pattern", "6:8")
    second = run("convert", packed, "-o", again, "--to", "dense")
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "1 matrices as nm" in first.stdout
    assert torch.equal(load_file(again)["w"], weight)


def test_not_2_4_is_refused_with_row_and_group(run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": torch.ones(4, 8)}, source)
    result = run("convert", source, "-o", out, "--to", "nm")
    assert result.exit_code == 2
    assert "w: row 0, group 0" in result.stderr
    assert not out.exists()


def test_dense_checkpoint_is_sent_to_sparsify(run: Run, dense_model: Path, tmp_path: Path) -> None:
    for to in ("nm", "csr"):
        result = run("convert", dense_model, "-o", tmp_path / "out", "--to", to)
        assert result.exit_code == 2
        assert "sparsify" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--to", "zip"), "zip"),
        (("--to", "csr", "--pattern", "2:4"), "--pattern"),
        (("--to", "bsr", "--block", "32"), "block '32'"),
        (("--to", "nm", "--pattern", "unstructured:0.5"), "unstructured"),
        (("--to", "sparse-24-bitmask", "--overwrite"), "--overwrite"),
    ],
)
def test_bad_options_are_refused(
    run: Run, sparse_model: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    result = run("convert", sparse_model, "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["own", "imported"])
def test_failure_on_the_way_leaves_nothing(
    run: Run, sparse_model: Path, tmp_path: Path, kind: str
) -> None:
    source = sparse_model
    if kind == "imported":
        source = tmp_path / "away"
        run("convert", sparse_model, "-o", source, "--to", "sparse-24-bitmask")
    folder = tmp_path / "results"
    folder.mkdir()
    result = run("convert", source, "-o", folder / "out", "--to", "nm", "--pattern", "1:4")
    assert result.exit_code == 2
    assert "model.layers.0" in result.stderr
    assert "at most 1 in every 4" in result.stderr
    assert list(folder.iterdir()) == []


def test_interrupted_sparsify_run_is_not_touched(
    run: Run, sparse_model: Path, tmp_path: Path
) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "run-state.json").write_text("{}")
    result = run("convert", sparse_model, "-o", tmp_path / "out", "--to", "csr")
    assert result.exit_code == 2
    assert (partial / "run-state.json").exists()


def test_existing_result_is_kept_unless_told(run: Run, matrix_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"precious")
    command = ("convert", matrix_file, "-o", out, "--to", "csr")
    assert run(*command).exit_code == 2
    assert out.read_bytes() == b"precious"
    assert run(*command, "--overwrite").exit_code == 0
    assert run("convert", matrix_file, "-o", matrix_file, "--to", "csr").exit_code == 2
    assert run("convert", matrix_file, "-o", tmp_path / "out.bin", "--to", "csr").exit_code == 2


def test_auto_chooses_for_each_matrix_and_says_why(
    run: Run, run_json: RunJson, tmp_path: Path
) -> None:
    source, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    weights = {
        "blocks": blocks((4, 8), 64, 0.25).bfloat16(),
        "half": two_four(64, 64).bfloat16(),
        "few": torch.eye(128),
        "full": torch.ones(32, 32),
    }
    save_file(weights, source)
    found = run_json("convert", source, "-o", out, "--to", "auto")
    formats = {name: each["format"] for name, each in found["chosen"].items()}
    assert formats == {"blocks": "bsr", "half": "nm", "few": "csr", "full": "dense"}
    assert found["chosen"]["blocks"]["block"] == [64, 64]
    items = read_matrices(out, validate=True)
    for name, weight in weights.items():
        item = items[name]
        stored = item.to_dense() if isinstance(item, SparseMatrix) else item
        assert torch.equal(stored, weight)
        assert (item.name if isinstance(item, SparseMatrix) else "dense") == formats[name]
    told = run("convert", source, "-o", out, "--to", "auto", "--overwrite").stdout
    assert "bsr 64x64: blocks: the fewest bytes, 25 % of dense" in told
    assert "no kernel yet" not in told  # Each of these formats has one.
    assert "nm: half: the fewest bytes, 56.2 % of dense" in told
    assert out.stat().st_size < source.stat().st_size


def test_auto_keeps_what_a_kernel_runs(
    run_json: RunJson, sparse_model: Path, matrix_file: Path, tmp_path: Path
) -> None:
    found = run_json("convert", sparse_model, "-o", tmp_path / "auto", "--to", "auto")
    assert {each["format"] for each in found["chosen"].values()} == {"nm"}
    assert len(found["chosen"]) == found["layers"] == 14
    before, after = dense_weights(sparse_model), dense_weights(tmp_path / "auto")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run_json("verify", tmp_path / "auto")["ok"]
    bits, back = tmp_path / "bits", tmp_path / "back"
    run_json("convert", sparse_model, "-o", bits, "--to", "csr")
    again = run_json("convert", bits, "-o", back, "--to", "auto")
    # Layers so small run faster dense, and a bitmask has no padding.
    assert {each["format"] for each in again["chosen"].values()} == {"bitmask"}
    assert again["bytes_after"] < found["bytes_after"]
    file = run_json("convert", matrix_file, "-o", tmp_path / "f.safetensors", "--to", "auto")
    assert file["chosen"]["w"]["why"] == "it is nm 2:4 already, which has a kernel"


def test_foreign_files_become_matrices(run_json: RunJson, run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "m.mtx", tmp_path / "m.safetensors"
    source.write_text("%%MatrixMarket matrix coordinate pattern general\n2 3 2\n1 1\n2 3\n")
    found = run_json("convert", source, "-o", out, "--to", "csr")
    assert (found["kind"], found["layers"]) == ("mtx", 1)
    assert found["notes"] == ["m: the file has no values: all are one"]
    matrix = read_matrices(out, validate=True)["m"]
    assert isinstance(matrix, SparseMatrix)
    assert matrix.to_dense().tolist() == [[1, 0, 0], [0, 0, 1]]
    assert (
        "note: m: the file has no values"
        in run("convert", source, "-o", out, "--to", "auto", "--overwrite").stdout
    )
    assert run("verify", source).exit_code == 2


def test_a_graph_is_never_made_dense(run: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "graph.mtx", tmp_path / "graph.safetensors"
    head = "%%MatrixMarket matrix coordinate real general\n1000000 1000000 1\n"
    source.write_text(head + "1000000 5 2.5\n")
    result = run("convert", source, "-o", out, "--to", "nm")
    assert result.exit_code == 2
    assert "by a dense copy" in result.stderr
    assert not out.exists()
    assert run("convert", source, "-o", out, "--to", "auto").exit_code == 0
    matrix = read_matrices(out, validate=True)["graph"]
    assert isinstance(matrix, SparseMatrix)
    assert (matrix.name, matrix.nnz, matrix.shape) == ("csr", 1, (1_000_000, 1_000_000))

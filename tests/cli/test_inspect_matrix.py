"""`hopsparse inspect` of one matrix: every kind of file, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.io
import scipy.sparse
import torch
from safetensors.torch import save_file
from torch import Tensor

import hopsparse.report.spy as spy
from hopsparse.errors import ArgumentError, UnsupportedError
from hopsparse.formats import CSR, write_matrices
from hopsparse.measure.structure import analyse
from tests.cli.conftest import Run
from tests.helpers.patterns import banded, blocks, power_law_rows, shuffled_columns, two_four

RunJson = Callable[..., Any]


def write(dense: Tensor, path: Path) -> Path:
    """The matrix in the kind of file that the suffix says."""
    sparse = scipy.sparse.csr_array(dense.numpy())
    if path.suffix == ".mtx":
        scipy.io.mmwrite(path, sparse)
    elif path.suffix == ".npz":
        scipy.sparse.save_npz(path, sparse)
    elif path.suffix == ".smtx":
        head = f"{dense.shape[0]}, {dense.shape[1]}, {sparse.nnz}"
        lists = (" ".join(map(str, part.tolist())) for part in (sparse.indptr, sparse.indices))
        path.write_text("\n".join([head, *lists]) + "\n")
    elif path.suffix == ".pt":
        torch.save({path.stem: dense}, path)
    else:
        save_file({path.stem: dense}, path)
    return path


SUFFIXES = ("mtx", "smtx", "npz", "pt", "safetensors")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_has_the_same_structure(
    run_json: RunJson, tmp_path: Path, suffix: str
) -> None:
    dense = blocks((4, 6), 32, 0.25)
    found = run_json("inspect", write(dense, tmp_path / f"w.{suffix}"))
    (one,) = found["analyses"]
    assert one["name"] == "w"
    assert found["matrices"] == ["w"]
    structure = one["structure"]
    assert (structure["shape"], structure["nnz"]) == ([128, 192], 6 * 32 * 32)
    assert (structure["looks"], structure["natural_block"]) == ("blocks", 32)
    assert structure["blocks"][2] == {
        "side": 32, "kept": 6, "total": 24, "fill": 1.0, "most": structure["blocks"][2]["most"],
        "density": 0.25,
    }  # fmt: skip
    assert one["auto"]["format"] == "bsr"
    assert one["auto"]["block"] == [32, 32]
    assert [ranking["tokens"] for ranking in one["rankings"]] == [16, 256, 2048]
    assert found["totals"]["total_bytes"] > 0


def test_tables_say_what_is_there(run: Run, tmp_path: Path) -> None:
    path = write(shuffled_columns(two_four(256, 256)), tmp_path / "w.mtx")
    result = run("inspect", path, "--tokens", "16")
    assert result.exit_code == 0
    out = result.stdout
    assert "w: 256 x 256 of float32, 32768 non-zeros, density 0.5, looks" in out
    assert "100 % with columns matched" in out
    assert "rows: 128 to 128 non-zeros, mean 128, variation 0.00, 0 empty" in out
    assert "16 tokens in bfloat16 on h200, predicted, not measured" in out
    assert "not nm 2:4: 2:4 holds" in out
    assert "convert --to auto stores bitmask" in out
    # The format without a kernel says so.
    assert re.findall(r"^(\w+) .*none yet", out, re.MULTILINE) == ["bitmask"]


def test_kernels_that_exist_are_named(run_json: RunJson, tmp_path: Path) -> None:
    from hopsparse.models.auto import kernels

    path = write(two_four(128, 128), tmp_path / "w.npz")
    (one,) = run_json("inspect", path, "--tokens", "16", "--dtype", "float16")["analyses"]
    named = {each["kernel"] for each in one["rankings"][0]["candidates"]} - {""}
    assert named <= {*kernels(), "torch.nn.functional.linear"}
    assert "spmm_nm" in named
    assert one["rankings"][0]["dtype"] == "float16"


def test_of_several_matrices_those_are_looked_into_that_are_named(
    run: Run, run_json: RunJson, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a.up": banded(64, 1, 1), "a.down": torch.eye(64), "bias": torch.ones(3)}, path)
    assert run_json("inspect", path)["analyses"] == []
    assert "--matrix NAME looks into one" in run("inspect", path).stdout
    found = run_json("inspect", path, "--matrix", "*.up")
    assert [each["name"] for each in found["analyses"]] == ["a.up"]
    assert found["analyses"][0]["structure"]["looks"] == "banded"
    both = run_json("inspect", path, "--matrix", "*")
    assert {each["structure"]["looks"] for each in both["analyses"]} == {"banded", "diagonal"}
    missing = run("inspect", path, "--matrix", "b.*")
    assert missing.exit_code == 2
    assert "a.up" in missing.stderr


def test_layers_of_a_checkpoint_are_looked_into(
    run_json: RunJson, sparse_model: Path, dense_model: Path, tmp_path: Path
) -> None:
    found = run_json("inspect", sparse_model, "--matrix", "*.0.mlp.up_proj", "--tokens", "16")
    (one,) = found["analyses"]
    assert one["structure"]["two_four"]["excess"] == 0
    assert (one["format"], one["dtype"]) == ("nm", "bfloat16")
    assert len(found["matrices"]) == 14
    (one,) = run_json("inspect", dense_model, "--matrix", "*.0.mlp.up_proj.weight")["analyses"]
    assert one["structure"]["looks"] == "dense"
    away = tmp_path / "away"
    run_json("convert", sparse_model, "-o", away, "--to", "sparse-24-bitmask")
    (one,) = run_json("inspect", away, "--matrix", "*.0.mlp.up_proj")["analyses"]
    assert one["structure"]["two_four"]["excess"] == 0


def test_stored_matrix_of_a_file(run_json: RunJson, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_matrices(path, {"w": CSR.from_dense(power_law_rows(256, 256)), "b": torch.ones(3)})
    found = run_json("inspect", path)
    assert found["layers"][0]["format"] == "csr"
    assert found["analyses"][0]["structure"]["looks"] == "power law"


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_plot(run: Run, tmp_path: Path, suffix: str) -> None:
    path = write(blocks((4, 6), 32, 0.25), tmp_path / "w.mtx")
    plot = tmp_path / f"spy.{suffix}"
    assert run("inspect", path, "--plot", plot).exit_code == 0
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
    content = plot.read_bytes()
    assert content.startswith(starts[suffix])
    if suffix == "svg":
        text = content.decode()
        assert "whole, blocks of 32" in text
        assert "kept blocks of 32" in text
        assert "rows by non-zeros" in text
        assert run("inspect", path, "--plot", plot).exit_code == 0
        assert plot.read_bytes() == content
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([plot.name, "w.mtx"])


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (3, 5)])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_plot_of_thin_and_empty_matrices(
    tmp_path: Path, shape: tuple[int, int], value: float
) -> None:
    matrix = CSR.from_dense(torch.full(shape, value))
    spy.write_plot(matrix, analyse(matrix), tmp_path / "spy.png")
    assert (tmp_path / "spy.png").stat().st_size > 1000


def test_overlay_covers_the_kept_blocks_alone() -> None:
    dense = blocks((4, 4), 32, 0.25, seed=3)
    matrix = CSR.from_dense(dense)
    axes = spy.structure_figure(matrix, analyse(matrix)).axes[1]
    corners = {(patch.get_x(), patch.get_y()) for patch in axes.patches}
    kept = dense.view(4, 32, 4, 32).amax((1, 3)).nonzero()
    assert corners == {(32 * col, 32 * row) for row, col in kept.tolist()}


def test_plot_is_refused_before_anything_is_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = tmp_path / "w.safetensors"
    save_file({"a": torch.eye(4), "b": torch.eye(4)}, two)
    result = run("inspect", two, "--plot", tmp_path / "spy.svg")
    assert result.exit_code == 2
    assert "0 matrices" in result.stderr
    with pytest.raises(ArgumentError, match="spy.bmp"):
        spy.check_plot(Path("spy.bmp"))
    monkeypatch.setattr(spy, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="matplotlib"):
        spy.check_plot(Path("spy.svg"))


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("w.mtx", "hello\n", (), "line 1"),
        ("w.smtx", "1, 1\n", (), "line 1"),
        ("w.npz", "hello", (), "zip"),
        ("w.pt", "hello", (), "cannot be loaded"),
        ("w.mtx", "%%MatrixMarket matrix coordinate complex general\n1 1 0\n", (), "complex"),
        ("w.mtx", "hello\n", ("--tokens", "x"), "tokens"),
        ("w.mtx", "hello\n", ("--tokens", "0"), "--tokens 0"),
        ("w.mtx", "hello\n", ("--dtype", "int8"), "--dtype"),
        ("w.mtx", "hello\n", ("--target", "b200"), "target"),
        ("w.mtx", "hello\n", ("--plot", "spy.bmp"), "spy.bmp"),
    ],
)
def test_bad_input_is_three_lines(
    run: Run, tmp_path: Path, name: str, content: str, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / name).write_text(content)
    result = run("inspect", tmp_path / name, *options)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["got", "need", "try"]
    assert words in lines[0]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_file(run: Run, tmp_path: Path, suffix: str) -> None:
    result = run("inspect", tmp_path / f"none.{suffix}")
    assert (result.exit_code, "does not exist" in result.stderr) == (2, True)

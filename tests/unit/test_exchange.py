"""Foreign files: what scipy and torch write is read back, and what lies is refused."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hopsparse.errors import CheckpointError, HopsparseError, UnsupportedError
from hopsparse.formats import CSR
from hopsparse.formats.exchange import MOST_ENTRIES, Foreign, foreign_matrices, matrix_market
from tests.helpers.patterns import scattered


def only(path: Path) -> Foreign:
    (read,) = foreign_matrices(path).values()
    found = read()
    found.matrix.validate()
    return found


def text(tmp_path: Path, content: str, name: str = "m.mtx") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode())
    return path


def numbered(rows: int = 7, cols: int = 9, density: float = 0.4) -> Tensor:
    """Small whole numbers of both signs at random places."""
    keep = scattered(rows, cols, density, seed=5)
    return keep * (torch.arange(1, rows * cols + 1).view(rows, cols) - 30)


@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    density=st.sampled_from([0, 0.3, 1]),
    field=st.sampled_from(["real", "integer", "pattern"]),
)
@settings(max_examples=60, deadline=None)
def test_mtx_of_scipy(
    tmp_path_factory: pytest.TempPathFactory, rows: int, cols: int, density: float, field: str
) -> None:
    path = tmp_path_factory.mktemp("mtx") / "m.mtx"
    dense = numbered(rows, cols, density)
    values = dense.double() / 8 if field == "real" else dense.long()
    scipy.io.mmwrite(path, scipy.sparse.coo_array(values.numpy()), field=field)
    wanted = (dense != 0).float() if field == "pattern" else values.float()
    assert torch.equal(only(path).matrix.to_dense(), wanted)


@pytest.mark.parametrize("field", ["real", "integer"])
def test_dense_mtx(tmp_path: Path, field: str) -> None:
    dense = numbered()
    values = dense.numpy() if field == "real" else dense.long().numpy()
    scipy.io.mmwrite(tmp_path / "m.mtx", values)
    assert torch.equal(only(tmp_path / "m.mtx").matrix.to_dense(), dense)


def test_symmetric_mtx(tmp_path: Path) -> None:
    head = "%%MatrixMarket matrix coordinate integer {}\n% a comment\n\n3 3 2\n"
    full = text(tmp_path, head.format("symmetric") + "2 1 5\n3 3 7\n")
    assert only(full).matrix.to_dense().tolist() == [[0, 5, 0], [5, 0, 0], [0, 0, 7]]
    skew = text(tmp_path, head.format("skew-symmetric") + "2 1 5\n3 1 7\n")
    assert only(skew).matrix.to_dense().tolist() == [[0, -5, -7], [5, 0, 0], [7, 0, 0]]
    bits = head.replace("integer", "pattern").format("symmetric")
    assert only(text(tmp_path, bits + "2 1\n3 3\n")).matrix.to_dense().sum() == 3


def test_pieces_of_a_file_are_cut_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = torch.randn(40, 30).double()
    scipy.io.mmwrite(tmp_path / "m.mtx", scipy.sparse.coo_array(dense.numpy()), precision=17)
    monkeypatch.setattr(matrix_market, "_PIECE_BYTES", 100)
    assert torch.equal(only(tmp_path / "m.mtx").matrix.to_dense(), dense.float())


def test_blank_lines_and_carriage_returns(tmp_path: Path) -> None:
    head = "%%MatrixMarket matrix coordinate real general\r\n2 2 2\r\n"
    path = text(tmp_path, head + "1 1 1.5\r\n\r\n  2\t2   -2e-1  ")
    assert torch.equal(only(path).matrix.to_dense(), torch.tensor([[1.5, 0], [0, -0.2]]))


COORDINATES = "%%MatrixMarket matrix coordinate real general\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "line 1"),
        ("hello\n1 1 1\n", "line 1"),
        (COORDINATES.replace("general", "odd") + "1 1 1\n1 1 1\n", "odd"),
        (COORDINATES, "line 2"),
        (COORDINATES + "2 2\n1 1 1\n", "line 2"),
        (COORDINATES + "2 -2 1\n1 1 1\n", "line 2"),
        (COORDINATES + "0 2 0\n", "[0, 2]"),
        (COORDINATES + "2 2 3\n1 1 1\n2 2 2\n", "3 entries"),
        (COORDINATES + "2 2 1\n1 1 1\n2 2 2\n", "there are 2"),
        (COORDINATES + "2 2 99999999\n1 1 1\n", "99999999 entries"),
        (COORDINATES + "2 2 2\n1 1 1\n3 1 2\n", "row 2, column 0"),
        (COORDINATES + "2 2 1\n0 1 2\n", "row -1"),
        (COORDINATES + "2 2 2\n1 1 1\n1 x 2\n", "line 4 is b'1 x 2'"),
        (COORDINATES + "2 2 2\n1 1 1\n1.5 1 2\n", "line 4"),
        (COORDINATES + "2 2 2\n1 1\n1 2 3 4\n", "line 3"),
        (COORDINATES + "2 2 1\n1 1 abc\n", "line 3"),
        (COORDINATES + "2 2 1\n1 1 1e300\n", "1e+300"),
        (COORDINATES.replace("general", "symmetric") + "2 3 1\n1 1 1\n", "symmetric"),
        (COORDINATES.replace("general", "symmetric") + "2 2 2\n1 2 1\n2 1 1\n", "both sides"),
        (COORDINATES.replace("general", "skew-symmetric") + "2 2 1\n2 2 1\n", "diagonal"),
    ],
)
def test_mtx_that_lies_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = text(tmp_path, content)
    with pytest.raises(CheckpointError) as error:
        only(path)
    assert words in error.value.got
    assert str(path) in error.value.got


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (COORDINATES.replace("real", "complex") + "1 1 1\n1 1 1 1\n", "complex"),
        (COORDINATES.replace("coordinate", "array").replace("general", "symmetric"), "dense"),
        (COORDINATES + f"999999 999999 {MOST_ENTRIES + 1}\n", str(MOST_ENTRIES)),
        (COORDINATES + "1 999999999 1\n1 1 1\n", "999999999"),
    ],
)
def test_mtx_that_is_not_read_is_told(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        only(text(tmp_path, content))


def test_repeated_entries_are_added_and_zeros_dropped(tmp_path: Path) -> None:
    path = text(tmp_path, COORDINATES + "2 2 5\n1 1 1\n1 1 2\n2 2 4\n2 2 -4\n2 1 0\n")
    found = only(path)
    assert found.matrix.to_dense().tolist() == [[3, 0], [0, 0]]
    assert found.matrix.values.numel() == 1
    assert found.notes == [
        "2 entries at a place that has one already, added to it",
        "2 zeros that were stored, left out",
    ]
    bits = COORDINATES.replace("real", "pattern") + "2 2 2\n1 1\n1 1\n"
    found = only(text(tmp_path, bits))
    assert found.matrix.to_dense().tolist() == [[1, 0], [0, 0]]
    assert found.notes[1] == "1 entry at a place that has one already, counted once"


def test_smtx(tmp_path: Path) -> None:
    found = only(text(tmp_path, "3, 4, 3\n0 2 2 3\n1 3 0\n", "m.smtx"))
    assert found.matrix.to_dense().tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert found.notes == ["the file has no values: all are one"]
    empty = only(text(tmp_path, "3, 1, 0\n0 0 0 0\n\n", "m.smtx"))
    assert (empty.matrix.shape, empty.matrix.nnz) == ((3, 1), 0)
    crossed = only(text(tmp_path, "1, 4, 3\n0 3\n3 1 1\n", "m.smtx"))
    assert crossed.matrix.indices.tolist() == [1, 3]
    assert len(crossed.notes) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "line 1"),
        ("3 4\n", "line 1"),
        ("1, 4, 2\n0 2\n1\n", "1 columns"),
        ("1, 4, 1\n0 1 1\n1\n", "3 row pointers"),
        ("2, 4, 1\n0 2 1\n1\n", "falls"),
        ("1, 4, 1\n0 1\n4\n", "column 4"),
        ("1, 4, 1\n0 1\n-1\n", "column -1"),
        ("1, 4, 1\n0 one\n1\n", "line 2"),
        ("1, 4, 1\n0 1\n1\n1 2 3\n", "third line"),
    ],
)
def test_smtx_that_lies_is_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        only(text(tmp_path, content, "m.smtx"))


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "dia", "bsr"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "bool"])
def test_npz_of_scipy(tmp_path: Path, kind: str, dtype: str) -> None:
    dense = numbered(8, 12).clamp(-20, 20).to(getattr(torch, dtype))
    matrix = scipy.sparse.coo_array(dense.numpy()).asformat(kind)
    if kind == "bsr":
        matrix = scipy.sparse.bsr_array(dense.numpy(), blocksize=(2, 3))
    scipy.sparse.save_npz(tmp_path / "m.npz", matrix)
    found = only(tmp_path / "m.npz").matrix
    assert torch.equal(found.to_dense(), dense.to(found.dtype))
    assert found.dtype == (torch.int8 if dtype == "int8" else torch.float32)


def saved(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "m.npz"
    np.savez(path, **arrays)
    return path


CSR_ARRAYS: dict[str, Any] = {
    "format": np.array(b"csr"),
    "shape": np.array([2, 3]),
    "data": np.ones(2),
    "indices": np.array([2, 0]),
    "indptr": np.array([0, 2, 2]),
}


def test_unsorted_npz_is_sorted_and_told(tmp_path: Path) -> None:
    found = only(saved(tmp_path, **CSR_ARRAYS))
    assert found.matrix.indices.tolist() == [0, 2]
    assert found.notes == ["columns of 1 row were out of order, and are sorted"]


def test_zeros_and_repeats_of_npz_are_told(tmp_path: Path) -> None:
    zeros = CSR_ARRAYS | {"data": np.array([0.0, -0.0]), "indices": np.array([0, 2])}
    found = only(saved(tmp_path, **zeros))
    assert (found.matrix.values.numel(), found.matrix.indptr.tolist()) == (0, [0, 0, 0])
    assert found.notes == ["2 zeros that were stored, left out"]
    # The last column of a row may be the first of the next.
    rows = {"indptr": np.array([0, 1, 2]), "indices": np.array([2, 2])}
    assert only(saved(tmp_path, **CSR_ARRAYS | rows)).notes == []
    again = only(saved(tmp_path, **CSR_ARRAYS | {"indices": np.array([1, 1])}))
    assert again.matrix.to_dense().tolist() == [[0, 2, 0], [0, 0, 0]]
    assert again.notes == ["1 entry at a place that has one already, added to it"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": np.array(b"lil")}, "lil"),
        ({"format": np.array(3)}, "format"),
        ({"shape": np.array([2, 3, 4])}, "shape"),
        ({"shape": np.array([2, 0])}, "shape"),
        ({"data": np.ones(3)}, "3 values"),
        ({"data": np.ones((2, 2))}, "data"),
        ({"data": np.array(["a", "b"])}, "data"),
        ({"indices": np.array([2.0, 0.0])}, "indices"),
        ({"indices": np.array([3, 0])}, "column 3"),
        ({"indptr": np.array([0, 1, 1])}, "runs from 0 to 1"),
        ({"indptr": np.array([0, 2])}, r"pointers \[2\]"),
        ({"indptr": np.array([2, 0, 2])}, "falls"),
    ],
)
def test_npz_that_lies_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = saved(tmp_path, **CSR_ARRAYS | change)
    with pytest.raises(CheckpointError, match=words):
        only(path)


def test_npz_without_a_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="arrays weight"):
        only(saved(tmp_path, weight=np.ones(3)))
    with pytest.raises(UnsupportedError, match="complex"):
        only(saved(tmp_path, **CSR_ARRAYS | {"data": np.ones(2, dtype=complex)}))
    with pytest.raises(UnsupportedError, match="object"):
        only(saved(tmp_path, **CSR_ARRAYS | {"data": np.array([1, None])}))
    with pytest.raises(CheckpointError, match="zip"):
        only(text(tmp_path, "not a zip", "m.npz"))


def test_an_array_larger_than_its_bytes_asks_for_no_memory(tmp_path: Path) -> None:
    """A header may say anything: it is compared with what the archive holds."""
    path = saved(tmp_path, **CSR_ARRAYS)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 26,)}
    )
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in (members | {"data.npy": header.getvalue() + b"12345678"}).items():
            new.writestr(name, content)
    with pytest.raises(CheckpointError, match="data has"):
        only(path)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["strided", "sparse_coo", "sparse_csr", "sparse_csc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_torch_file(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    dense = numbered().to(dtype)
    given = dense if layout == "strided" else dense.to_sparse(layout=getattr(torch, layout))
    torch.save({"w": given, "bias": torch.ones(3)}, tmp_path / "m.pt")
    (read,) = foreign_matrices(tmp_path / "m.pt").values()
    found = read().matrix
    found.validate()
    assert torch.equal(found.to_dense(), dense.to(found.dtype))
    assert found.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def test_torch_file_of_one_tensor_has_the_name_of_the_file(tmp_path: Path) -> None:
    torch.save(torch.eye(3), tmp_path / "eye.pth")
    assert list(foreign_matrices(tmp_path / "eye.pth")) == ["eye"]


class Anything:
    """An object, which a weights-only file has not."""


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    torch.save({"w": torch.eye(2), "x": Anything()}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="without unpickling"):
        foreign_matrices(tmp_path / "m.pt")
    torch.save({"b": torch.ones(2)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="2-D"):
        foreign_matrices(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(b"\x80\x04junk")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        foreign_matrices(tmp_path / "m.pt")


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_torch_tensors_that_no_format_holds_are_refused(tmp_path: Path) -> None:
    no_columns = torch.sparse_csr_tensor(
        torch.zeros(4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.ones(0), (3, 0)
    )
    blocked = torch.eye(4).to_sparse_bsr((2, 2))
    for tensor, words in ((no_columns, r"shape \[3, 0\]"), (blocked, "sparse_bsr")):
        torch.save(tensor, tmp_path / "m.pt")
        with pytest.raises(CheckpointError, match=words):
            only(tmp_path / "m.pt")
    torch.save(torch.eye(2, dtype=torch.complex64), tmp_path / "m.pt")
    with pytest.raises(UnsupportedError, match="complex"):
        only(tmp_path / "m.pt")
    torch.save(torch.ones(1, 3).expand(2, 3), tmp_path / "m.pt")
    assert only(tmp_path / "m.pt").matrix.to_dense().tolist() == [[1, 1, 1]] * 2


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_damaged_torch_tensors_are_refused(tmp_path: Path) -> None:
    for crow, col in (([0, 2, 1], [0]), ([0, 1, 1], [9])):
        tensor = torch.sparse_csr_tensor(
            torch.tensor(crow), torch.tensor(col), torch.ones(1), (2, 3), check_invariants=False
        )
        torch.save(tensor, tmp_path / "m.pt")
        with pytest.raises(CheckpointError):
            only(tmp_path / "m.pt")


@given(cut=st.integers(0, 400), kind=st.sampled_from(["mtx", "smtx", "npz", "pt"]))
@settings(max_examples=80, deadline=None)
def test_a_cut_file_is_refused_or_whole(
    tmp_path_factory: pytest.TempPathFactory, cut: int, kind: str
) -> None:
    """However much is missing, there is a typed error or the whole matrix, never a part of it."""
    folder = tmp_path_factory.mktemp("cut")
    dense = numbered()
    path = folder / f"m.{kind}"
    if kind == "mtx":
        scipy.io.mmwrite(path, scipy.sparse.coo_array(dense.long().numpy()))
    elif kind == "smtx":
        m = CSR.from_dense(dense)
        lines = [f"7, 9, {m.nnz}", *(" ".join(map(str, p.tolist())) for p in (m.indptr, m.indices))]
        path.write_text("\n".join(lines) + "\n")
        dense = (dense != 0).float()
    elif kind == "npz":
        scipy.sparse.save_npz(path, scipy.sparse.csr_array(dense.numpy()))
    else:
        torch.save(dense, path)
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - cut)])
    try:
        found = only(path).matrix.to_dense()
    except HopsparseError:
        assert cut > 0
        return
    assert found.shape == dense.shape
    # Of text the last digit of a value may be gone unseen; all else is there.
    assert torch.equal(found != 0, dense != 0)

"""The matrices that a path holds, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..models.kinds import FOREIGN as FOREIGN
from ..models.kinds import SPARSE24 as SPARSE24
from ..models.kinds import Kind as Kind
from ..models.kinds import kind_of as kind_of

if TYPE_CHECKING:
    from ..formats import SparseMatrix
    from ..models.checkpoint import CheckpointReader


@dataclass(frozen=True)
class LayerRow:
    """One stored matrix.

    Attributes:
        name: Of the module or matrix.
        format: Token of its format; of the codes' where they are quantized.
        pattern: N:M or block, as far as the format knows it.
        shape: [rows, cols].
        dtype: Of the values; where they are quantized, of the weight that they stand for.
        density: Non-zero entries over all entries, counted.
        bytes_dense: As a dense matrix.
        bytes: As stored, scales included.
        scheme: What values are rounded to, or "".
    """

    name: str
    format: str
    pattern: str
    shape: tuple[int, int]
    dtype: str
    density: float
    bytes_dense: int
    bytes: int
    scheme: str = ""

    @classmethod
    def of(cls, name: str, matrix: SparseMatrix, pattern: str = "") -> LayerRow:
        """Describe `matrix`; `pattern` is what its checkpoint says of it."""
        from ..formats import MatrixFacts

        rows, cols = matrix.shape
        facts, stored = matrix.attributes(), MatrixFacts.of(matrix)
        pattern = "dense" if stored.stored_as == "dense" else pattern
        own = str(facts.get("pattern", facts.get("block", "")))
        return cls(
            name=name,
            format=stored.stored_as,
            pattern=own or pattern,
            shape=matrix.shape,
            dtype=str(matrix.dtype).removeprefix("torch."),
            density=matrix.density,
            bytes_dense=rows * cols * matrix.dtype.itemsize,
            bytes=matrix.nbytes,
            scheme=stored.scheme,
        )


def checkpoint_rows(reader: CheckpointReader) -> Iterator[LayerRow]:
    """Every sparse layer of a hopsparse checkpoint; one matrix is in memory at a time."""
    assert reader.sparse is not None
    pattern = reader.sparse.pattern.partition("+")[0]
    for module in reader.sparse.modules:
        yield LayerRow.of(module, reader.matrix(module), "" if pattern == "mixed" else pattern)


def sparse24_rows(reader: CheckpointReader) -> Iterator[LayerRow]:
    """Every sparse layer of a checkpoint in the layout of compressed-tensors."""
    from ..models.sparse24 import packed_modules, read_packed

    for module in packed_modules(reader):
        row = LayerRow.of(module, read_packed(reader, module), "2:4")
        yield replace(row, format=SPARSE24)


def file_rows(path: Path) -> tuple[list[LayerRow], int]:
    """The matrices of a file, and the bytes of its other tensors."""
    from ..formats import SparseMatrix, read_facts, read_matrices

    rows, names = [], list(read_facts(path))
    for name in names:
        matrix = read_matrices(path, [name])[name]
        assert isinstance(matrix, SparseMatrix)
        rows.append(LayerRow.of(name, matrix))
    stored = sum(row.bytes for row in rows)
    return rows, max(0, payload_bytes(path) - stored)


def payload_bytes(path: Path) -> int:
    """Bytes of the tensors in a safetensors file, header excluded."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header

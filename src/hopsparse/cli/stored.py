"""What a path holds: a checkpoint folder of one kind or another, or a file of matrices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import CheckpointError

if TYPE_CHECKING:
    from ..formats import SparseMatrix
    from ..models.checkpoint import CheckpointReader

Kind = Literal["hopsparse", "dense", "sparse-24-bitmask", "matrices", "tensors"]

SPARSE24: Literal["sparse-24-bitmask"] = "sparse-24-bitmask"


@dataclass(frozen=True)
class LayerRow:
    """One stored matrix.

    Attributes:
        name: Of the module or matrix.
        format: Token of its format.
        pattern: N:M or block, as far as the format knows it.
        shape: [rows, cols].
        dtype: Of the values.
        density: Non-zero entries over all entries, counted.
        bytes_dense: As a dense matrix.
        bytes: As stored.
    """

    name: str
    format: str
    pattern: str
    shape: tuple[int, int]
    dtype: str
    density: float
    bytes_dense: int
    bytes: int

    @classmethod
    def of(cls, name: str, matrix: SparseMatrix, pattern: str = "") -> LayerRow:
        """Describe `matrix`; `pattern` is what its checkpoint says of it."""
        rows, cols = matrix.shape
        facts = matrix.attributes()
        own = str(facts.get("pattern", facts.get("block", "")))
        return cls(
            name=name,
            format=matrix.name,
            pattern=own or pattern,
            shape=matrix.shape,
            dtype=str(matrix.dtype).removeprefix("torch."),
            density=matrix.density,
            bytes_dense=rows * cols * matrix.dtype.itemsize,
            bytes=matrix.nbytes,
        )


def kind_of(path: Path) -> Kind:
    """Tell what `path` holds, from its config or header alone.

    Raises:
        CheckpointError: Nothing is there, or nothing that can be read.
    """
    if path.is_dir():
        return _kind_of_config(path)
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist",
            need="a checkpoint folder or a .safetensors file",
            hint="check the path; `hopsparse sparsify MODEL -o OUT` makes a checkpoint",
        )
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is no safetensors file",
            need="a checkpoint folder or a .safetensors file; pickled files are never loaded",
            hint="safetensors.torch.save_file(tensors, path)",
        )
    return "matrices" if "hopsparse" in file_metadata(path) else "tensors"


def file_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})",
            need="a complete safetensors file",
            hint="download or write it again",
        ) from error


def _kind_of_config(folder: Path) -> Kind:
    from ..models.checkpoint import QUANT_METHOD

    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        quantization = config.get("quantization_config") or config.get("compression_config") or {}
        if quantization.get("quant_method") == QUANT_METHOD:
            return "hopsparse"
        sparsity = quantization.get("sparsity_config") or config.get("sparsity_config") or {}
        return SPARSE24 if sparsity.get("format") == SPARSE24 else "dense"
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no config.json",
            need="a checkpoint folder",
            hint="check the path, or download the model again",
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error})", need="a JSON object", hint="restore the file"
        ) from error


def checkpoint_rows(reader: CheckpointReader) -> Iterator[LayerRow]:
    """Every sparse layer of a hopsparse checkpoint; one matrix is in memory at a time."""
    assert reader.sparse is not None
    for module in reader.sparse.modules:
        yield LayerRow.of(module, reader.matrix(module), reader.sparse.pattern)


def sparse24_rows(reader: CheckpointReader) -> Iterator[LayerRow]:
    """Every sparse layer of a checkpoint in the layout of compressed-tensors."""
    from ..formats._base import nonzero_mask

    names = set(reader.names())
    for module in sorted(
        name.removesuffix(".bitmask") for name in names if name.endswith(".bitmask")
    ):
        rows, cols = reader.load(f"{module}.shape").flatten().tolist()
        values, mask = reader.load(f"{module}.compressed"), reader.load(f"{module}.bitmask")
        yield LayerRow(
            name=module,
            format=SPARSE24,
            pattern="2:4",
            shape=(rows, cols),
            dtype=str(values.dtype).removeprefix("torch."),
            density=int(nonzero_mask(values).sum()) / (rows * cols),
            bytes_dense=rows * cols * values.itemsize,
            bytes=values.nbytes + mask.nbytes,
        )


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


def tensor_shapes(path: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of every tensor of a plain safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        slices: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}

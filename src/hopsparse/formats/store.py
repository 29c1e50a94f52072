"""Matrices in one safetensors file: parts as tensors, facts as JSON in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ArgumentError, CheckpointError, FormatError
from ..files import open_tensors, unbroken, unreadable, written_whole
from ._base import SparseMatrix
from .facts import MatrixFacts, describe_matrix, restore_matrix

#: The metadata key that holds the facts.
METADATA_KEY = "hopsparse"
#: Of files of matrices and of checkpoints; readers refuse a larger one.
FORMAT_VERSION = 1

Facts = dict[str, Any]


def write_matrices(
    path: str | os.PathLike[str], items: Mapping[str, SparseMatrix | Tensor]
) -> None:
    """Write matrices and plain tensors into one safetensors file, whole or not at all.

    The file appears under its name when it is complete and on disk; a file that was there before
    stays until then.

    Args:
        path: The file; its folder exists.
        items: Matrices and tensors by name. The parts of a matrix are stored as `<name>.<part>`.

    Raises:
        ArgumentError: Two items would use one key.
        CheckpointError: The file cannot be written (no space, no permission, no folder).

    Example:
        >>> import tempfile; from hopsparse.formats import CSR
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_matrices(folder + "/w.safetensors", {"w": CSR.from_dense(torch.eye(2))})
        ...     read_matrices(folder + "/w.safetensors")["w"].nnz
        2
    """
    target = Path(path)
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Facts] = {}
    for name, item in items.items():
        if isinstance(item, SparseMatrix):
            facts[name] = describe_matrix(item)
        for key, tensor in _tensors_of(name, item).items():
            if key in tensors:
                raise ArgumentError(
                    f"two items that use the key {key!r}", need="distinct keys", hint="rename one"
                )
            tensors[key] = tensor.detach()
    header = {"format_version": FORMAT_VERSION, "matrices": facts}
    with written_whole(target) as temporary:
        save_file(_separate(tensors), temporary, metadata={METADATA_KEY: json.dumps(header)})


def read_matrices(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    validate: bool = False,
) -> dict[str, SparseMatrix | Tensor]:
    """Read matrices and plain tensors from a file of `write_matrices`.

    Shapes and dtypes are always checked against the facts. Only what is named is read.

    Args:
        path: The file.
        names: What to read; everything if left out.
        validate: Check the contents of every matrix too.

    Raises:
        CheckpointError: The file is missing, truncated, corrupt or of a newer version, a part or a
            name is missing, or the facts disagree with the tensors.
    """
    with _Reader(Path(path)) as reader:
        wanted = reader.names() if names is None else list(names)
        return {name: reader.read(name, validate=validate) for name in wanted}


def read_facts(path: str | os.PathLike[str]) -> dict[str, Facts]:
    """The facts of every matrix in a file, without reading its tensors.

    Raises:
        CheckpointError: The file is missing, truncated, corrupt or of a newer version.
    """
    with _Reader(Path(path)) as reader:
        return reader.facts


class _Reader:
    """An open file: its header is checked, its tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise CheckpointError(
                f"{path} does not exist", need="a safetensors file", hint="check the path"
            )
        self._file = open_tensors(path)
        self._keys = set(self._file.keys())
        self.facts = _parse_header(path, self._file.metadata() or {})

    def __enter__(self) -> _Reader:
        self._file.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)

    def names(self) -> list[str]:
        """Matrices, then tensors that are no part of one."""
        used = {key for name in self.facts for key in self._keys_of(name).values()}
        return [*self.facts, *sorted(self._keys - used)]

    def read(self, name: str, *, validate: bool) -> SparseMatrix | Tensor:
        if name not in self.facts:
            if name not in self._keys:
                raise CheckpointError(
                    f"{self.path} has no matrix {name!r}",
                    need="one of " + ", ".join(self.names()[:8]),
                    hint="read_facts(path) lists the matrices",
                )
            return self._tensor(name)
        keys = self._keys_of(name)
        try:
            parts = {part: self._tensor(key) for part, key in keys.items() if key in self._keys}
            matrix = restore_matrix(self.facts[name], parts)
            if validate:
                matrix.validate()
        except (FormatError, ArgumentError) as error:
            raise CheckpointError(
                f"{self.path}: matrix {name!r}: {error.got}", need=error.need, hint=error.hint
            ) from error
        return matrix

    def _keys_of(self, name: str) -> dict[str, str]:
        try:
            facts = MatrixFacts.parse(self.facts[name])
        except (FormatError, ArgumentError):  # Said when the matrix is read.
            return {}
        return {part: f"{name}.{part}" for part in facts.parts}

    def _tensor(self, key: str) -> Tensor:
        try:
            with unbroken():
                tensor: Tensor = self._file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise unreadable(self.path, error) from error
        return tensor


def _parse_header(path: Path, metadata: Mapping[str, str]) -> dict[str, Facts]:
    try:
        header = json.loads(metadata[METADATA_KEY])
        version, facts = header["format_version"], header["matrices"]
        sound = type(version) is int and version > 0 and isinstance(facts, dict)
        sound = sound and all(isinstance(entry, dict) for entry in facts.values())
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(
            f"{path} has no readable {METADATA_KEY!r} metadata",
            need=f"a file of write_matrices, format_version up to {FORMAT_VERSION}",
            hint="safetensors.torch.load_file reads other safetensors files",
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {version}",
            need=f"format_version up to {FORMAT_VERSION}",
            hint="pip install --upgrade hopsparse",
        )
    return dict(facts)


def _tensors_of(name: str, item: SparseMatrix | Tensor) -> dict[str, Tensor]:
    if isinstance(item, SparseMatrix):
        return {f"{name}.{part}": tensor for part, tensor in item.parts().items()}
    return {name: item}


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors in memory of their own: safetensors refuses shared storage."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        storage = tensor.untyped_storage()
        whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        if not (tensor.is_contiguous() and whole) or storage.data_ptr() in seen:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.untyped_storage().data_ptr())
        apart[key] = tensor
    return apart

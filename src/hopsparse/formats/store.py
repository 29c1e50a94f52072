"""Matrices in one safetensors file: parts as tensors, facts as JSON in the metadata."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ArgumentError, CheckpointError, FormatError
from ._base import SparseMatrix
from .convert import FORMATS, format_named

#: The metadata key that holds the facts.
METADATA_KEY = "hopsparse"
#: Readers refuse a larger one.
FORMAT_VERSION = 1

Facts = dict[str, Any]
_RESTORE = "restore the file from its source, or write it again"


def describe_matrix(matrix: SparseMatrix) -> Facts:
    """The JSON facts of a matrix: with its parts, all that `restore_matrix` needs.

    Example:
        >>> from hopsparse.formats import CSR
        >>> describe_matrix(CSR.from_dense(torch.eye(2)))["attributes"]
        {'nnz': 2}
    """
    return {
        "format": matrix.name,
        "shape": list(matrix.shape),
        "dtype": str(matrix.dtype).removeprefix("torch."),
        "attributes": matrix.attributes(),
    }


def restore_matrix(facts: Mapping[str, Any], parts: Mapping[str, Tensor]) -> SparseMatrix:
    """Wrap `parts` as the matrix that `facts` describe; contents are left to `validate`.

    Raises:
        FormatError: The facts are not those of a matrix, or disagree with the parts.
        ArgumentError: The facts name a format or pattern that does not exist.
    """
    kind, shape, dtype = _read_facts(facts)
    specs = kind.part_specs(shape, dtype, facts["attributes"])
    for part, (size, part_dtype) in specs.items():
        if part not in parts:
            raise FormatError(
                f"part {part!r} of the {kind.name} matrix is missing",
                need="parts " + ", ".join(specs),
                hint=_RESTORE,
            )
        tensor = parts[part]
        if tuple(tensor.shape) != size or tensor.dtype != part_dtype:
            raise FormatError(
                f"part {part!r} is {tensor.dtype} {list(tensor.shape)}",
                need=f"{part_dtype} {list(size)}, as the facts of the {kind.name} matrix say",
                hint=_RESTORE,
            )
    return kind.from_parts(shape, parts, facts["attributes"])


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
    _write_atomically(target, _separate(tensors), {METADATA_KEY: json.dumps(header)})


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
        try:
            self._file = cast(Any, safe_open)(path, framework="pt")
            metadata, self._keys = self._file.metadata() or {}, set(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is truncated or corrupt ({error})",
                need="a complete safetensors file",
                hint=_RESTORE,
            ) from None
        self.facts = _parse_header(path, metadata)

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
        kind = FORMATS.get(str(self.facts[name].get("format")))
        return {part: f"{name}.{part}" for part in kind.PARTS} if kind else {}

    def _tensor(self, key: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {key!r} cannot be read ({error})",
                need="a complete safetensors file",
                hint=_RESTORE,
            ) from None
        return tensor


def _parse_header(path: Path, metadata: Mapping[str, str]) -> dict[str, Facts]:
    try:
        header = json.loads(metadata[METADATA_KEY])
        version, facts = header["format_version"], header["matrices"]
        sound = isinstance(version, int) and isinstance(facts, dict)
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


def _read_facts(
    facts: Mapping[str, Any],
) -> tuple[type[SparseMatrix], tuple[int, int], torch.dtype]:
    """Format, shape and dtype, after checking that the facts have the form of facts."""
    shape, attributes = facts.get("shape"), facts.get("attributes")
    dtype = getattr(torch, str(facts.get("dtype")), None)
    sound = isinstance(shape, list | tuple) and len(shape) == 2
    if not sound or not all(type(side) is int and side > 0 for side in cast(Any, shape)):
        raise FormatError(f"shape {shape!r}", need="[rows, cols], both positive", hint=_RESTORE)
    if not isinstance(dtype, torch.dtype) or not isinstance(attributes, Mapping):
        raise FormatError(
            f"dtype {facts.get('dtype')!r} and attributes {attributes!r}",
            need="the name of a torch dtype, and an object",
            hint=_RESTORE,
        )
    return format_named(str(facts.get("format"))), tuple(cast(Any, shape)), dtype


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


def _write_atomically(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    partial: Path | None = None
    try:
        handle, name = tempfile.mkstemp(
            dir=target.parent, prefix=f".{target.name}.", suffix=".partial"
        )
        os.close(handle)
        partial = Path(name)
        save_file(tensors, partial, metadata=metadata)
        with partial.open("rb+") as file:
            # mkstemp keeps others out; the finished file gets the rights of an ordinary one.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
        partial.replace(target)
        _sync_folder(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} cannot be written ({error})",
            need="an existing folder with write permission and enough space",
            hint="free some space, or choose another folder",
        ) from None
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

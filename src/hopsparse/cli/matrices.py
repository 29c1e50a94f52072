"""The matrices that `inspect` may look into, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError, HopsparseError
from ..models.kinds import Kind

if TYPE_CHECKING:
    from ..formats import SparseMatrix

#: A matrix, what must be said of how it was read, and whether it was made here: then it is valid.
Read = Callable[[], "tuple[SparseMatrix, list[str], bool]"]

# Whose numbers formats store, as safetensors writes them.
_NUMBERS = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"}


def matrices_of(path: Path, kind: Kind) -> Mapping[str, Read]:
    """Every matrix at `path` by name.

    Raises:
        CheckpointError: The path is missing or damaged; reading one raises it too.
        UnsupportedError: It holds what is not read.
    """
    if kind == "matrices":
        from ..formats import read_facts

        return {name: partial(_stored, path, name) for name in read_facts(path)}
    if kind == "tensors":
        from ..files import read_header

        tensors = read_header(path).tensors.items()
        names = [name for name, (shape, of) in tensors if len(shape) == 2 and of in _NUMBERS]
        return {name: partial(_tensor, path, name) for name in names}
    if path.is_dir():
        return _of_checkpoint(path, kind)
    from ..formats.exchange import foreign_matrices

    return {name: partial(_foreign, read) for name, read in foreign_matrices(path).items()}


def chosen(found: Mapping[str, Read], pattern: str | None) -> dict[str, Read]:
    """Those that match a glob; without one, the only one, or none of several.

    Raises:
        ArgumentError: The glob matches nothing.
    """
    if pattern is None:
        return dict(found) if len(found) == 1 else {}
    matched = {name: read for name, read in found.items() if fnmatchcase(name, pattern)}
    if not matched:
        raise ArgumentError(
            f"--matrix {pattern!r}",
            need="a name, or a pattern of names, among "
            + (", ".join(list(found)[:6]) or "none: nothing here is a matrix"),
            hint="--matrix '*'",
        )
    return matched


def read_named(name: str, read: Read) -> tuple[SparseMatrix, list[str], bool]:
    """Read one matrix; errors say which.

    Raises:
        HopsparseError: It cannot be read.
    """
    try:
        return read()
    except HopsparseError as error:
        if name in error.got:
            raise
        raise type(error)(f"{name}: {error.got}", need=error.need, hint=error.hint) from error


def _foreign(read: Callable[[], object]) -> tuple[SparseMatrix, list[str], bool]:
    from ..formats.exchange import Foreign

    found = read()
    assert isinstance(found, Foreign)
    return found.matrix, found.notes, True


def _stored(path: Path, name: str) -> tuple[SparseMatrix, list[str], bool]:
    from ..formats import SparseMatrix, read_matrices

    matrix = read_matrices(path, [name])[name]
    assert isinstance(matrix, SparseMatrix)
    return matrix, [], False


def _tensor(path: Path, name: str) -> tuple[SparseMatrix, list[str], bool]:
    from ..files import open_tensors, unbroken
    from ..formats import CSR
    from ..formats.exchange import check_size

    with open_tensors(path) as file, unbroken():
        tensor = file.get_tensor(name)
    check_size((tensor.shape[0], tensor.shape[1]), tensor.numel(), name)
    return CSR.from_dense(tensor), [], True


def _of_checkpoint(path: Path, kind: Kind) -> dict[str, Read]:
    from ..models.checkpoint import CheckpointReader
    from ..models.sparse24 import packed_modules

    with CheckpointReader(path) as reader:
        if reader.sparse is not None:
            return {name: partial(_layer, path, name) for name in reader.sparse.modules}
        if kind == "sparse-24-bitmask":
            return {name: partial(_packed, path, name) for name in packed_modules(reader)}
        found: dict[str, Read] = {}
        for shard in reader.shards():
            found |= matrices_of(path / shard, "tensors")
        return found


def _layer(path: Path, name: str) -> tuple[SparseMatrix, list[str], bool]:
    from ..models.checkpoint import CheckpointReader

    with CheckpointReader(path) as reader:
        return reader.matrix(name), [], False


def _packed(path: Path, name: str) -> tuple[SparseMatrix, list[str], bool]:
    from ..models.checkpoint import CheckpointReader
    from ..models.sparse24 import read_packed

    with CheckpointReader(path) as reader:
        return read_packed(reader, name), [], False

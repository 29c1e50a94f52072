"""One door for all foreign files: which matrices a file holds, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...errors import CheckpointError, FormatError, UnsupportedError
from ..csr import CSR
from .matrix_market import read_mtx
from .npz import read_npz
from .smtx import read_smtx
from .torch_file import torch_tensors

Result = TypeVar("Result")

#: The kind of each suffix.
FOREIGN = {".mtx": "mtx", ".smtx": "smtx", ".npz": "npz", ".pt": "torch", ".pth": "torch"}

_READERS = {"mtx": read_mtx, "smtx": read_smtx, "npz": read_npz}


@dataclass(frozen=True)
class Foreign:
    """A matrix of a foreign file.

    Attributes:
        matrix: Its non-zeros.
        notes: What was changed, left out or assumed when it was read, as sentences.
    """

    matrix: CSR
    notes: list[str] = field(default_factory=list)


def foreign_matrices(path: Path) -> Mapping[str, Callable[[], Foreign]]:
    """The matrices of a file by name, each with the function that reads it.

    A file of one matrix gives it the name of the file. A torch file is read whole, to know its
    tensors; the others are opened when their matrix is read.

    Raises:
        CheckpointError: The file is missing, damaged, or says something wrong of itself; the
            functions raise it too.
        UnsupportedError: Complex numbers, or more of something than is read.

    Example:
        >>> foreign_matrices(Path("no/such.mtx"))
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: no/such.mtx does not exist. Required: a file. ...
    """
    kind = FOREIGN[path.suffix.lower()]
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", need="a file", hint="check the path")
    if kind == "torch":
        tensors = _named(path, partial(torch_tensors, path))
        return {name: partial(_read, path, name, read) for name, read in tensors.items()}
    return {path.stem: partial(_read, path, "", partial(_READERS[kind], path))}


def _read(path: Path, name: str, read: Callable[[list[str]], CSR]) -> Foreign:
    notes: list[str] = []
    return Foreign(_named(path, partial(read, notes), name), notes)


def _named(path: Path, do: Callable[[], Result], name: str = "") -> Result:
    """Errors of a matrix say which file it came from."""
    place = f"{path}, {name}" if name else str(path)
    try:
        return do()
    except FormatError as error:
        raise CheckpointError(f"{place}: {error.got}", need=error.need, hint=error.hint) from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{place}: {error.got}", need=error.need, hint=error.hint) from error
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be read ({error})", need="a readable file", hint="check its rights"
        ) from error
    except MemoryError as error:
        raise UnsupportedError(
            f"{place}: more than the free memory of this machine",
            need="up to 90 bytes an entry while it is read",
            hint="a machine with more memory, or a part of the rows",
        ) from error

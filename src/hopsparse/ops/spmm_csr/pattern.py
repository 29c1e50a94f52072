"""What is worked out once of where a matrix has entries, and kept while its indices live.

Index tensors are used in place, those of a torch tensor as well, so that what belongs to them is
found by their memory: `torch.Tensor.crow_indices()` gives a new object at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import FormatError
from ...formats._base import check_indptr
from .schedule import Schedule, cut

Found = TypeVar("Found")

_LIMIT = torch.iinfo(torch.int32).max


class Memory:
    """The memory of a tensor, watched without being kept."""

    def __init__(self, tensor: Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    @property
    def is_freed(self) -> bool:
        """Whether no tensor has it any more."""
        return bool(self._ref.expired())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class Transposed:
    """The pattern of the transposed matrix.

    Attributes:
        indptr: As that of the matrix, of its columns.
        indices: Rows.
        order: Which entry of the matrix each of its entries is.
        schedule: Of its rows.
    """

    indptr: Tensor
    indices: Tensor
    order: Tensor
    schedule: Schedule


@dataclass(eq=False)
class Pattern:
    """What was worked out of a pair of index tensors, without holding on to them.

    Attributes:
        shape: Rows and columns.
        schedule: Of the rows.
        transposed: Kept when a gradient first needed it.
    """

    shape: tuple[int, int]
    schedule: Schedule
    transposed: Transposed | None = None

    def transpose(self, indptr: Tensor, indices: Tensor) -> Transposed:
        """The transposed pattern, sorted anew; whoever waits for it keeps it."""
        order = torch.argsort(indices, stable=True)
        counts = torch.bincount(indices, minlength=self.shape[1])
        starts = torch.zeros(self.shape[1] + 1, dtype=torch.int64, device=indices.device)
        torch.cumsum(counts, 0, out=starts[1:])
        row = torch.repeat_interleave(indptr.diff())[order].to(indices.dtype)
        starts = starts.to(indptr.dtype)
        return Transposed(starts, row, order, cut(starts))


def check_indices(indptr: Tensor, indices: Tensor, cols: int) -> None:
    """Refuse what a kernel would read wrong memory for. Columns may repeat, in any order.

    Raises:
        FormatError: Pointers that fall, or do not end at the last entry; columns out of range; or
            more rows or columns than 32 bits count.
    """
    rows = indptr.numel() - 1
    if rows > _LIMIT or cols > _LIMIT:
        raise FormatError(
            f"a CSR matrix [{rows}, {cols}]", need=f"sides up to {_LIMIT}", hint="split the matrix"
        )
    check_indptr("csr", indptr, indices.numel())
    if not indices.numel():
        return
    least, most = (int(end) for end in indices.aminmax())
    if least < 0 or most >= cols:
        at = int(((indices < 0) | (indices >= cols)).nonzero()[0])
        row = int((indptr <= at).sum()) - 1
        raise FormatError(
            f"row {row} has column {int(indices[at])} at entry {at}",
            need=f"columns from 0 to {cols - 1}",
            hint="indices count from 0; is the shape right?",
        )


class ByMemory(Generic[Found]):
    """What was worked out of tensors, by their memory. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Kept[Found]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tensors: Sequence[Tensor], *facts: object) -> Found | None:
        """What is kept for these, if they were neither freed nor changed since."""
        kept = self._known.get(_key(tensors, facts))
        if kept is None:
            self._drop_freed()
            return None
        return kept.found if kept.holds(tensors) else None

    def has(self, tensors: Sequence[Tensor], *facts: object) -> bool:
        """Whether something is kept for these, if only that there is nothing."""
        kept = self._known.get(_key(tensors, facts))
        return kept is not None and kept.holds(tensors)

    def keep(self, found: Found, tensors: Sequence[Tensor], *facts: object) -> Found:
        """Keep something while these live and stay as they are; return it.

        What is kept for tensors that were freed is dropped.
        """
        memory = [Memory(each) for each in tensors]
        self._drop_freed()
        with self._lock:
            self._known[_key(tensors, facts)] = _Kept(memory, _versions(tensors), found)
        return found

    def _drop_freed(self) -> None:
        with self._lock:
            for key, kept in list(self._known.items()):
                if any(each.is_freed for each in kept.memory):
                    del self._known[key]


@dataclass(frozen=True)
class _Kept(Generic[Found]):
    memory: list[Memory]
    versions: list[int]
    found: Found

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        freed = any(each.is_freed for each in self.memory)
        return not freed and _versions(tensors) == self.versions


class Patterns(ByMemory[Pattern]):
    """Patterns by index tensors and columns."""

    def make(self, indptr: Tensor, indices: Tensor, cols: int) -> Pattern:
        """Check and cut a matrix; whoever waits for it keeps it.

        Raises:
            FormatError: See `check_indices`.
        """
        check_indices(indptr, indices, cols)
        return Pattern((indptr.numel() - 1, cols), cut(indptr))


def _key(tensors: Sequence[Tensor], facts: tuple[object, ...]) -> tuple[object, ...]:
    """What names the memory of tensors, whatever is in it."""
    return (
        *facts,
        *((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors),
    )


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often torch saw a change of each; it counts none of those made in inference mode."""
    return [-1 if each.is_inference() else each._version for each in tensors]

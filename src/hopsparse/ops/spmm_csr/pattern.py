"""What is worked out once of where a matrix has entries, and kept while its indices live.

Index tensors are used in place, those of a torch tensor as well, so that what belongs to them is
found by their memory: `torch.Tensor.crow_indices()` gives a new object at every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import FormatError
from ...formats._base import check_indptr
from .schedule import Schedule, cut

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
        transposed: Made when a gradient first needs it.
    """

    shape: tuple[int, int]
    schedule: Schedule
    transposed: Transposed | None = None

    def transpose(self, indptr: Tensor, indices: Tensor) -> Transposed:
        """The transposed pattern; sorts the entries at the first call."""
        if self.transposed is None:
            order = torch.argsort(indices, stable=True)
            counts = torch.bincount(indices, minlength=self.shape[1])
            starts = torch.zeros(self.shape[1] + 1, dtype=torch.int64, device=indices.device)
            torch.cumsum(counts, 0, out=starts[1:])
            row = torch.repeat_interleave(indptr.diff())[order].to(indices.dtype)
            starts = starts.to(indptr.dtype)
            self.transposed = Transposed(starts, row, order, cut(starts))
        return self.transposed


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


class Patterns:
    """Patterns by the memory of their index tensors. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[list[Memory], Pattern]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, indptr: Tensor, indices: Tensor, cols: int) -> Pattern | None:
        """The pattern of these tensors, if they were seen and neither freed nor changed."""
        found = self._known.get((*memory_key(indptr), *memory_key(indices), cols))
        if found is None or any(each.is_freed for each in found[0]):
            return None
        return found[1]

    def make(self, indptr: Tensor, indices: Tensor, cols: int) -> Pattern:
        """Check and cut a matrix, and keep what was found. It waits for the device.

        Raises:
            FormatError: See `check_indices`.
        """
        check_indices(indptr, indices, cols)
        pattern = Pattern((indptr.numel() - 1, cols), cut(indptr))
        memory = [Memory(indptr), Memory(indices)]
        with self._lock:
            for key, (held, _) in list(self._known.items()):
                if any(each.is_freed for each in held):
                    del self._known[key]
            self._known[(*memory_key(indptr), *memory_key(indices), cols)] = (memory, pattern)
        return pattern


def memory_key(tensor: Tensor) -> tuple[object, ...]:
    """What names the memory of a tensor, and a change in it that torch counts."""
    version = -1 if tensor.is_inference() else tensor._version
    layout = (tuple(tensor.shape), tensor.stride())
    return tensor.data_ptr(), layout, tensor.dtype, tensor.device, version

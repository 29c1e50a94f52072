"""What every stored matrix can do.

A format is a frozen dataclass: a logical shape, a few tensors (its parts) and a few JSON values
(its attributes). Parts and attributes together are the stored form; nothing else is needed to
read a matrix back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..errors import FormatError

Attribute = int | float | str
PartSpec = tuple[tuple[int, ...], torch.dtype]

VALUE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@dataclass(frozen=True, eq=False)
class SparseMatrix(ABC):
    """A [rows, cols] matrix stored without most of its zeros.

    Attributes:
        shape: Logical rows and columns. A weight is [out_features, k].
    """

    shape: tuple[int, int]

    #: The token used in files, on the command line and in the docs.
    name: ClassVar[str]
    #: Fields that hold tensors, in the order of the specification.
    PARTS: ClassVar[tuple[str, ...]]
    #: The part that holds the kept numbers.
    VALUES: ClassVar[str] = "values"

    @classmethod
    @abstractmethod
    def from_dense(cls, dense: Tensor) -> Self:
        """Store `dense` [rows, cols] exactly; -0.0 counts as zero and reads back as +0.0."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the matrix [rows, cols], on the device and in the dtype of the values."""

    @abstractmethod
    def validate(self) -> None:
        """Raise FormatError naming the first fact that does not hold."""

    @classmethod
    @abstractmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """Shape and dtype of each part, from facts alone: what a loader allocates."""

    @classmethod
    @abstractmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """Wrap existing tensors without copying or checking their contents."""

    @abstractmethod
    def attributes(self) -> dict[str, Attribute]:
        """JSON facts that `part_specs` and `from_parts` need besides shape and dtype."""

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {part: getattr(self, part) for part in self.PARTS}

    def map_parts(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply `fn` to every part, as `.to()` and `.clone()` do."""
        return replace(self, **{part: fn(tensor) for part, tensor in self.parts().items()})

    def to(self, device: torch.device | str) -> Self:
        """Move every part to `device`."""
        return self.map_parts(lambda part: part.to(device))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self._values.device

    @property
    def nbytes(self) -> int:
        """Stored bytes: values, indices and metadata together."""
        return sum(part.numel() * part.element_size() for part in self.parts().values())

    @property
    def nnz(self) -> int:
        """Non-zero entries, counted on the values."""
        return int(nonzero_mask(self._values).sum())

    @property
    def density(self) -> float:
        """Non-zero entries over all entries; 0 for an empty matrix."""
        return self.nnz / max(1, self.shape[0] * self.shape[1])

    @property
    def _values(self) -> Tensor:
        return getattr(self, self.VALUES)  # type: ignore[no-any-return]

    def _check_parts(self) -> None:
        """Check presence, shape, dtype and device of every part against `part_specs`."""
        check_dtype(self.dtype)
        specs = self.part_specs(self.shape, self.dtype, self.attributes())
        for part, (shape, dtype) in specs.items():
            tensor = getattr(self, part)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise FormatError(
                    f"{self.name} part {part!r} is {_describe(tensor)}",
                    need=f"{dtype} {list(shape)} for a matrix of {list(self.shape)}",
                    hint="read the matrix again, or rebuild it with from_dense",
                )
            if tensor.device != self.device:
                raise FormatError(
                    f"{self.name} part {part!r} is on {tensor.device}, values on {self.device}",
                    need="all parts on one device",
                    hint="matrix.to(device)",
                )


def nonzero_mask(values: Tensor) -> Tensor:
    """True where an entry is neither +0 nor -0; works for the 8-bit floats torch cannot compare."""
    if values.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        # Shifting out the sign bit leaves zero for both +0 (0x00) and -0 (0x80).
        return (values.view(torch.uint8) & 0x7F) != 0
    return values != 0


def check_dense(dense: Tensor, need: str = "a 2-D tensor [rows, cols]") -> None:
    """Refuse what no format can store: wrong rank, empty, or an unknown dtype."""
    if dense.ndim != 2 or 0 in dense.shape:
        raise FormatError(
            f"tensor of shape {list(dense.shape)}",
            need=f"{need} with at least one row and one column",
            hint="reshape the weight to [out_features, k]",
        )
    check_dtype(dense.dtype)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse value dtypes that no operator computes with."""
    if dtype not in VALUE_DTYPES:
        raise FormatError(
            f"values of {dtype}",
            need="one of " + ", ".join(str(known).removeprefix("torch.") for known in VALUE_DTYPES),
            hint="dense.to(torch.bfloat16)",
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"

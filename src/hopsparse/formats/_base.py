"""What every stored matrix can do.

A format is a frozen dataclass: a logical shape, a few tensors (its parts) and a few JSON values
(its attributes). Parts and attributes together are the stored form; nothing else is needed to
read a matrix back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

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

#: Conversions work on pieces of about this many entries: the working set stays in cache, and no
#: second copy of a layer is alive.
CHUNK_ELEMENTS = 1 << 18

#: The same on a GPU, where a piece costs launches, and nothing is gained from small ones.
CUDA_CHUNK_ELEMENTS = 1 << 24

_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


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
    #: All parts that hold some of them.
    VALUE_PARTS: ClassVar[tuple[str, ...]] = ("values",)

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
    def part_names(cls, attributes: Mapping[str, Attribute]) -> tuple[str, ...]:
        """The parts of a matrix with these attributes, in the order of the specification."""
        return cls.PARTS

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

    def __repr__(self) -> str:
        facts = [f"{self.shape[0]} x {self.shape[1]}", self.facts_text()]
        dtype = str(self.dtype).removeprefix("torch.")
        shown = ", ".join([*filter(None, facts), dtype, f"{self.nbytes} bytes"])
        return f"{type(self).__name__}({shown})"

    def facts_text(self) -> str:
        """The attributes in one line; the dtype is for the reader to add."""
        facts = self.attributes().items()
        return ", ".join(f"{key}={value}" for key, value in facts if key != "dtype")

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {part: getattr(self, part) for part in self.PARTS}

    def map_parts(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply `fn` to every part, as `.to()` and `.clone()` do."""
        return self.with_parts({part: fn(tensor) for part, tensor in self.parts().items()})

    def with_parts(self, parts: Mapping[str, Any]) -> Self:
        """The same facts around other tensors of the same shapes."""
        changed: dict[str, Any] = dict(parts)
        return replace(self, **changed)

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
        check_shape(self.shape)
        check_dtype(self.dtype)
        specs = self.part_specs(self.shape, self.dtype, self.attributes())
        parts = self.parts()
        for part, (shape, dtype) in specs.items():
            tensor = parts[part]
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


def bit_view(values: Tensor) -> Tensor:
    """The same memory as integers: copies NaN payloads as they are, and indexes 8-bit floats."""
    return values.view(_INT_OF_SIZE[values.element_size()])


def nonzero_mask(values: Tensor) -> Tensor:
    """True where an entry is neither +0 nor -0.

    Floats are read as integers: torch cannot compare the 8-bit ones, and a comparison loses
    denormals where the process flushes them.
    """
    if not values.dtype.is_floating_point:
        return values != 0
    bits = bit_view(values)
    return (bits & ((1 << (8 * values.element_size() - 1)) - 1)) != 0


def chunk_elements(device: torch.device | None) -> int:
    """Entries of a piece on `device`; None is the CPU."""
    return CUDA_CHUNK_ELEMENTS if device is not None and device.type == "cuda" else CHUNK_ELEMENTS


def row_slices(
    rows: int, cols: int, multiple: int = 1, device: torch.device | None = None
) -> Iterator[slice]:
    """Consecutive rows, about `chunk_elements` entries and a multiple of `multiple` rows each."""
    step = max(1, chunk_elements(device) // (multiple * max(1, cols))) * multiple
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def pointer_dtype(count: int) -> torch.dtype:
    """int32 while `count` fits, int64 beyond."""
    return torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64


def pointers(counts: Tensor) -> Tensor:
    """Running sum of `counts` from 0: the row pointer of rows that hold `counts` items."""
    total = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=total[1:])
    return total.to(pointer_dtype(int(total[-1])))


def count_attribute(attributes: Mapping[str, Attribute], key: str) -> int:
    """A stored count: an integer of at least 0."""
    count = attributes.get(key)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise FormatError(
            f"attribute {key!r} is {count!r}", need="an integer of at least 0", hint=f'"{key}": 0'
        )
    return count


def check_shape(shape: tuple[int, int]) -> None:
    """Refuse a logical shape without rows or columns."""
    if len(shape) != 2 or any(type(side) is not int for side in shape) or min(shape) < 1:
        raise FormatError(
            f"matrix of shape {list(shape)}",
            need="two whole numbers: at least one row and one column",
            hint="leave empty layers dense",
        )


def check_indptr(name: str, indptr: Tensor, count: int) -> None:
    """Refuse row pointers that do not rise from 0 to `count`."""
    ends = (int(indptr[0]), int(indptr[-1]))
    falls = (indptr[1:] < indptr[:-1]).nonzero()
    hint = "torch.cumsum of the number of entries in each row, with a 0 in front"
    if falls.numel():
        row = int(falls[0])
        raise FormatError(
            f"{name} indptr falls from {int(indptr[row])} to {int(indptr[row + 1])} at {row}",
            need="indptr that never decreases",
            hint=hint,
        )
    if ends != (0, count):
        raise FormatError(
            f"{name} indptr runs from {ends[0]} to {ends[1]}",
            need=f"from 0 to the {count} stored entries",
            hint=hint,
        )


def check_dense(dense: Tensor, need: str = "a 2-D tensor [rows, cols]") -> Tensor:
    """Refuse what no format can store; return the tensor with its bits as its numbers say."""
    if not isinstance(dense, Tensor):
        raise FormatError(
            f"a {type(dense).__name__}", need=need, hint="torch.tensor(...), or linear.weight"
        )
    if dense.is_nested or dense.layout != torch.strided:
        what = "nested" if dense.is_nested else str(dense.layout).removeprefix("torch.")
        raise FormatError(
            f"a tensor of layout {what}", need="a dense tensor", hint="dense.to_dense()"
        )
    if dense.is_meta:
        raise FormatError(
            f"tensor of shape {list(dense.shape)} on the meta device",
            need="numbers to store",
            hint="load the weight, or SparseLinear.empty(...) for a loader to fill",
        )
    if dense.ndim != 2 or 0 in dense.shape:
        raise FormatError(
            f"tensor of shape {list(dense.shape)}",
            need=f"{need} with at least one row and one column",
            hint="reshape the weight to [out_features, k]",
        )
    check_dtype(dense.dtype)
    return dense.resolve_neg()


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

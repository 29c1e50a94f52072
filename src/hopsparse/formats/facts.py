"""The JSON facts of a matrix: with its parts, all that is needed to read it back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import FormatError
from ._base import VALUE_DTYPES, Attribute, PartSpec, SparseMatrix
from .quantized import Quantized, stored_named

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in VALUE_DTYPES}
_RESTORE = "restore the file from its source, or write it again"


@dataclass(frozen=True)
class MatrixFacts:
    """How a matrix is stored.

    Attributes:
        format: A key of `hopsparse.formats.FORMATS`, or "quantized".
        shape: Logical [rows, cols]; [out_features, k] of a weight.
        dtype: Name of the values' torch dtype, such as "bfloat16"; where they are quantized, of
            the dtype that they stand for.
        attributes: Facts that the format needs besides shape and dtype.
    """

    format: str
    shape: tuple[int, int]
    dtype: str
    attributes: dict[str, Attribute]

    @classmethod
    def of(cls, matrix: SparseMatrix) -> Self:
        """Describe `matrix`."""
        dtype = str(matrix.dtype).removeprefix("torch.")
        return cls(matrix.name, matrix.shape, dtype, matrix.attributes())

    @classmethod
    def parse(cls, value: object) -> Self:
        """Read facts that came from a file; nothing about them is taken for granted.

        Raises:
            FormatError: They are not those of a matrix.
            ArgumentError: They name a format or pattern that does not exist.
        """
        if not isinstance(value, Mapping):
            raise FormatError(f"facts {value!r:.60}", need="a JSON object", hint=_RESTORE)
        shape, attributes = value.get("shape"), value.get("attributes")
        sound = isinstance(shape, list | tuple) and len(shape) == 2
        if not sound or not all(type(side) is int and side > 0 for side in shape):  # type: ignore[union-attr]
            raise FormatError(f"shape {shape!r}", need="[rows, cols], both positive", hint=_RESTORE)
        dtype = value.get("dtype")
        named = isinstance(dtype, str) and dtype in _DTYPES
        if not named or not _are_attributes(attributes):
            raise FormatError(
                f"dtype {dtype!r} and attributes {attributes!r}",
                need="a dtype among " + ", ".join(_DTYPES) + ", and an object of plain values",
                hint=_RESTORE,
            )
        kind = stored_named(str(value.get("format")))
        rows, cols = shape  # type: ignore[misc]
        facts = cls(kind.name, (rows, cols), str(dtype), dict(attributes))  # type: ignore[arg-type]
        facts.part_specs()
        return facts

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "format": self.format,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "attributes": self.attributes,
        }

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return _DTYPES[self.dtype]

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""
        return stored_named(self.format).part_names(self.attributes)

    @property
    def stored_as(self) -> str:
        """The format of the values: of the codes, where they are quantized."""
        quantized = self.format == Quantized.name
        return str(self.attributes["codes"]) if quantized else self.format

    @property
    def scheme(self) -> str:
        """What values are rounded to, as text, or ""."""
        return str(self.attributes["scheme"]) if self.format == Quantized.name else ""

    @property
    def values_part(self) -> str:
        """The part that holds the values."""
        return stored_named(self.stored_as).VALUES

    def part_specs(self) -> dict[str, PartSpec]:
        """Shape and dtype of each part."""
        kind = stored_named(self.format)
        return kind.part_specs(self.shape, self.torch_dtype, self.attributes)

    def restore(self, parts: Mapping[str, Tensor]) -> SparseMatrix:
        """Wrap `parts` as the matrix; contents are left to `validate`.

        Raises:
            FormatError: A part is missing, or has another shape or dtype.
        """
        specs = self.part_specs()
        for part, (size, dtype) in specs.items():
            if part not in parts:
                raise FormatError(
                    f"part {part!r} of the {self.format} matrix is missing",
                    need="parts " + ", ".join(specs),
                    hint=_RESTORE,
                )
            tensor = parts[part]
            if tuple(tensor.shape) != size or tensor.dtype != dtype:
                raise FormatError(
                    f"part {part!r} is {tensor.dtype} {list(tensor.shape)}",
                    need=f"{dtype} {list(size)}, as the facts of the {self.format} matrix say",
                    hint=_RESTORE,
                )
        return stored_named(self.format).from_parts(self.shape, parts, self.attributes)


def describe_matrix(matrix: SparseMatrix) -> dict[str, Any]:
    """The JSON facts of a matrix: with its parts, all that `restore_matrix` needs.

    Example:
        >>> from hopsparse.formats import CSR
        >>> describe_matrix(CSR.from_dense(torch.eye(2)))["attributes"]
        {'nnz': 2}
    """
    return MatrixFacts.of(matrix).to_json()


def restore_matrix(facts: Mapping[str, Any], parts: Mapping[str, Tensor]) -> SparseMatrix:
    """Wrap `parts` as the matrix that `facts` describe; contents are left to `validate`.

    Raises:
        FormatError: The facts are not those of a matrix, or disagree with the parts.
        ArgumentError: The facts name a format or pattern that does not exist.
    """
    return MatrixFacts.parse(facts).restore(parts)


def _are_attributes(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and type(fact) in (int, float, str) for name, fact in value.items()
    )

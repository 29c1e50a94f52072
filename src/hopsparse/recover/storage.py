"""How a weight was stored, so that its successor is stored the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formats import (
    BSR,
    BSR24,
    NM,
    Attribute,
    NMPattern,
    Quantized,
    Scheme,
    SparseMatrix,
    format_named,
    parse_pattern,
)
from ..quant import code_dtype, expand_scales, scale_dtype, to_codes, weight_scales


@dataclass(frozen=True)
class Storage:
    """A format and its facts, without the numbers.

    Attributes:
        fmt: Token of the format of the values or codes.
        attributes: Its attributes.
        dtype: Of the weight.
        scheme: What values are rounded to; None: they are stored as they are.
        input_scale: float32 [1] of a static scheme.
    """

    fmt: str
    attributes: Mapping[str, Attribute]
    dtype: torch.dtype
    scheme: Scheme | None = None
    input_scale: Tensor | None = None

    @classmethod
    def of(cls, matrix: SparseMatrix) -> Storage:
        """How `matrix` is stored."""
        if isinstance(matrix, Quantized):
            facts = dict(matrix.codes_attributes)
            scale = matrix.input_scale
            return cls(matrix.codes_format, facts, matrix.dtype, matrix.scheme, scale)
        return cls(matrix.name, matrix.attributes(), matrix.dtype)

    @property
    def pattern(self) -> NMPattern | None:
        """The N:M of an nm weight."""
        found = parse_pattern(str(self.attributes["pattern"])) if self.fmt == NM.name else None
        return found if isinstance(found, NMPattern) else None

    def pack(self, weight: Tensor) -> SparseMatrix:
        """Store `weight` [out, k], which has the zeros that the format asks for.

        A quantized weight gets the scales of `weight_scales`.
        """
        if self.scheme is None:
            return self._pack(weight.to(self.dtype))
        scales = weight_scales(weight, self.scheme)
        spread = expand_scales(scales, weight.shape[1], self.scheme)
        codes = to_codes(weight, spread, self.scheme.weights)
        return Quantized.of(
            self._pack(codes.to(code_dtype(self.scheme))),
            scales.to(scale_dtype(self.scheme)),
            self.scheme,
            self.dtype,
            self.input_scale,
        )

    def with_dtype(self, dtype: torch.dtype) -> Storage:
        """The same for a weight of another dtype."""
        return replace(self, dtype=dtype)

    def _pack(self, dense: Tensor) -> SparseMatrix:
        if self.pattern is not None:
            return NM.from_dense(dense, self.pattern)
        if self.fmt in (BSR.name, BSR24.name):
            rows, cols = str(self.attributes["block"]).split("x")
            kind = BSR if self.fmt == BSR.name else BSR24
            return kind.from_dense(dense, (int(rows), int(cols)))
        return format_named(self.fmt).from_dense(dense)


def stored_entries(matrix: SparseMatrix) -> Tensor:
    """[out, k] bool: the places that `matrix` has a slot for, or its non-zeros.

    A free slot of an nm group costs its bytes in any case, and so does a zero inside a block. Where
    a group has more slots than its pattern allows entries, as in 1:4, the free ones beyond that
    stay free.

    Example:
        >>> packed = NM.from_dense(torch.tensor([[0.0, 5.0, 0.0, 0.0]]))
        >>> stored_entries(packed).sum().item()
        2
    """
    if isinstance(matrix, Quantized):
        return stored_entries(matrix.codes())
    if matrix.name not in (NM.name, BSR.name, BSR24.name, "dense"):
        return nonzero(matrix.to_dense())
    parts = matrix.parts()
    values = parts[matrix.VALUES]
    # By way of float32: torch fills no 8-bit floats on some devices.
    filled = torch.ones(values.shape, dtype=torch.float32, device=values.device).to(values.dtype)
    places = nonzero(matrix.with_parts({**parts, matrix.VALUES: filled}).to_dense())
    if not isinstance(matrix, NM):
        return places
    pattern = matrix.pattern
    used = nonzero(matrix.to_dense())
    rows, k = places.shape
    rank = (places.int() + used.int()).view(rows, k // pattern.m, pattern.m)
    first = torch.sort(rank, dim=-1, descending=True, stable=True).indices[..., : pattern.n]
    allowed = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, first, True)
    return places & allowed.view_as(places)


def nonzero(dense: Tensor) -> Tensor:
    """True where an entry is not zero; 8-bit floats cannot be compared themselves."""
    return dense.float() != 0

"""Weights in 8 or 4 bits: the codes in any stored format, and the scales that give them meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..errors import ArgumentError, FormatError
from ._base import Attribute, PartSpec, SparseMatrix, check_shape, row_slices
from ._kinds import FORMATS, format_named
from .scheme import Scheme, parse_scheme

_LOGICAL = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
_DAMAGED = "restore the file, or quantise the weight again"


def code_dtype(scheme: Scheme) -> torch.dtype:
    """What codes are held in: 4-bit ones as int8, until they are packed two a byte."""
    return torch.float8_e4m3fn if scheme.weights == "fp8" else torch.int8


def scale_dtype(scheme: Scheme) -> torch.dtype:
    """What weight scales are stored in: float32 for a row, 16 bits where there are many."""
    return torch.bfloat16 if scheme.group else torch.float32


def groups_of(k: int, scheme: Scheme) -> int:
    """How many scales a row of k weights has; the last group may be shorter."""
    return -(-k // scheme.group) if scheme.group else 1


@dataclass(frozen=True, eq=False, repr=False)
class Quantized(SparseMatrix):
    """A matrix of codes in one of the other formats; an entry is code * scale.

    `hopsparse.quant.quantize_matrix` makes one from a weight, `of` from codes.

    Attributes:
        tensors: The parts: those of the codes' format, `scales`, and `input_scale` of a static
            scheme. 4-bit codes are packed, two a byte.
        codes_format: Token of the codes' format.
        codes_attributes: Its attributes.
        scheme: What the codes mean.
        logical: Dtype of the weight that this stands for: what `to_dense` returns.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    codes_format: str
    codes_attributes: Mapping[str, Attribute]
    scheme: Scheme
    logical: torch.dtype

    name: ClassVar[str] = "quantized"

    @classmethod
    def of(
        cls,
        codes: SparseMatrix,
        scales: Tensor,
        scheme: Scheme,
        dtype: torch.dtype,
        input_scale: Tensor | None = None,
    ) -> Self:
        """Put codes and scales together; contents are left to `validate`.

        Args:
            codes: [out, k] of int8 or float8_e4m3fn, in any format; those of int4 lie in -8 to 7.
            scales: [out, groups] of `scale_dtype(scheme)`.
            scheme: The scheme.
            dtype: Of the weight that this stands for: float32, bfloat16 or float16.
            input_scale: float32 [1], for a static scheme.

        Raises:
            FormatError: Something does not fit the scheme.

        Example:
            >>> from hopsparse.formats import NM
            >>> codes = NM.from_dense(torch.tensor([[3, 0, 0, -4]], dtype=torch.int8))
            >>> w = Quantized.of(codes, torch.tensor([[0.5]]), Scheme("int8"), torch.float32)
            >>> w.to_dense()
            tensor([[ 1.5000,  0.0000,  0.0000, -2.0000]])
        """
        if codes.dtype != code_dtype(scheme):
            raise FormatError(
                f"codes of {codes.dtype} under {scheme}",
                need=f"{code_dtype(scheme)}",
                hint="hopsparse.quant.quantize_matrix(weight, form)",
            )
        parts = codes.parts()
        if scheme.bits == 4:
            parts |= {part: pack_nibbles(parts[part]) for part in codes.VALUE_PARTS}
        parts["scales"] = scales
        if input_scale is not None:
            parts["input_scale"] = input_scale
        made = cls(codes.shape, parts, codes.name, codes.attributes(), scheme, dtype)
        if (input_scale is not None) != scheme.static:
            raise FormatError(
                f"{'an' if input_scale is not None else 'no'} input scale under {scheme}",
                need="one for a static scheme, none for any other",
                hint="input_scale=torch.tensor([0.1]) with int8/int8:static",
            )
        made._check_parts()
        return made

    @classmethod
    def from_dense(cls, dense: Tensor) -> Self:
        """Refuse: a dense matrix alone does not say which scheme.

        Raises:
            ArgumentError: Always.
        """
        raise ArgumentError(
            "a dense matrix to quantise, without a scheme",
            need="a scheme and scales",
            hint='hopsparse.quant.quantize_matrix(weight, "2:4+int8")',
        )

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return codes * scales [rows, cols].

        Args:
            dtype: Of the result; the logical one when None. Products are taken in float32, where
                they are what rounding to the scheme gave, and rounded once.
        """
        codes = self.codes().to_dense()
        dense = torch.empty(self.shape, dtype=dtype or self.logical, device=self.device)
        for rows in row_slices(*self.shape, device=self.device):
            scales = self.scales[rows].float()
            if self.scheme.group:
                scales = scales.repeat_interleave(self.scheme.group, dim=1)[:, : self.shape[1]]
            dense[rows] = codes[rows].float().mul_(scales)
        return dense

    def codes(self) -> SparseMatrix:
        """The codes in their format, as int8 or float8_e4m3fn; shares memory unless 4-bit."""
        kind = format_named(self.codes_format)
        parts = dict(self.tensors)
        if self.scheme.bits == 4:
            specs = kind.part_specs(self.shape, torch.int8, self.codes_attributes)
            for part in kind.VALUE_PARTS:
                parts[part] = unpack_nibbles(parts[part], specs[part][0])
        return kind.from_parts(self.shape, parts, self.codes_attributes)

    def validate(self) -> None:
        """Check the codes as their format does, and that scales are finite and above zero.

        Raises:
            FormatError: The first fact that does not hold.
        """
        self._check_parts()
        self.check_scales()
        self.codes().validate()

    def check_scales(self) -> None:
        """The part of `validate` that is no format's: scales, finite codes, unused bits.

        Raises:
            FormatError: The first fact that does not hold.
        """
        for part in ("scales", "input_scale"):
            scales = self.tensors.get(part)
            bad = None if scales is None else ~(scales.isfinite() & (scales > 0))
            if scales is not None and bad is not None and bool(bad.any()):
                raise FormatError(
                    f"{part}{bad.nonzero()[0].tolist()} is {float(scales[bad][0])}",
                    need="a finite number above 0",
                    hint=_DAMAGED,
                )
        kind = format_named(self.codes_format)
        for part in kind.VALUE_PARTS:
            stored = self.tensors[part]
            if stored.dtype == torch.float8_e4m3fn and bool(stored.float().isnan().any()):
                raise FormatError(f"NaN among the {part}", need="finite codes", hint=_DAMAGED)
            if self.scheme.bits != 4 or not stored.numel():
                continue
            count = prod(kind.part_specs(self.shape, torch.int8, self.codes_attributes)[part][0])
            if count % 2 and int(stored[-1]) >> 4:
                raise FormatError(
                    f"the last byte of the {part} is {int(stored[-1])}",
                    need=f"zero in its upper half: there are {count} codes",
                    hint=_DAMAGED,
                )

    @classmethod
    def part_specs(
        cls, shape: tuple[int, int], dtype: torch.dtype, attributes: Mapping[str, Attribute]
    ) -> dict[str, PartSpec]:
        """See `SparseMatrix.part_specs`; needs `codes`, `scheme`, `dtype` and the format's own."""
        token, facts, scheme, logical = _parse(attributes)
        check_shape(shape)
        if logical != dtype:
            raise FormatError(
                f"attribute 'dtype' is {attributes['dtype']!r} in a matrix of {dtype}",
                need="one dtype",
                hint=_DAMAGED,
            )
        kind = format_named(token)
        specs = kind.part_specs(shape, code_dtype(scheme), facts)
        if scheme.bits == 4:
            for part in kind.VALUE_PARTS:
                specs[part] = ((-(-prod(specs[part][0]) // 2),), torch.uint8)
        specs["scales"] = ((shape[0], groups_of(shape[1], scheme)), scale_dtype(scheme))
        if scheme.static:
            specs["input_scale"] = ((1,), torch.float32)
        return specs

    @classmethod
    def part_names(cls, attributes: Mapping[str, Attribute]) -> tuple[str, ...]:
        """See `SparseMatrix.part_names`."""
        token, _, scheme, _ = _parse(attributes)
        own = ("scales", "input_scale") if scheme.static else ("scales",)
        return (*format_named(token).PARTS, *own)

    @classmethod
    def from_parts(
        cls,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        attributes: Mapping[str, Attribute],
    ) -> Self:
        """See `SparseMatrix.from_parts`."""
        ordered = {name: parts[name] for name in cls.part_names(attributes)}
        return cls(shape, ordered, *_parse(attributes))

    def attributes(self) -> dict[str, Attribute]:
        """Format, scheme and logical dtype, and the attributes of the format."""
        return {
            "codes": self.codes_format,
            "scheme": str(self.scheme),
            "dtype": str(self.logical).removeprefix("torch."),
            **self.codes_attributes,
        }

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return dict(self.tensors)

    def with_parts(self, parts: Mapping[str, Any]) -> Self:
        """The same facts around other tensors of the same shapes."""
        return replace(self, tensors=dict(parts))

    def with_dtype(self, dtype: torch.dtype) -> Self:
        """The same codes and scales, standing for a weight of another dtype."""
        return replace(self, logical=dtype)

    @property
    def scales(self) -> Tensor:
        """[out, groups]."""
        return self.tensors["scales"]

    @property
    def input_scale(self) -> Tensor | None:
        """float32 [1] of a static scheme."""
        return self.tensors.get("input_scale")

    @property
    def dtype(self) -> torch.dtype:
        """The logical dtype."""
        return self.logical

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.scales.device

    @property
    def nnz(self) -> int:
        """Entries whose code is not zero."""
        return self.codes().nnz


def stored_named(token: str) -> type[SparseMatrix]:
    """The class of a token in stored facts: a format, or `quantized`.

    Raises:
        ArgumentError: No such format.
    """
    return Quantized if token == Quantized.name else format_named(token)


def pack_nibbles(codes: Tensor) -> Tensor:
    """int8 codes from -8 to 7 of any shape -> uint8 [ceil(n / 2)], the earlier one in the low bits.

    Example:
        >>> pack_nibbles(torch.tensor([1, -1, 7], dtype=torch.int8)).tolist()
        [241, 7]
    """
    flat = codes.flatten()
    flat = torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(torch.uint8).view(-1, 2)
    return flat[:, 0] & 15 | flat[:, 1] << 4


def unpack_nibbles(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_nibbles`.

    Example:
        >>> unpack_nibbles(torch.tensor([241, 7], dtype=torch.uint8), (3,)).tolist()
        [1, -1, 7]
    """
    signed = packed.view(torch.int8)
    both = torch.stack((signed << 4 >> 4, signed >> 4), dim=-1)
    return both.flatten()[: prod(shape)].view(shape)


def _parse(
    attributes: Mapping[str, Attribute],
) -> tuple[str, dict[str, Attribute], Scheme, torch.dtype]:
    """Format of the codes, its own attributes, scheme, and logical dtype."""
    facts = dict(attributes)
    token, scheme, logical = (facts.pop(key, None) for key in ("codes", "scheme", "dtype"))
    if logical not in _LOGICAL or token not in FORMATS:
        raise FormatError(
            f"attributes codes {token!r} and dtype {logical!r} of a quantized matrix",
            need=f"one of {', '.join(FORMATS)}, and one of {', '.join(_LOGICAL)}",
            hint=_DAMAGED,
        )
    return str(token), facts, parse_scheme(str(scheme)), _LOGICAL[str(logical)]

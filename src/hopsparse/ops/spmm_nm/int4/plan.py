"""What spmm_nm_int4 runs for a problem: the tile that was tuned for it, else the cost model's.

By chooser.py. A winner is of the dtype of x, and of whether a scale of w is for 32 columns or for
more; results of every dtype, and groups of 64 and of 128, take it: neither changes the main loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from ....errors import ArgumentError
from ..chooser import Chooser
from ..kernel import Config, Numbers
from ..plan import four_bit
from .dispatch import numbers_of

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_CODES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
_SCHEMES = {"int8": "/int8", "float8_e4m3fn": "/fp8"}  # inputs, as schemes have them

#: Every `Kind`, as text.
KINDS = (
    *(f"int4:{group}/{x}" for x in _HALVES for group in (128, 64, 32)),
    *(f"int4:128/{x}" for x in _CODES),
)


@dataclass(frozen=True)
class Kind:
    """A weight of 4 bits, and what it multiplies.

    Attributes:
        group: Columns that share a scale of w.
        x: Dtype of x.

    Raises:
        ArgumentError: No kernel multiplies these.

    Example:
        >>> Kind.parse("int4:128/int8")
        Kind(group=128, x='int8')
        >>> str(Kind(64, "bfloat16")), Kind(128, "float8_e4m3fn").scheme
        ('int4:64/bfloat16', 'int4:128/fp8')
    """

    group: int
    x: str

    def __post_init__(self) -> None:
        if str(self) not in KINDS:
            _refuse(str(self))

    def __str__(self) -> str:
        return f"int4:{self.group}/{self.x}"

    @classmethod
    def parse(cls, text: str) -> Kind:
        """Read one of `KINDS`.

        Raises:
            ArgumentError: It is none of them.
        """
        if text not in KINDS:
            _refuse(text)
        w, _, x = text.partition("/")
        return cls(int(w.removeprefix("int4:")), x)

    @property
    def scheme(self) -> str:
        """The scheme of a layer that runs it."""
        return f"int4:{self.group}{_SCHEMES.get(self.x, '')}"

    @property
    def x_dtype(self) -> torch.dtype:
        """Dtype of x, as torch has it."""
        return (_HALVES | _CODES)[self.x]

    @property
    def logical(self) -> torch.dtype:
        """What w stands for, and the dtype of the result: that of x, or bfloat16 beside codes."""
        return _HALVES.get(self.x, torch.bfloat16)

    @property
    def numbers(self) -> Numbers:
        """What a product computes with."""
        return numbers_of(self.group, self.x_dtype, self.logical)


def kind_of(numbers: Numbers) -> str:
    """Numbers as tuning results have them; a group is named where it has a kernel of its own.

    Example:
        >>> kind_of(Kind(64, "bfloat16").numbers), kind_of(Kind(32, "float16").numbers)
        ('int4/bfloat16', 'int4:32/float16')
    """
    return f"int4{':32' if numbers.fine else ''}/{numbers.x}"


def _tiles(numbers: Numbers, activation: str) -> tuple[Config, ...]:
    """All, whatever the activation: each has every one that the operator takes."""
    return four_bit(numbers)


def _standing(numbers: Numbers) -> Numbers:
    """What is measured for all dtypes of the result."""
    return replace(numbers, out=numbers.x if numbers.x in _HALVES else "bfloat16")


def _refuse(text: str) -> NoReturn:
    raise ArgumentError(
        f"a weight and inputs of {text!r}", need="one of " + ", ".join(KINDS), hint=KINDS[0]
    )


#: What chooses for this operator.
INT4 = Chooser("spmm_nm_int4", _tiles, kind_of, _standing)
candidates_int4 = INT4.candidates
choose_int4 = INT4.choose
choices_int4 = INT4.choices
tuned_int4 = INT4.tuned
int4_key = INT4.key
int4_versions = INT4.versions

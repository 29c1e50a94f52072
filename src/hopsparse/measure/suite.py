"""Named lists of layers to measure, read from `suites/llm.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from typing import Any, ClassVar

import torch

from ..errors import ArgumentError
from ..formats.nm import LONGEST_INT8
from .codes import LARGEST, SCALINGS

#: Every suite in turn, each problem once.
ALL = "llm"
# They repeat layers of models, and are left out of `ALL`.
_VIEWS = ("anchors", "few")
_LIMIT = 2**31


@dataclass(frozen=True)
class Problem:
    """One product y = x @ w.T.

    Attributes:
        layer: What it is in a model.
        out: Rows of w.
        k: Columns of w and of x.
        tokens: Rows of x.
        dtype: `bfloat16` or `float16`.

    Example:
        >>> Problem("square", 64, 64, 2).flops
        16384
    """

    layer: str
    out: int
    k: int
    tokens: int
    dtype: str = "bfloat16"

    DTYPES: ClassVar[Mapping[str, torch.dtype]] = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }

    def __post_init__(self) -> None:
        sides = (self.out, self.k, self.tokens)
        if min(sides) < 1 or max(sides) >= _LIMIT:
            raise ArgumentError(
                f"a product of {self.tokens} tokens with [{self.out}, {self.k}]",
                need="positive numbers below 2^31",
                hint="4096x4096 with 16 tokens",
            )
        if self.k % 4:
            raise ArgumentError(
                f"k = {self.k}",
                need="whole groups of 4, for 2:4",
                hint=f"k = {self.k + -self.k % 4}",
            )
        if self.dtype not in self.DTYPES:
            known = list(self.DTYPES)
            raise ArgumentError(
                f"dtype {self.dtype!r}", need="one of " + ", ".join(known), hint=known[0]
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return self.DTYPES[self.dtype]

    @property
    def flops(self) -> int:
        """Operations of the dense product, whatever the sparsity."""
        return 2 * self.tokens * self.out * self.k


@dataclass(frozen=True)
class CodedProblem(Problem):
    """One product of 8-bit codes; `dtype` is theirs.

    Attributes:
        scaling: What codes stand for: `none`, `tensor` or `rows`, as `hopsparse.measure.codes` has
            them.

    Example:
        >>> CodedProblem("square", 64, 64, 2, "int8", "rows").torch_dtype
        torch.int8
    """

    dtype: str = "float8_e4m3fn"
    scaling: str = "none"

    DTYPES: ClassVar[Mapping[str, torch.dtype]] = {
        str(dtype).removeprefix("torch."): dtype for dtype in LARGEST
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype == "int8" and self.k >= LONGEST_INT8:
            raise ArgumentError(
                f"int8 rows of {self.k}",
                need=f"less than {LONGEST_INT8}: their sums may leave int32",
                hint="--dtype float8_e4m3fn",
            )
        if self.scaling not in SCALINGS:
            raise ArgumentError(
                f"scaling {self.scaling!r}", need="one of " + ", ".join(SCALINGS), hint="rows"
            )


@dataclass(frozen=True)
class SummedProblem(CodedProblem):
    """One product of 8-bit codes with a scale for each token, and how it is summed.

    Attributes:
        sums: Of 8-bit floats: `promoted` or `fast`; those of integers are exact.
        grouped: w has a scale for each 128 columns, instead of one for each out-feature.

    Example:
        >>> SummedProblem("square", 64, 64, 2, sums="fast").dtype
        'float8_e4m3fn'
    """

    scaling: str = "rows"
    sums: str = "promoted"
    grouped: bool = False

    DTYPES: ClassVar[Mapping[str, torch.dtype]] = {
        **CodedProblem.DTYPES,
        "float8_e4m3fn/int4": torch.float8_e4m3fn,  # of w / of x
    }


@dataclass(frozen=True)
class Int4Problem(Problem):
    """One product with a 2:4 weight of 4 bits.

    Attributes:
        dtype: Columns that share a scale of w, and the dtype of x, behind a stroke.

    Example:
        >>> Int4Problem("square", 64, 64, 2, "int4:64/float16").torch_dtype
        torch.float16
    """

    dtype: str = "int4:128/bfloat16"

    DTYPES: ClassVar[Mapping[str, torch.dtype]] = {  # of x
        **{
            f"int4:{group}/{name}": dtype
            for name, dtype in Problem.DTYPES.items()
            for group in (128, 64, 32)
        },
        "int4:128/int8": torch.int8,
        "int4:128/float8_e4m3fn": torch.float8_e4m3fn,
    }


def coded_suite(name: str, dtype: str, scaling: str = "none") -> tuple[CodedProblem, ...]:
    """The layers and tokens of a suite in 8 bits.

    Raises:
        ArgumentError: No such suite, dtype or scaling.

    Example:
        >>> len(coded_suite("anchors", "int8")) == 6 * 4
        True
    """
    found = (
        CodedProblem(each.layer, each.out, each.k, each.tokens, dtype, scaling)
        for each in read_suite(name)
    )
    # A suite has each layer in several dtypes of 16 bits.
    return tuple(dict.fromkeys(found))


def suite_names() -> tuple[str, ...]:
    """The suites that `read_suite` knows.

    Example:
        >>> suite_names()
        ('llm', 'anchors', 'few', 'llama-3-8b', 'llama-3-70b', 'qwen3-8b', 'squares')
    """
    return (ALL, *_file()["suites"])


def read_suite(name: str) -> tuple[Problem, ...]:
    """The problems of a suite: layer by layer, then dtype, then tokens.

    Raises:
        ArgumentError: No such suite.

    Example:
        >>> len(read_suite("anchors")) == 6 * 4 * 2
        True
    """
    file = _file()
    if name == ALL:
        models = [each for each in file["suites"] if each not in _VIEWS]
        found: dict[tuple[int, int, int, str], Problem] = {}
        for problem in chain.from_iterable(map(read_suite, models)):
            # One shape may be a layer of several models: the first name stands.
            found.setdefault(_key(problem), problem)
        return tuple(found.values())
    if name not in file["suites"]:
        raise ArgumentError(
            f"suite {name!r}", need="one of " + ", ".join(suite_names()), hint="--suite anchors"
        )
    suite: dict[str, Any] = {**file, **file["suites"][name]}
    return tuple(
        Problem(layer["name"], layer["shape"][0], layer["shape"][1], tokens, dtype)
        for layer in suite["layers"]
        for dtype in suite["dtypes"]
        for tokens in suite["tokens"]
    )


def _key(problem: Problem) -> tuple[int, int, int, str]:
    return problem.out, problem.k, problem.tokens, problem.dtype


def _file() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("suites/llm.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)

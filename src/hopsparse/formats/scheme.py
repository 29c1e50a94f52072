"""How the kept values of a weight are stored in fewer bits, and what its inputs are rounded to.

A scheme is a plain value: hashable, printable, and `parse_scheme(str(s)) == s`. A form is a pattern
and a scheme, either of which may be absent: all that a plan says about one layer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ArgumentError
from .pattern import Pattern, parse_pattern

_EXAMPLES = "int8, fp8, int4:64 or fp8/int4"
WEIGHTS = ("int8", "fp8", "int4")
ACTIVATIONS = ("none", "int8", "fp8", "int4")
GROUPS = (0, 32, 64, 128)
_BITS = {"int8": 8, "fp8": 8, "int4": 4}
# Tensor cores multiply equal types, so 8-bit weights come with 8-bit inputs; 4-bit weights save
# bytes, and are widened to the type of their inputs.
_DEFAULT_ACTIVATIONS = {"int8": "int8", "fp8": "fp8", "int4": "none"}
_DEFAULT_GROUP = {"int8": 0, "fp8": 0, "int4": 64}


@dataclass(frozen=True)
class Scheme:
    """Number formats of a layer's weight and inputs. All are symmetric: zero stays exactly zero.

    Attributes:
        weights: `int8`, `fp8` (E4M3, largest 448) or `int4` (-8 to 7).
        group: Consecutive entries along k that share a scale; 0: the whole output channel.
        activations: What inputs are rounded to, one scale a token: `int8`, `fp8`, `int4`, or
            `none`: they stay as they are.
        static: One input scale, measured by calibration, instead of one computed for each token.

    Example:
        >>> Scheme("int4", group=64).bits
        4
    """

    weights: str
    group: int = 0
    activations: str = "none"
    static: bool = False

    def __post_init__(self) -> None:
        for what, value, choices in (
            ("weights", self.weights, WEIGHTS),
            ("group", self.group, GROUPS),
            ("activations", self.activations, ACTIVATIONS),
        ):
            if value not in choices:
                need = "one of " + ", ".join(map(str, choices))
                raise ArgumentError(f"{what} {value!r}", need=need, hint=_EXAMPLES)
        if self.static and self.activations == "none":
            raise ArgumentError(
                "a static scale for inputs that are not rounded",
                need="activations int8, fp8 or int4",
                hint="int8/int8:static",
            )

    @property
    def bits(self) -> int:
        """Bits of one stored weight, scales aside."""
        return _BITS[self.weights]

    def describe(self) -> str:
        """What is rounded and how, as a clause.

        Example:
            >>> Scheme("int8", activations="int8").describe()
            'int8 weights, inputs rounded per token'
        """
        text = f"{self.weights} weights" + (f" by groups of {self.group}" if self.group else "")
        if self.activations == "none":
            return text
        to = "" if self.activations == self.weights else f" to {self.activations}"
        how = "by one measured scale" if self.static else "per token"
        return f"{text}, inputs rounded{to} {how}"

    def __str__(self) -> str:
        text = self.weights
        if self.group != _DEFAULT_GROUP[self.weights] or self.weights == "int4":
            text += f":{self.group}"
        if self.static:
            return f"{text}/{self.activations}:static"
        if self.activations != _DEFAULT_ACTIVATIONS[self.weights]:
            text += f"/{self.activations}"
        return text


@dataclass(frozen=True)
class Form:
    """What becomes of one layer.

    Attributes:
        pattern: Which entries may stay; None keeps all.
        scheme: What the kept ones are rounded to; None keeps the dtype of the model.

    Example:
        >>> str(parse_form("2:4+int4:32"))
        '2:4+int4:32'
        >>> parse_form("dense") == Form()
        True
    """

    pattern: Pattern | None = None
    scheme: Scheme | None = None

    def __str__(self) -> str:
        pattern = "dense" if self.pattern is None else str(self.pattern)
        return pattern if self.scheme is None else f"{pattern}+{self.scheme}"


def parse_scheme(text: str) -> Scheme:
    """Read a scheme as users write it.

    Args:
        text: `WEIGHTS[:GROUP][/ACTIVATIONS[:static]]`. Left out, the group is 64 for int4 and a
            whole row for 8-bit weights; inputs are rounded to the type of 8-bit weights.

    Raises:
        ArgumentError: The text is no scheme.

    Example:
        >>> parse_scheme("int8")
        Scheme(weights='int8', group=0, activations='int8', static=False)
        >>> str(parse_scheme("int4"))
        'int4:64'
    """
    found = re.fullmatch(r"([a-z0-9]+)(?::(\d+))?(?:/([a-z0-9]+)(:static)?)?", text.strip())
    if not found or found[1] not in WEIGHTS:
        raise ArgumentError(
            f"scheme {text!r}", need="WEIGHTS[:GROUP][/ACTIVATIONS[:static]]", hint=_EXAMPLES
        )
    weights, group, activations, static = found.groups()
    return Scheme(
        weights,
        _DEFAULT_GROUP[weights] if group is None else int(group),
        activations or _DEFAULT_ACTIVATIONS[weights],
        static is not None,
    )


def parse_form(text: str) -> Form:
    """Read a form: `dense`, a pattern, or either with `+SCHEME`.

    Raises:
        ArgumentError: The text is no form.

    Example:
        >>> parse_form("6:8+fp8").scheme.weights
        'fp8'
    """
    pattern, plus, scheme = text.strip().partition("+")
    return Form(
        None if pattern.strip() == "dense" else parse_pattern(pattern),
        parse_scheme(scheme) if plus else None,
    )

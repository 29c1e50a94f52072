"""Layers and token counts as users write them."""

from __future__ import annotations

import re

from ..errors import ArgumentError

# More digits than any size has: Python refuses to read thousands of them.
_NUMBER = "[0-9]{1,18}"


def shape_of(text: str) -> tuple[int, int]:
    """Read OUTxK.

    Raises:
        ArgumentError: It is no shape.

    Example:
        >>> shape_of("28672x4096")
        (28672, 4096)
    """
    found = re.fullmatch(rf"({_NUMBER})x({_NUMBER})", text)
    if found is None:
        raise ArgumentError(f"shape {text!r}", need="OUTxK", hint="--shape 4096x4096")
    return int(found[1]), int(found[2])


def tokens_of(text: str) -> list[int]:
    """Read token counts with commas between them.

    Raises:
        ArgumentError: It is no list of numbers.

    Example:
        >>> tokens_of("1,256")
        [1, 256]
    """
    if re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", text) is None:
        raise ArgumentError(f"tokens {text!r}", need="numbers with commas", hint="--tokens 1,256")
    return [int(word) for word in text.split(",")]

"""Token counts that share a winner: a server sees any count, and no two are tuned apart."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ..errors import ArgumentError

_LAST = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Beyond the last class every tile fills the GPU many times over, and the order changes no more.
_MOST = 16384


@dataclass(frozen=True)
class TokenClass:
    """A range of token counts.

    Attributes:
        first: Its smallest count.
        last: Its largest; None where it has no end.
    """

    first: int
    last: int | None

    @property
    def measured(self) -> int:
        """The count that stands for all of them: the largest."""
        return _MOST if self.last is None else self.last

    @property
    def name(self) -> str:
        """As people write it.

        Example:
            >>> token_class(1).name, token_class(100_000).name
            ('1-16', '4097-')
        """
        return f"{self.first}-{self.last or ''}"


_CLASSES = tuple(
    TokenClass(before + 1, last) for before, last in zip((0, *_LAST), (*_LAST, None), strict=True)
)


def token_class(tokens: int) -> TokenClass:
    """The class of a token count.

    Raises:
        ArgumentError: No tokens.

    Example:
        >>> token_class(33)
        TokenClass(first=33, last=64)
    """
    if tokens < 1:
        raise ArgumentError(f"{tokens} tokens", need="at least one", hint="1")
    return _CLASSES[bisect_left(_LAST, tokens)]


def token_classes(most: int | None = None) -> tuple[TokenClass, ...]:
    """All classes, or those of the counts from 1 to `most`.

    Example:
        >>> [each.name for each in token_classes(33)]
        ['1-16', '17-32', '33-64']
    """
    return _CLASSES if most is None else _CLASSES[: _CLASSES.index(token_class(most)) + 1]

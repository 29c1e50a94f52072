"""Calls that passed their checks: one that looks the same is not checked again.

To check all that a product of codes is given takes the host several times as long as to launch it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

Call = TypeVar("Call")
_PLAIN = (Tensor, torch.nn.Parameter)
_MOST = 64  # of one weight: shapes that recur are few


def looks_of(
    tensors: tuple[Tensor | None, ...], words: tuple[object, ...]
) -> tuple[object, ...] | None:
    """All that checks ask of a call; None where they must be asked, as under torch.compile.

    Args:
        tensors: Of the call, those of the weight as well.
        words: The rest, by value.

    Example:
        >>> one, other = torch.ones(2), torch.zeros(2)
        >>> looks_of((one, None), ("relu",)) == looks_of((other, None), ("relu",))
        True
        >>> looks_of((one, 0.5), ("relu",)) is None
        True
    """
    if torch.compiler.is_compiling():
        return None
    grad = torch.is_grad_enabled()
    found: list[object] = [*words]
    for tensor in tensors:
        if tensor is None:
            found.append(None)
        elif type(tensor) in _PLAIN and not tensor.is_nested:
            learns = grad and tensor.requires_grad
            found += (tensor.shape, tensor.dtype, tensor.device, tensor.layout, learns)
        else:
            return None
    return tuple(found)


class Passed:
    """The calls of one operator that passed, kept with the weight.

    Args:
        name: Under which a weight keeps them.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def find(self, w: Any, looks: tuple[Hashable, ...] | None) -> Any:
        """What was kept of a call that looked like this; None if none passed."""
        if looks is None:
            return None
        try:
            known = w.__dict__.get(self._name)
            return None if known is None else known.get(looks)
        except (AttributeError, TypeError):  # w is no weight, or a word has no hash.
            return None

    def keep(self, w: Any, looks: tuple[Hashable, ...] | None, call: Call) -> Call:
        """Keep a call that passed, and give it back."""
        if looks is not None:
            known = w.__dict__.setdefault(self._name, {})
            if len(known) >= _MOST:
                known.clear()
            known[looks] = call
        return call

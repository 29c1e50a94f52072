"""What hooks on layers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class StopForward(BaseException):
    """Leaves a forward early; no `except Exception` of a model stops it."""


def layer_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a call of nn.Linear."""
    inputs = args[0] if args else kwargs["input"]
    assert isinstance(inputs, Tensor)
    return inputs


def tensor_version(tensor: Tensor) -> int:
    """Changes when the tensor is written in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version

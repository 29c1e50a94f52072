"""How a model in memory is called with calibration inputs, and what the first block then sees."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError, CalibrationError
from ..prune import Activations, capture_inputs, without_cache


def as_inputs(calibration: object) -> list[Any]:
    """The calibration inputs as a list.

    Raises:
        ArgumentError: They are one input, or none at all.
    """
    if not isinstance(calibration, Iterable) or isinstance(calibration, str | Mapping | Tensor):
        raise ArgumentError(
            f"a {type(calibration).__name__} as the calibration inputs",
            need="a list of inputs, or () for magnitude pruning",
            hint="[inputs]",
        )
    return list(calibration)


def call(model: nn.Module, item: Any) -> Any:
    """Call `model` with one input: a tensor, a tuple of arguments, or a mapping of named ones."""
    args, kwargs = _arguments(model, item)
    return model(*args, **kwargs)


def first_inputs(model: nn.Module, path: str, items: list[Any]) -> Activations:
    """The calls of the first block, at `path`, or of the whole model when that is "".

    Raises:
        CalibrationError: The inputs cannot be used.
    """
    if path:
        return capture_inputs(lambda item: call(model, item), model.get_submodule(path), items)
    activations = Activations()
    first = next(iter(inspect.signature(model.forward).parameters), None)
    if first is None:
        raise CalibrationError(
            f"a {type(model).__name__} whose forward takes no argument",
            need="a forward that takes a tensor",
            hint="Recipe(pattern, method='magnitude') without calibration",
        )
    for item in items:
        args, kwargs = _arguments(model, item)
        hidden = args[0] if args else kwargs.pop(first, None)
        if not isinstance(hidden, Tensor):
            raise CalibrationError(
                f"an input whose first argument is a {type(hidden).__name__}",
                need=f"a tensor for {first!r}, the first argument of the model",
                hint="tensors, tuples that start with one, or mappings that name it",
            )
        activations.hidden.append(hidden)
        activations.args.append(args[1:])
        activations.kwargs.append(kwargs)
    return activations


def _arguments(model: nn.Module, item: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = without_cache(model)
    if isinstance(item, Mapping):
        return (), {**options, **item}
    return (item if isinstance(item, tuple) else (item,)), options

"""How blocks are called: their inputs recorded, moved on, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError
from .hooks import StopForward

if TYPE_CHECKING:
    from .reference import Reference


@dataclass
class Activations:
    """The calls of one block: a hidden state a window, and the other arguments.

    Args:
        hidden: The first argument of each call; `advance` replaces them.
        args: The other positional arguments of each call.
        kwargs: The keyword arguments of each call. Calls with equal arguments share one object.
        reference: The dense model on the same windows, for targets other than a layer's own.

    Example:
        >>> len(Activations(hidden=[torch.zeros(1, 4, 8)], args=[()], kwargs=[{}]))
        1
    """

    hidden: list[Tensor] = field(default_factory=list)
    args: list[tuple[Any, ...]] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    reference: Reference | None = None

    def __len__(self) -> int:
        return len(self.hidden)


def capture_inputs(
    run: Callable[[Tensor], Any], first_block: nn.Module, windows: Sequence[Tensor]
) -> Activations:
    """Record how the first block is called for each window; the forward stops there.

    One call per window, so a window that is a batch [b, tokens] makes a batched stream. All
    windows in one batch are the fastest way to prune: see `prune_block`.

    Args:
        run: Runs the model on a window, without a cache (see `without_cache`).
        first_block: The first block that will be pruned.
        windows: What `run` takes; usually token ids [batch, tokens].

    Raises:
        CalibrationError: No window, the block is not reached, or it is called with objects that
            cannot be passed again (a cache, for one).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        >>> len(capture_inputs(model, model[1], [torch.zeros(1, 3, 4)]))
        1
    """
    found = Activations()

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _record(found, args, kwargs)
        raise StopForward

    if not len(windows):
        raise CalibrationError("no window", need="at least one window", hint="a longer text")
    handle = first_block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            for index, window in enumerate(windows):
                try:
                    run(window)
                except StopForward:
                    continue
                raise CalibrationError(
                    f"window {index} never reached the first block",
                    need="a run that calls it",
                    hint="check which module was passed as first_block",
                )
    finally:
        handle.remove()
    return found


def without_cache(model: nn.Module) -> dict[str, Any]:
    """What to call `model` with so that a language model of transformers fills no cache.

    A cache costs memory, and a block that has one cannot be called again with the same inputs.

    Example:
        >>> without_cache(nn.Linear(4, 4))
        {}
    """
    return {"use_cache": False} if hasattr(model, "generation_config") else {}


def advance(block: nn.Module, activations: Activations) -> None:
    """Replace the hidden states by the block's outputs, one call at a time.

    Args:
        block: The block that `activations` belong to.
        activations: Changed in place: now the inputs of the next block.

    Raises:
        CalibrationError: The output is no hidden state of the same shape, or not finite.

    Example:
        >>> acts = Activations([torch.ones(1, 2, 4)], [()], [{}])
        >>> advance(nn.Identity(), acts)
        >>> acts.hidden[0].shape
        torch.Size([1, 2, 4])
    """
    with quiet(block):
        for index in range(len(activations)):
            store(activations, index, call(block, activations, index, copy=False))


def call(
    block: Callable[..., Any], activations: Activations, index: int, *, copy: bool = True
) -> Any:
    """Call `block` as it was called for window `index`.

    A block may add to its input in place; with `copy` the next call still sees the original.
    """
    hidden = activations.hidden[index]
    hidden = hidden.clone() if copy else hidden
    return block(hidden, *activations.args[index], **activations.kwargs[index])


def store(activations: Activations, index: int, output: Any) -> None:
    """Keep what a block returned for window `index` as the next block's input.

    Raises:
        CalibrationError: It is no hidden state of the same shape, or not finite.
    """
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    before = activations.hidden[index]
    if not isinstance(hidden, Tensor) or hidden.shape != before.shape:
        what = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise CalibrationError(
            f"a block that returns {what} for hidden states {tuple(before.shape)}",
            need="hidden states of the same shape, alone or first in a tuple",
            hint="pass the repeated blocks of the model only",
        )
    if not bool(hidden.isfinite().all()):
        raise CalibrationError(
            f"window {index}: the block's output is not finite",
            need="finite activations",
            hint="another calibration text, or the model in float32",
        )
    activations.hidden[index] = hidden


@contextmanager
def quiet(block: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; the modes of all submodules come back."""
    modes = [(module, module.training) for module in block.modules()]
    block.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _record(found: Activations, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = dict(kwargs)
    hidden, rest = (args[0], args[1:]) if args else (named.pop("hidden_states", None), ())
    if not isinstance(hidden, Tensor):
        raise CalibrationError(
            f"a block called with {type(hidden).__name__}",
            need="hidden states as the first argument",
            hint="pass the first of the repeated blocks",
        )
    _check_plain(rest, "an argument")
    for key, value in named.items():
        _check_plain(value, f"argument {key}")
    if found.hidden and _equal((found.args[-1], found.kwargs[-1]), (rest, named)):
        rest, named = found.args[-1], found.kwargs[-1]
    found.hidden.append(hidden.detach())
    found.args.append(rest)
    found.kwargs.append(named)


def _check_plain(value: Any, what: str) -> None:
    """Refuse objects that change when a block is called (caches): blocks are called repeatedly."""
    if isinstance(value, (tuple, list)):
        for item in value:
            _check_plain(item, what)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_plain(item, f"{what}[{key!r}]")
    elif not isinstance(value, (Tensor, type(None), bool, int, float, str, torch.dtype)):
        raise CalibrationError(
            f"a block called with {what} of type {type(value).__name__}",
            need="tensors and plain values, so that the block can be called again",
            hint="use_cache=False",
        )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)

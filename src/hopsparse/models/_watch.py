"""Looks at what the layers of a block get, over all windows, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..prune import Activations, quiet
from ..prune.activations import call
from ..prune.hooks import StopForward, layer_input


def watch_inputs(
    block: nn.Module,
    names: Sequence[str],
    activations: Activations,
    look: Callable[[str, Tensor], None],
) -> None:
    """Run the block on every window, and call `look(name, rows)` with the inputs [n, k] of layers.

    A forward stops behind the last of the layers; what was not called was not looked at.
    """
    called: set[str] = set()

    def before(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = layer_input(args, kwargs)
        look(name, inputs.reshape(-1, inputs.shape[-1]))
        called.add(name)
        if len(called) == len(names):
            raise StopForward

    handles = [
        block.get_submodule(name).register_forward_pre_hook(partial(before, name), with_kwargs=True)
        for name in names
    ]
    try:
        with quiet(block):
            for index in range(len(activations) if names else 0):
                called.clear()
                with suppress(StopForward):
                    call(block, activations, index)
    finally:
        for handle in handles:
            handle.remove()

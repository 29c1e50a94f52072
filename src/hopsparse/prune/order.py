"""In which order the layers of a block run, and which of them see the same input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .hooks import layer_input, tensor_version


def trace_groups(
    block: nn.Module, names: Sequence[str], call: Callable[[], object]
) -> list[list[str]]:
    """Run `block` once and group its layers by the input they share, in run order.

    Args:
        block: Any module.
        names: The layers of interest, relative to the block.
        call: Runs the block on some input.

    Returns:
        Groups of names, such as q, k and v; then o; then gate and up; then down. A layer that was
        not called is in a last group of its own.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> trace_groups(mlp, ["2", "0"], lambda: mlp(torch.zeros(1, 4)))
        [['0'], ['2']]
    """
    groups: list[list[str]] = []
    # Inputs are kept alive while tracing, so that an identity is not given out twice.
    seen: list[tuple[Any, int]] = []
    called: set[str] = set()

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in called:
                return
            called.add(name)
            inputs = layer_input(args, kwargs)
            version = tensor_version(inputs)
            for index, (other, their_version) in enumerate(seen):
                if other is inputs and their_version == version:
                    groups[index].append(name)
                    return
            seen.append((inputs, version))
            groups.append([name])

        return hook

    handles = [
        block.get_submodule(name).register_forward_pre_hook(before(name), with_kwargs=True)
        for name in names
    ]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return groups + [[name] for name in names if name not in called]


def is_chain(blocks: Sequence[nn.Module], call: Callable[[], object]) -> bool:
    """Whether each block is called once, and fed with nothing but the output of the one before.

    Only then can a model be pruned a block at a time: blocks that run side by side, or with a norm
    between them, would be calibrated on the wrong inputs. Hidden states have one shape in front of
    all blocks; where it changes, as in convolutional networks, blocks are no chain either.

    Args:
        blocks: In the order in which they are thought to run.
        call: Runs the whole model on some input.

    Example:
        >>> layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        >>> is_chain(layers, lambda: layers[1](layers[0](torch.ones(1, 4))))
        True
        >>> is_chain(layers, lambda: layers[1](layers[0](torch.ones(1, 4)).relu()))
        False
        >>> layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])
        >>> is_chain(layers, lambda: layers[1](layers[0](torch.ones(1, 4))))
        False
    """
    # Tensors are kept alive, so that an identity is not given out twice.
    inputs: list[tuple[int, Any]] = []
    outputs: list[Any] = []

    def before(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append((index, args[0] if args else kwargs.get("hidden_states")))

        return hook

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output[0] if isinstance(output, (tuple, list)) and output else output)

    handles = [
        block.register_forward_pre_hook(before(index), with_kwargs=True)
        for index, block in enumerate(blocks)
    ]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    in_order = [index for index, _ in inputs] == list(range(len(blocks)))
    fed = zip(inputs[1:], outputs, strict=False)
    shapes = {given.shape for _, given in inputs if isinstance(given, Tensor)}
    return in_order and len(shapes) <= 1 and all(given is made for (_, given), made in fed)

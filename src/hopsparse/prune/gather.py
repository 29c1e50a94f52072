"""Sums statistics of layers while the block around them runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .hooks import StopForward, layer_input, tensor_version
from .statistics import Statistics


@dataclass(frozen=True)
class Seen:
    """What a layer gets and should put out, if the dense model is known.

    Attributes:
        inputs: [..., k], its inputs in the dense model.
        target: [..., out], what it should put out, less its bias.
    """

    inputs: Tensor | None = None
    target: Tensor | None = None


def add_target(statistics: Statistics, inputs: Tensor, name: str, seen: Seen) -> None:
    """Add what layer `name` should put out for the inputs that were added last, if it fits them."""
    if seen.target is not None and seen.target.shape[:-1] == inputs.shape[:-1]:
        statistics.add_stream(name, seen.target, inputs)


class Gatherer:
    """Sums statistics of named layers while the block around them runs.

    Layers that get the same tensor object in every forward (q/k/v, gate/up) share one
    `Statistics`, so its Hessian and factor exist once. Layers that shared so far and then get
    different inputs part, each with a copy.

    Args:
        layers: Name to layer.
        make: Makes an empty `Statistics` for an input.

    Example:
        >>> block = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        >>> with Gatherer(dict(block.items()), lambda x: Statistics(x.shape[-1])) as gatherer:
        ...     x = torch.ones(3, 2)
        ...     gatherer.run(lambda: (block["a"](x), block["b"](x)))
        >>> gatherer.found["a"] is gatherer.found["b"], gatherer.found["a"].tokens
        (True, 3)
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], make: Callable[[Tensor], Statistics]
    ) -> None:
        self.found: dict[str, Statistics] = {}
        self._layers = layers
        self._make = make
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._calls: dict[str, list[int]] = {}
        self._inputs: dict[tuple[int, int], int] = {}
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._runs = 0
        self._once = False

    def __enter__(self) -> Gatherer:
        for name, layer in self._layers.items():
            hook = self._hook(name)
            self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._clear()

    def run(
        self, forward: Callable[[], object], targets: Callable[[str], Seen] = lambda _: Seen()
    ) -> None:
        """Run `forward` and add what the layers saw; it may be cut short after the last layer.

        Args:
            forward: Runs the block.
            targets: What the dense model does in the place of a layer, asked after the forward.
        """
        self._clear()
        with contextlib.suppress(StopForward):
            forward()
        once = all(len(calls) == 1 for calls in self._calls.values())
        # The first forward runs to its end, and shows whether each layer is called just once.
        self._once = (
            once and len(self._calls) == len(self._layers) and (self._once or self._runs == 0)
        )
        self._runs += 1
        self._add(targets)
        self._clear()

    def _hook(self, name: str) -> Callable[..., None]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = layer_input(args, kwargs)
            key = (id(inputs), tensor_version(inputs))
            if key not in self._inputs:
                # A copy, because a later in-place operation may overwrite the inputs; the
                # original is held so that its id is not given to another tensor.
                self._inputs[key] = len(self._kept)
                self._kept.append((inputs, inputs.detach().clone()))
            self._calls.setdefault(name, []).append(self._inputs[key])
            if self._once and len(self._calls) == len(self._layers):
                raise StopForward

        return before

    def _add(self, targets: Callable[[str], Seen]) -> None:
        """Split sharers whose calls differ, then add each distinct stream once."""
        streams: dict[tuple[int, tuple[int, ...]], Statistics] = {}
        taken = {id(old) for name, old in self.found.items() if name not in self._calls}
        for name, calls in self._calls.items():
            old = self.found.get(name)
            key = (id(old) if old else 0, tuple(calls))
            if key not in streams:
                if old is None:
                    streams[key] = self._make(self._kept[calls[0]][1])
                else:
                    streams[key] = old.copy() if id(old) in taken else old
                    taken.add(id(old))
        for name, calls in self._calls.items():
            old = self.found.get(name)
            self.found[name] = streams[(id(old) if old else 0, tuple(calls))]
        for (_, stream_calls), stream in streams.items():
            users = [name for name in self._calls if self.found[name] is stream]
            for index in stream_calls:
                # A layer called twice has two targets, and no way to tell them apart.
                once = len(stream_calls) == 1
                inputs, first = self._kept[index][1], targets(users[0]) if once else Seen()
                stream.add(inputs, ", ".join(users), first.inputs)
                for name in users if once else ():
                    add_target(stream, inputs, name, targets(name))

    def _clear(self) -> None:
        self._calls, self._inputs, self._kept = {}, {}, []

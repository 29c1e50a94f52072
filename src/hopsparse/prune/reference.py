"""What the dense model does on the same windows: the target that pruned layers are fitted to.

A layer that is fitted to its own dense output on the inputs it now gets keeps what earlier layers
lost. Fitted to the dense model's output on the dense model's inputs it makes up for them (GPTAQ,
arXiv:2504.02692, does this for rounding). Where its output is added to a residual stream, what
that stream has lost so far is added to the target, so the layer pulls the stream itself back.
docs/quality.md has the gain of each step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from .activations import Activations, call, quiet, store
from .hooks import StopForward, layer_input, tensor_version


@dataclass(frozen=True)
class DenseCall:
    """What one layer did in one forward of the dense block; detached.

    Attributes:
        inputs: [..., k].
        stream: [..., out]: the residual stream behind the layer, less the layer's bias; None where
            no residual stream is known.
    """

    inputs: Tensor
    stream: Tensor | None = None


@dataclass
class Reference:
    """The dense model beside the pruned one, a block at a time.

    Args:
        activations: The calls of the first block; copied.
        residual: Layer name -> name of the module whose input is the residual stream that the
            layer's output is added to; both relative to the block.

    Example:
        >>> import torch
        >>> acts = Activations([torch.ones(1, 4)], [()], [{}])
        >>> reference = Reference(acts)
        >>> reference.enter(nn.Sequential(nn.Linear(4, 4)))
        >>> reference.calls(0, ["0"])["0"].inputs.shape
        torch.Size([1, 4])
    """

    activations: Activations
    residual: Mapping[str, str] = field(default_factory=dict)
    _block: nn.Module | None = None

    def __post_init__(self) -> None:
        mine = self.activations
        # Arguments are shared. Hidden states are not: a block may add to its input in place.
        hidden = [states.clone() for states in mine.hidden]
        self.activations = Activations(hidden, mine.args, mine.kwargs)

    def enter(self, block: nn.Module) -> None:
        """Keep a copy of `block`, which is dense still and has no hooks of ours."""
        self._block = copy.deepcopy(block)

    def calls(
        self, index: int, names: Iterable[str], *, then_advance: bool = False
    ) -> dict[str, DenseCall]:
        """Run the dense block on window `index`; what the layers `names` did.

        Layers that are not called exactly once are left out.

        Args:
            index: The window.
            names: Layers, relative to the block.
            then_advance: Let the forward finish, and keep its result as the next block's input.
        """
        assert self._block is not None, "enter a block first"
        watch = _Watch(self._block, list(names), self.residual, stop=not then_advance)
        with quiet(self._block), watch:
            try:
                output = call(self._block, self.activations, index, copy=not then_advance)
                if then_advance:
                    store(self.activations, index, output)
            except StopForward:
                pass
        return watch.found()

    def advance(self) -> None:
        """Move every window behind the dense block."""
        for index in range(len(self.activations)):
            self.calls(index, (), then_advance=True)


class _Watch:
    """Hooks on the layers of a dense block, while it runs once."""

    def __init__(
        self, block: nn.Module, names: list[str], residual: Mapping[str, str], *, stop: bool
    ) -> None:
        self._block, self._names, self._residual = block, names, residual
        self._stop = stop
        self._inputs: dict[str, list[Tensor]] = {name: [] for name in names}
        self._latest: tuple[weakref.ref[Tensor] | None, int, Tensor | None] = (None, 0, None)
        self._streams: dict[str, Tensor] = {}
        self._residuals: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        watched = {name: self._residual[name] for name in self._names if name in self._residual}
        self._handles = watch_residuals(self._block, watched, self._residuals)
        for name in self._names:
            layer = self._block.get_submodule(name)
            before = self._before(name)
            self._handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._after(name)))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def found(self) -> dict[str, DenseCall]:
        return {
            name: DenseCall(inputs[0], self._streams.get(name))
            for name, inputs in self._inputs.items()
            if len(inputs) == 1
        }

    def _before(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inputs[name].append(self._copied(layer_input(args, kwargs)))

        return hook

    def _copied(self, inputs: Tensor) -> Tensor:
        """A copy, because blocks may write to it later; layers in a row share one."""
        source, version, copied = self._latest
        if copied is None or source is None or source() is not inputs:
            copied = None
        if copied is None or version != tensor_version(inputs):
            copied = inputs.detach().clone()
            self._latest = weakref.ref(inputs), tensor_version(inputs), copied
        return copied

    def _after(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Linear, _: Any, output: Tensor) -> None:
            stream = self._residuals.get(name)
            if stream is not None and stream.shape == output.shape:
                own = output.detach()
                if layer.bias is not None:
                    own = own - layer.bias.detach()
                self._streams[name] = stream + own
            if self._stop and all(self._inputs.values()):
                raise StopForward

        return hook


def watch_residuals(
    block: nn.Module, residual: Mapping[str, str], into: dict[str, Tensor]
) -> list[Any]:
    """While the handles live, `into[layer]` is the residual stream that the layer will add to.

    Args:
        block: Where layers and modules are.
        residual: Layer -> module whose input is that stream.
        into: Filled while the block runs.
    """
    handles = []
    for name, path in residual.items():
        keep = partial(_keep, into, name)
        module = block.get_submodule(path)
        handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    return handles


def _keep(
    into: dict[str, Tensor],
    name: str,
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    stream: Tensor = args[0] if args else next(iter(kwargs.values()))
    # A copy: blocks may add to their stream in place.
    into[name] = stream.detach().clone()

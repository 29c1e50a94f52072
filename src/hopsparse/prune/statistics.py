"""What calibration says about the inputs of layers, summed over calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CalibrationError
from .compensation import HessianFactor, factor_hessian

ROWS = 1024  # rows squared at once: they stay in the cache, 6 x faster than all rows together
PANEL = 512  # columns a product; only panels on or below the diagonal of XᵀX are computed


class Statistics:
    """Token count, feature norms and XᵀX of one stream of inputs.

    Args:
        features: k, the width of the inputs.
        device: Where to sum.
        stride: XᵀX takes every `stride`-th token; norms take all.

    Example:
        >>> stats = Statistics(2)
        >>> stats.add(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        >>> stats.tokens, stats.input_norm().tolist(), stats.hessian().tolist()
        (2, [5.0, 1.0], [[12.5, 2.0], [2.0, 0.5]])
    """

    def __init__(self, features: int, device: torch.device | None = None, stride: int = 1) -> None:
        self.tokens = 0
        self.stride = stride
        self._sampled = 0
        self._squares = torch.zeros(features, device=device)
        self._moment = torch.zeros(features, features, device=device)
        self._factors: dict[tuple[float, torch.dtype], HessianFactor] = {}

    def add(self, inputs: Tensor, name: str = "") -> None:
        """Add inputs [..., k] of any floating dtype.

        Raises:
            CalibrationError: They hold NaN or infinity (or squares overflow); it says `name`.
        """
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).to(self._moment.dtype)
        if not len(rows):
            return
        # Tokens are numbered across calls, so the sample does not depend on how calls are cut.
        sample = rows[-self.tokens % self.stride :: self.stride]
        add_gram(self._moment, sample)
        if self.stride > 1:
            for part in torch.split(rows, ROWS):
                self._squares += part.square().sum(0)
        else:
            self._squares.copy_(self._moment.diagonal())
        self.tokens += len(rows)
        self._sampled += len(sample)
        self._factors.clear()
        if not bool(self._squares.isfinite().all()):
            feature = int((~self._squares.isfinite()).nonzero()[0])
            raise CalibrationError(
                f"layer {name or '?'}: its input feature {feature} is NaN or infinite",
                need="finite activations",
                hint="another calibration text, or the model in float32",
            )

    def input_norm(self) -> Tensor:
        """[k] float32, the 2-norm of each feature over all tokens."""
        return self._squares.sqrt()

    def hessian(self) -> Tensor:
        """[k, k] float32, XᵀX divided by the number of tokens in it."""
        whole = self._moment.tril()
        whole += self._moment.tril(-1).t()
        return whole.div_(max(self._sampled, 1))

    def factor(self, damping: float, dtype: torch.dtype = torch.float32) -> HessianFactor:
        """The factored inverse Hessian, computed at the first call and kept."""
        key = (damping, dtype)
        if key not in self._factors:
            self._factors[key] = factor_hessian(self.hessian(), damping=damping, dtype=dtype)
        return self._factors[key]

    def copy(self) -> Statistics:
        """An independent copy."""
        twin = Statistics(len(self._squares), self._squares.device, self.stride)
        twin.tokens, twin._sampled = self.tokens, self._sampled
        twin._squares.copy_(self._squares)
        twin._moment.copy_(self._moment)
        return twin


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add the lower triangle of rowsᵀ rows to `total`; what is above the diagonal is undefined."""
    k = total.shape[0]
    for start in range(0, k, PANEL):
        stop = min(start + PANEL, k)
        total[start:stop, :stop].addmm_(rows[:, start:stop].t(), rows[:, :stop])


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

    def run(self, forward: Callable[[], object]) -> None:
        """Run `forward` and add what the layers saw; it may be cut short after the last layer."""
        self._clear()
        with contextlib.suppress(StopForward):
            forward()
        once = all(len(calls) == 1 for calls in self._calls.values())
        # The first forward runs to its end, and shows whether each layer is called just once.
        self._once = (
            once and len(self._calls) == len(self._layers) and (self._once or self._runs == 0)
        )
        self._runs += 1
        self._add()
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

    def _add(self) -> None:
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
                stream.add(self._kept[index][1], ", ".join(users))

    def _clear(self) -> None:
        self._calls, self._inputs, self._kept = {}, {}, []


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

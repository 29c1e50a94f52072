"""What the inputs of a layer are rounded to, and how the scale of a static scheme is measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CalibrationError
from ..formats.scheme import Scheme
from .grid import LARGEST, round_to


def input_scales(x: Tensor, scheme: Scheme) -> Tensor:
    """One scale a token, float32 [..., 1]: its largest entry becomes the largest code.

    A token of zeros gets 1. One that holds NaN or infinity has no scale, and `round_inputs` makes
    all of it NaN.

    Args:
        x: [..., k], floating.
        scheme: Its `activations` are not "none".

    Example:
        >>> input_scales(torch.tensor([[127.0, -254.0], [0.0, 0.0]]), Scheme("int8", 0, "int8"))
        tensor([[2.],
                [1.]])
    """
    scale = x.abs().amax(-1, keepdim=True).float() / LARGEST[scheme.activations]
    # NaN is not at most 0: it stays, and is what a NaN must pass through.
    return torch.nn.functional.threshold(scale, 0.0, 1.0)


def round_inputs(x: Tensor, scheme: Scheme, scale: Tensor | None = None) -> Tensor:
    """The inputs that a layer under `scheme` computes with, in the dtype of x.

    Symmetric and to nearest, halves to even; computed in float32. Without a scale every token has
    its own (`input_scales`), and one that holds NaN or infinity becomes all NaN. With a static
    scale larger entries are clipped, and NaN and infinity stay what they are.

    Args:
        x: [..., k], floating.
        scheme: A scheme whose `activations` are "none" returns x itself.
        scale: float32 [1], positive; needed by a static scheme.

    Raises:
        ArgumentError: A static scheme without a scale.

    Example:
        >>> round_inputs(torch.tensor([[7.0, 3.2, -0.4]]), Scheme("int4", 64, "int4"))
        tensor([[7., 3., 0.]])
    """
    if scheme.activations == "none":
        return x
    if scale is None:
        if scheme.static:
            raise ArgumentError(
                f"inputs under {scheme} without a scale",
                need="the measured scale, float32 [1]",
                hint="InputPeak().add(x), then .scale(scheme)",
            )
        return round_to(x, input_scales(x, scheme), scheme.activations).to(x.dtype)
    rounded = round_to(x, scale, scheme.activations).to(x.dtype)
    # NaN passes the rounding by itself.
    return torch.where(x.isinf(), x, rounded)


class InputPeak:
    """The largest magnitude that the inputs of a layer reached, for a static scale.

    Example:
        >>> peak = InputPeak()
        >>> peak.add(torch.tensor([[1.0, -508.0]]))
        >>> peak.scale(Scheme("int8", 0, "int8", static=True))
        tensor([4.])
    """

    def __init__(self) -> None:
        self._peak: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Look at more tokens, [..., k]."""
        if not x.numel():
            return
        peak = x.detach().abs().amax().float()
        self._peak = peak if self._peak is None else torch.maximum(self._peak, peak)

    def scale(self, scheme: Scheme) -> Tensor:
        """float32 [1]: the largest magnitude becomes the largest code; 1 where all was zero.

        Raises:
            CalibrationError: No token was seen, or one was not finite.
        """
        if self._peak is None or not bool(self._peak.isfinite()):
            raise CalibrationError(
                "inputs that are not finite" if self._peak is not None else "no input token",
                need=f"finite inputs to measure the static scale of {scheme} from",
                hint=f"{str(scheme).removesuffix(':static')}, which measures every token",
            )
        peak = self._peak / LARGEST[scheme.activations]
        return torch.where(peak > 0, peak, torch.ones_like(peak)).reshape(1)


class Rounding(NamedTuple):
    """How the inputs of a layer are rounded; `scale` is float32 [1] for a static scheme."""

    scheme: Scheme
    scale: Tensor | None = None

    def key(self) -> tuple[str, float | None]:
        """Equal for layers that round their inputs alike. Reads the scale: once, not at a call."""
        return self.scheme.activations, None if self.scale is None else float(self.scale)


def measure_scales(
    layers: Mapping[str, tuple[nn.Module, Scheme]], run: Callable[[], object]
) -> dict[str, Tensor]:
    """Run the model, and return the static input scale of each layer.

    Args:
        layers: Modules that take their input first, and their static schemes, by name.
        run: Runs the calibration tokens through them.

    Raises:
        CalibrationError: A layer saw no token, or one that is not finite; the message names it.

    Example:
        >>> layer, scheme = nn.Linear(2, 1), Scheme("int8", 0, "int8", static=True)
        >>> measure_scales({"a": (layer, scheme)}, lambda: layer(torch.tensor([[254.0, 0.0]])))
        {'a': tensor([2.])}
    """
    peaks = {name: InputPeak() for name in layers}

    def before(peak: InputPeak) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            peak.add(args[0] if args else kwargs["input"])

        return hook

    handles = [
        layer.register_forward_pre_hook(before(peaks[name]), with_kwargs=True)
        for name, (layer, _) in layers.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    scales = {}
    for name, (_, scheme) in layers.items():
        try:
            scales[name] = peaks[name].scale(scheme)
        except CalibrationError as error:
            got = f"layer {name}: {error.got}"
            raise CalibrationError(got, need=error.need, hint=error.hint) from None
    return scales


class SharedInput:
    """What was made of the tensor that layers were called with last.

    Layers in a row that are called with one tensor (queries, keys, values) so share what it
    becomes, and with it the graph that gradients pass.

    Example:
        >>> shared, x = SharedInput(), torch.ones(2)
        >>> shared.of(x, "doubled", lambda each: each * 2) is shared.of(x, "doubled", torch.neg)
        True
    """

    def __init__(self) -> None:
        # Held, so that its identity is not given to another one.
        self._x: Tensor | None = None
        self._version = 0
        self._made: dict[tuple[Hashable, bool], Tensor] = {}

    def of(self, x: Tensor, how: Hashable, make: Callable[[Tensor], Tensor]) -> Tensor:
        """`make(x)`, or what a call with the same x and an equal `how` returned just before.

        A tensor that was changed in place is another one.
        """
        version = 0 if x.is_inference() else x._version
        if self._x is not x or self._version != version:
            self._x, self._version, self._made = x, version, {}
        # What was made without a graph passes no gradient.
        key = how, torch.is_grad_enabled()
        if key not in self._made:
            self._made[key] = make(x)
        return self._made[key]

    def clear(self) -> None:
        """Let go of the tensors."""
        self._x, self._made = None, {}


@contextmanager
def rounded_inputs(layers: Iterable[tuple[nn.Module, Rounding]]) -> Iterator[None]:
    """While open, `layers` compute with rounded inputs, as they will where they are stored.

    Layers that are called with one tensor go on sharing one: whoever tells shared inputs by
    identity still can.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False).requires_grad_(False)
        >>> _ = nn.init.ones_(layer.weight)
        >>> with rounded_inputs([(layer, Rounding(Scheme("int8", 0, "int8")))]):
        ...     layer(torch.tensor([[127.0, 0.4]]))
        tensor([[127.]])
    """
    shared = SharedInput()

    def before(rounding: Rounding) -> Callable[..., Any]:
        key = rounding.key()

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["input"]
            made = shared.of(x, key, lambda each: round_inputs(each, *rounding))
            return ((made, *args[1:]), kwargs) if args else (args, {**kwargs, "input": made})

        return hook

    handles = [
        layer.register_forward_pre_hook(before(rounding), with_kwargs=True)
        for layer, rounding in layers
        if rounding.scheme.activations != "none"
    ]
    try:
        yield
    finally:
        shared.clear()
        for handle in handles:
            handle.remove()

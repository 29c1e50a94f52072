"""A convolution of several taps as a linear layer over its windows."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..ops._windows import Windows
from ..ops.im2col.op import gather
from ._convolutions import (
    check_images,
    check_model,
    convolutions,
    dense_linear,
    none_qualifies,
    pair,
    put,
    replaced,
)
from ._windows import product_of_windows
from .pointwise import Pointwise, why_not_pointwise

#: Where a convolution has fewer input channels, its windows are short and odd: a stem of 3 colours.
LEAST_CHANNELS = 16


class Convolution(nn.Module):
    """y[n, :, i, j] = linear(window of x[n] at i, j): a convolution of one group, padded by zeros.

    Windows are the tokens of `linear`, which may be replaced by a `SparseLinear`; their features
    are taps, left to right and down, and of each tap all channels, so that N:M and blocks lie along
    channels. The windows of all images are one matrix [n * windows, taps * channels], which
    `ops.im2col` makes; `most_bytes` bounds it, and takes a few images at a time. In channels-last
    memory format nothing else is copied.

    Args:
        linear: The weight [out_channels, taps * in_channels] and bias.
        windows: Taps, stride, padding and dilation.

    Attributes:
        most_bytes: Bytes of windows that exist at one time, but those of one image; None: of all.
        implicit: Let the kernel of a 2:4 weight gather the windows itself where it can: channels-
            last images of a multiple of 64 channels of 16 bits, square windows, no gradient.

    Example:
        >>> conv = nn.Conv2d(16, 8, 3, stride=2, padding=1).requires_grad_(False)
        >>> layer = Convolution.from_conv(conv)
        >>> layer(torch.ones(1, 16, 5, 5)).shape
        torch.Size([1, 8, 3, 3])
    """

    most_bytes: int | None = None
    implicit: bool = False
    channels_last: bool = False  # Of the weight of the convolution that this was made of.

    def __init__(self, linear: nn.Module, windows: Windows) -> None:
        super().__init__()
        if not isinstance(windows, Windows):
            raise ArgumentError(
                f"windows of type {type(windows).__name__}",
                need="hopsparse.ops.Windows",
                hint="Convolution.from_conv(conv)",
            )
        self.linear = linear
        self.windows = windows

    @classmethod
    def from_conv(cls, conv: nn.Conv2d) -> Convolution:
        """Lay out the weight of a convolution anew; its bias is shared, not copied.

        Args:
            conv: One group, padded by zeros or not at all.

        Raises:
            ArgumentError: Another kind of convolution.
        """
        # One tap without padding is all right here too: it is the same product.
        if why := _why_not_windows(conv):
            raise ArgumentError(
                f"a convolution whose windows cannot be rows of a matrix: {why}",
                need="an nn.Conv2d of one group, padded by zeros, alike on both sides",
                hint="convolutions_as_linear(model) finds those that can",
            )
        kernel, padding = pair(conv.kernel_size), conv.padding
        windows = Windows(kernel, pair(conv.stride), (0, 0), pair(conv.dilation))
        if padding == "same":
            spans = [(taps - 1) * step for taps, step in zip(kernel, windows.dilation, strict=True)]
            windows = replace(windows, padding=(spans[0] // 2, spans[1] // 2))
        elif not isinstance(padding, str):
            windows = replace(windows, padding=pair(padding))
        features = windows.taps * conv.in_channels
        linear = nn.Linear(features, conv.out_channels, bias=False, device="meta")
        weight = conv.weight.detach().permute(0, 2, 3, 1).flatten(1).contiguous()
        linear.weight = nn.Parameter(weight, requires_grad=conv.weight.requires_grad)
        linear.bias = conv.bias  # type: ignore[assignment]
        made = cls(linear, windows)
        made.channels_last = _is_channels_last(conv.weight)
        return made.train(conv.training)

    def to_conv(self) -> nn.Conv2d:
        """The convolution that this is, where `linear` is still a dense nn.Linear.

        Raises:
            ArgumentError: It is another layer.
        """
        linear, w = dense_linear(self.linear), self.windows
        channels = (linear.in_features // w.taps, linear.out_features)
        conv = nn.Conv2d(
            *channels, w.kernel, w.stride, w.padding, w.dilation, bias=False, device="meta"
        )
        taps = linear.weight.detach().view(linear.out_features, *w.kernel, channels[0])
        weight = taps.permute(0, 3, 1, 2)
        weight = weight if self.channels_last else weight.contiguous()
        conv.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
        conv.bias = linear.bias
        return conv.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to every window.

        Args:
            x: [n, in_channels, height, width] or [in_channels, height, width].

        Returns:
            [n, out_channels, windows along rows, along columns], or without n, in the memory format
            that a convolution would give it.

        Raises:
            ArgumentError: Another number of dimensions, or images smaller than a window.
        """
        check_images(x)
        if x.ndim == 3:
            return self._images(x[None])[0].contiguous()
        y = self._images(x)
        # Code behind a convolution may call view(), which needs the format that it would have.
        return y if _is_channels_last(x) else y.contiguous()

    def extra_repr(self) -> str:
        """What the windows are."""
        w = self.windows
        told = f"kernel={w.kernel}, stride={w.stride}, padding={w.padding}"
        return told if w.dilation == (1, 1) else f"{told}, dilation={w.dilation}"

    def _images(self, x: Tensor) -> Tensor:
        """[n, out, places] with neighbouring channels."""
        places = self.windows.places(x.shape[2], x.shape[3])
        if self.implicit:
            whole = product_of_windows(self.linear, x, self.windows)
            if whole is not None:
                return whole.view(x.shape[0], *places, whole.shape[1]).movedim(-1, 1)
        of_image = prod(places) * self.windows.taps * x.shape[1] * x.element_size()
        n = x.shape[0]
        step = n if self.most_bytes is None else max(1, self.most_bytes // of_image)
        if step >= n:
            y: Tensor = self.linear(gather(x, self.windows))
        else:
            pieces = (x[i : i + step] for i in range(0, n, step))
            y = torch.cat([self.linear(gather(piece, self.windows)) for piece in pieces])
        return y.view(n, *places, y.shape[-1]).movedim(-1, 1)


def convolutions_as_linear(
    model: nn.Module,
    *,
    also: tuple[type[nn.Conv2d], ...] = (),
    least_channels: int = LEAST_CHANNELS,
) -> tuple[str, ...]:
    """Replace convolutions of a model by linear layers over pixels or windows, in place.

    1x1 convolutions become a `Pointwise`, others a `Convolution`. What qualifies: one group,
    padding by zeros, no hooks, a weight of its own, and for a `Convolution` enough input channels.
    Then `hopsparse.sparsify(model, recipe, images)` prunes them like other linear layers, and
    `restore_convolutions` makes convolutions of those that stayed dense.

    Args:
        model: Any module that holds convolutions.
        also: Subclasses of nn.Conv2d that compute what it does, 1x1 and larger.
        least_channels: Input channels from which on a larger convolution is replaced.

    Returns:
        Names of the replaced modules, in the order of `named_modules`; empty where all were
        replaced before.

    Raises:
        ArgumentError: `model` is no module, or itself a convolution.
        UnsupportedError: There are convolutions, and none of them qualifies.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Conv2d(32, 8, 1))
        >>> convolutions_as_linear(net)
        ('1', '2')
        >>> net[1]
        Convolution(
          kernel=(3, 3), stride=(1, 1), padding=(0, 0)
          (linear): Linear(in_features=144, out_features=32, bias=True)
        )
    """
    check_model(model, nn.Conv2d)

    def reason(conv: nn.Conv2d) -> str | None:
        why = _why_not_windows(conv)
        few = conv.in_channels < least_channels
        return why if why is not None or not few else f"{conv.in_channels} input channels"

    before = [name for name, _ in convolutions(model)]
    known = any(isinstance(module, Pointwise | Convolution) for module in model.modules())
    points, refused = replaced(model, Pointwise.from_conv, why_not_pointwise, also)
    names, others = replaced(model, Convolution.from_conv, reason, also)
    done = {*points, *names}
    if before and not done and not known:
        need = "an nn.Conv2d of one group, padded by zeros, with a weight of its own and "
        raise none_qualifies(refused + others, f"{need}{least_channels} input channels")
    return tuple(name for name in before if name in done)


def restore_convolutions(model: nn.Module) -> tuple[str, ...]:
    """Make an nn.Conv2d of every `Pointwise` and `Convolution` that is still dense, in place.

    Args:
        model: What `pointwise_as_linear` or `convolutions_as_linear` was called on. A subclass that
            was replaced comes back as a plain nn.Conv2d.

    Returns:
        Names of the restored modules.

    Raises:
        ArgumentError: `model` is no module, or itself a `Pointwise` or `Convolution`.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(8, 4, 1))
        >>> convolutions_as_linear(net) == restore_convolutions(net)
        True
        >>> net[0]
        Conv2d(8, 4, kernel_size=(1, 1), stride=(1, 1))
    """
    check_model(model, Pointwise, Convolution)
    restored: list[str] = []
    made: dict[nn.Module, nn.Conv2d] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, Pointwise | Convolution) and type(module.linear) is nn.Linear:
            if module not in made:
                made[module] = module.to_conv()
            put(model, name, made[module])
            restored.append(name)
    return tuple(restored)


def _why_not_windows(conv: nn.Conv2d) -> str | None:
    """Why this cannot be a `Convolution`; None if it can, "" if a `Pointwise` is for it."""
    if why_not_pointwise(conv) is None:
        return ""
    if conv.groups != 1:
        return f"{conv.groups} groups"
    if conv.padding_mode != "zeros":
        return f"padding_mode={conv.padding_mode!r}"
    if conv.padding == "same":
        spans = zip(conv.kernel_size, pair(conv.dilation), strict=True)
        if any((taps - 1) * step % 2 for taps, step in spans):
            return 'padding="same" of an even kernel, which pads one side more'
    return None


def _is_channels_last(tensor: Tensor) -> bool:
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()

"""A 1x1 convolution as a linear layer over channels, so that whatever handles those handles it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ._convolutions import (
    check_images,
    check_model,
    dense_linear,
    none_qualifies,
    pair,
    replaced,
)


class Pointwise(nn.Module):
    """y[n, :, i, j] = linear(x[n, :, s i, s j]): a 1x1 convolution of stride s, without padding.

    Pixels are the tokens of `linear`, which may be replaced by a `SparseLinear`. In channels-last
    memory format that is a view; in the contiguous format input and output are copied once each.

    Args:
        linear: The weight [out_channels, in_channels] and bias.
        stride: Rows and columns between two pixels that are used.

    Example:
        >>> conv = nn.Conv2d(4, 2, 1, stride=2).requires_grad_(False)
        >>> point = Pointwise.from_conv(conv)
        >>> point(torch.ones(1, 4, 5, 5)).shape
        torch.Size([1, 2, 3, 3])
    """

    def __init__(self, linear: nn.Module, stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        self.linear = linear
        self.stride = stride

    @classmethod
    def from_conv(cls, conv: nn.Conv2d) -> Pointwise:
        """Wrap the weight of a convolution; weight and bias are shared with it, not copied.

        Args:
            conv: 1x1, one group, without padding.

        Raises:
            ArgumentError: Another kind of convolution.
        """
        why = why_not_pointwise(conv)
        if why is not None:
            why = why or f"kernel {conv.kernel_size[0]}x{conv.kernel_size[1]}"
            raise ArgumentError(
                f"a convolution that cannot be a linear layer: {why}",
                need="an nn.Conv2d of kernel 1x1, one group and no padding",
                hint="pointwise_as_linear(model) finds those that can",
            )
        linear = nn.Linear(conv.in_channels, conv.out_channels, bias=False, device="meta")
        weight = conv.weight
        linear.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=weight.requires_grad)
        linear.bias = conv.bias  # type: ignore[assignment]
        return cls(linear, pair(conv.stride)).train(conv.training)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the channels of every pixel.

        Args:
            x: [n, in_channels, height, width] or [in_channels, height, width].

        Returns:
            [n, out_channels, ceil(height / stride), ceil(width / stride)], or without n, in the
            memory format that a convolution would give it.

        Raises:
            ArgumentError: Another number of dimensions.
        """
        check_images(x)
        pixels = x[..., :: self.stride[0], :: self.stride[1]].movedim(-3, -1)
        y: Tensor = self.linear(pixels).movedim(-1, -3)
        # Code behind a convolution may call view(), which needs the format that it would have.
        last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return y if last and not x.is_contiguous() else y.contiguous()

    def to_conv(self) -> nn.Conv2d:
        """The convolution that this is, where `linear` is still a dense nn.Linear.

        Raises:
            ArgumentError: It is another layer.
        """
        linear = dense_linear(self.linear)
        channels = (linear.in_features, linear.out_features)
        conv = nn.Conv2d(*channels, 1, stride=self.stride, bias=False, device="meta")
        weight = linear.weight.detach()[..., None, None]
        conv.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
        conv.bias = linear.bias
        return conv.train(self.training)

    def extra_repr(self) -> str:
        """The stride, where it is not 1."""
        return "" if self.stride == (1, 1) else f"stride={self.stride}"


def pointwise_as_linear(
    model: nn.Module, *, also: tuple[type[nn.Conv2d], ...] = ()
) -> tuple[str, ...]:
    """Replace every 1x1 convolution of a model by a `Pointwise`, in place.

    What qualifies: one group, no padding, no hooks, a weight of its own. Then
    `hopsparse.sparsify(model, recipe, images)` prunes them like other linear layers, and
    `restore_convolutions` makes convolutions of those that stayed dense.

    Args:
        model: Any module that holds convolutions.
        also: Subclasses of nn.Conv2d that compute what it does where the kernel is 1x1. A subclass
            may pad or scale in its forward, so it is left alone unless it is named here.

    Returns:
        Names of the replaced modules, in the order of `named_modules`; empty where all were
        replaced before.

    Raises:
        ArgumentError: `model` is no module, or itself a convolution.
        UnsupportedError: There are 1x1 convolutions, and none of them qualifies.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> pointwise_as_linear(net)
        ('2',)
        >>> net[2].linear
        Linear(in_features=8, out_features=4, bias=True)
    """
    check_model(model, nn.Conv2d)
    names, refused = replaced(model, Pointwise.from_conv, why_not_pointwise, also)
    if refused and not names and not any(isinstance(m, Pointwise) for m in model.modules()):
        need = "an nn.Conv2d of kernel 1x1, one group, no padding and a weight of its own"
        raise none_qualifies(refused, need)
    return tuple(names)


def why_not_pointwise(conv: nn.Conv2d) -> str | None:
    """Why a convolution cannot be a `Pointwise`; None if it can, "" if it has several taps."""
    if conv.kernel_size != (1, 1):
        return ""
    if conv.groups != 1:
        return f"{conv.groups} groups"
    # "same" and "valid" add nothing to a kernel of one pixel.
    if not isinstance(conv.padding, str) and any(pair(conv.padding)):
        return f"padding {conv.padding}"
    return None

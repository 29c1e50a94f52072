"""A 1x1 convolution as a linear layer over channels, so that whatever handles those handles it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import ArgumentError, UnsupportedError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
        if why := _reason_in_shape(conv):
            raise ArgumentError(
                f"a convolution that cannot be a linear layer: {why}",
                need="an nn.Conv2d of kernel 1x1, one group and no padding",
                hint="pointwise_as_linear(model) finds those that can",
            )
        linear = nn.Linear(conv.in_channels, conv.out_channels, bias=False, device="meta")
        weight = conv.weight
        linear.weight = nn.Parameter(weight.detach().flatten(1), requires_grad=weight.requires_grad)
        linear.bias = conv.bias  # type: ignore[assignment]
        return cls(linear, _pair(conv.stride)).train(conv.training)

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
        if x.ndim not in (3, 4):
            raise ArgumentError(
                f"an image of shape {list(x.shape)}",
                need="[n, channels, height, width] or [channels, height, width]",
                hint="x.unflatten(...) to separate height and width",
            )
        pixels = x[..., :: self.stride[0], :: self.stride[1]].movedim(-3, -1)
        y: Tensor = self.linear(pixels).movedim(-1, -3)
        # Code behind a convolution may call view(), which needs the format that it would have.
        last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return y if last and not x.is_contiguous() else y.contiguous()

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
    _check_model(model, nn.Conv2d)
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    replaced: list[str] = []
    refused: list[str] = []
    made: dict[nn.Module, Pointwise] = {}
    for name, module in list(_convolutions(model)):
        if module in made:
            _put(model, name, made[module])
            replaced.append(name)
            continue
        why = _reason_in_shape(module) or _reason_to_leave(module, also)
        if why is None and users[id(module.weight)] > 1:
            why = "its weight is shared"
        if why is not None:
            if module.kernel_size == (1, 1):
                refused.append(f"{name}: {why}")
            continue
        made[module] = Pointwise.from_conv(module)
        _put(model, name, made[module])
        replaced.append(name)
    if refused and not replaced and not any(isinstance(m, Pointwise) for m in model.modules()):
        raise UnsupportedError(
            f"no convolution that can be a linear layer ({'; '.join(refused[:3])})",
            need="an nn.Conv2d of kernel 1x1, one group, no padding and a weight of its own",
            hint="also=(Class,) for a subclass that computes what nn.Conv2d does",
        )
    return tuple(replaced)


def restore_convolutions(model: nn.Module) -> tuple[str, ...]:
    """Turn every `Pointwise` whose layer is still a dense nn.Linear into an nn.Conv2d, in place.

    Args:
        model: What `pointwise_as_linear` was called on. A subclass that it replaced comes back as
            a plain nn.Conv2d.

    Returns:
        Names of the restored modules.

    Raises:
        ArgumentError: `model` is no module, or itself a `Pointwise`.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(8, 4, 1))
        >>> pointwise_as_linear(net) == restore_convolutions(net)
        True
        >>> net[0]
        Conv2d(8, 4, kernel_size=(1, 1), stride=(1, 1))
    """
    _check_model(model, Pointwise)
    restored: list[str] = []
    made: dict[nn.Module, nn.Conv2d] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, Pointwise) and type(module.linear) is nn.Linear:
            if module not in made:
                made[module] = _convolution(module.linear, module)
            _put(model, name, made[module])
            restored.append(name)
    return tuple(restored)


def _convolution(linear: nn.Linear, point: Pointwise) -> nn.Conv2d:
    channels = (linear.in_features, linear.out_features)
    conv = nn.Conv2d(*channels, 1, stride=point.stride, bias=False, device="meta")
    weight = linear.weight
    conv.weight = nn.Parameter(weight.detach()[..., None, None], requires_grad=weight.requires_grad)
    conv.bias = linear.bias
    return conv.train(point.training)


def _convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Conv2d):
            yield name, module


def _reason_in_shape(conv: nn.Conv2d) -> str | None:
    if conv.kernel_size != (1, 1):
        return f"kernel {conv.kernel_size[0]}x{conv.kernel_size[1]}"
    if conv.groups != 1:
        return f"{conv.groups} groups"
    # "same" and "valid" add nothing to a kernel of one pixel.
    if not isinstance(conv.padding, str) and any(_pair(conv.padding)):
        return f"padding {conv.padding}"
    return None


def _reason_to_leave(conv: nn.Conv2d, also: tuple[type[nn.Conv2d], ...]) -> str | None:
    if parametrize.is_parametrized(conv):
        return "it has a parametrization"
    if type(conv) is not nn.Conv2d and type(conv) not in also:
        return f"it is a {type(conv).__name__}, a subclass of nn.Conv2d"
    if "forward" in vars(conv):
        return "its forward was replaced"
    if any(getattr(conv, hooks) for hooks in _HOOKS):
        return "it has hooks"
    weight = conv._parameters.get("weight")
    if weight is None or not weight.is_leaf:
        return "its weight is computed from other tensors"
    return None


def _check_model(model: object, kind: type[nn.Module]) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, kind):
        raise ArgumentError(
            f"a {type(model).__name__} as the model",
            need=f"a module that holds {kind.__name__} layers",
            hint="nn.Sequential(layer)",
        )


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, module)

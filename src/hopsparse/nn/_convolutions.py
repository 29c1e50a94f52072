"""Finding, replacing and putting back the convolutions of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import ArgumentError, UnsupportedError
from .hooks import has_hooks

#: What keeps a convolution from being replaced, by its shape alone; None if nothing does, and "" if
#: another kind of layer is for it.
Reason = Callable[[nn.Conv2d], str | None]


def replaced(
    model: nn.Module,
    wrap: Callable[[nn.Conv2d], nn.Module],
    reason: Reason,
    also: tuple[type[nn.Conv2d], ...],
) -> tuple[list[str], list[str]]:
    """Put another module where a convolution was, in every place of it.

    Args:
        model: Changed in place.
        wrap: Makes the module.
        reason: Why a convolution cannot be one.
        also: Subclasses that compute what nn.Conv2d does.

    Returns:
        Names of what was replaced, and "name: reason" of what was left alone.
    """
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    names: list[str] = []
    refused: list[str] = []
    made: dict[nn.Module, nn.Module] = {}
    for name, conv in list(convolutions(model)):
        if conv not in made:
            if (why := reason(conv)) == "":
                continue
            why = why or reason_to_leave(conv, also)
            if why is None and users[id(conv.weight)] > 1:
                why = "its weight is shared"
            if why is not None:
                refused.append(f"{name}: {why}")
                continue
            made[conv] = wrap(conv)
        put(model, name, made[conv])
        names.append(name)
    return names, refused


def convolutions(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    """Every place of every convolution."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Conv2d):
            yield name, module


def reason_to_leave(conv: nn.Conv2d, also: tuple[type[nn.Conv2d], ...]) -> str | None:
    """Why a convolution cannot be replaced, whatever its shape; None if it can."""
    if parametrize.is_parametrized(conv):
        return "it has a parametrization"
    if type(conv) is not nn.Conv2d and type(conv) not in also:
        return f"it is a {type(conv).__name__}, a subclass of nn.Conv2d"
    if "forward" in vars(conv):
        return "its forward was replaced"
    if has_hooks(conv):
        return "it has hooks"
    weight = conv._parameters.get("weight")
    if weight is None or not weight.is_leaf:
        return "its weight is computed from other tensors"
    return None


def check_model(model: object, *kinds: type[nn.Module]) -> None:
    """Refuse what is no module, or is itself what would be replaced in it."""
    if not isinstance(model, nn.Module) or isinstance(model, kinds):
        raise ArgumentError(
            f"a {type(model).__name__} as the model",
            need=f"a module that holds {' or '.join(each.__name__ for each in kinds)} layers",
            hint="nn.Sequential(layer)",
        )


def none_qualifies(refused: list[str], need: str) -> UnsupportedError:
    """What to raise where there are convolutions of the kind, and not one can be replaced."""
    return UnsupportedError(
        f"no convolution that can be a linear layer ({'; '.join(refused[:3])})",
        need=need,
        hint="also=(Class,) for a subclass that computes what nn.Conv2d does",
    )


def check_images(x: Tensor) -> None:
    """Refuse what is no image.

    Raises:
        ArgumentError: Another number of dimensions.
    """
    if x.ndim not in (3, 4):
        raise ArgumentError(
            f"an image of shape {list(x.shape)}",
            need="[n, channels, height, width] or [channels, height, width]",
            hint="x.unflatten(...) to separate height and width",
        )


def dense_linear(linear: nn.Module) -> nn.Linear:
    """The layer inside, if it is dense.

    Raises:
        ArgumentError: It is another one.
    """
    if type(linear) is not nn.Linear:
        raise ArgumentError(
            f"a {type(linear).__name__} to make a convolution of",
            need="an nn.Linear",
            hint="nn.Linear with the weight of layer.to_dense()",
        )
    return linear


def pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    """Of rows and columns, where one number stands for both."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Set the submodule of a name."""
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, module)

"""Batch norms folded into the layers ahead of them, which then compute both."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import ArgumentError, UnsupportedError
from .convolution import Convolution
from .hooks import has_hooks, uses_of
from .pointwise import Pointwise
from .sparse_linear import SparseLinear

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_LEAVES = (Convolution, Pointwise, SparseLinear)


def fold_batch_norms(
    model: nn.Module, *, also: tuple[type[nn.Module], ...] = ()
) -> tuple[str, ...]:
    """Multiply the scale of batch norms into the convolution or linear layer ahead, in place.

    A norm in evaluation is y * scale + shift, a channel each: the weight takes the scale, the bias
    both, and the norm becomes an nn.Identity. So a pruned layer has no norm behind it, and its
    kernel adds the bias. Which layer is ahead of a norm is found by `torch.fx.symbolic_trace`.

    What is folded: a norm with statistics of its own, called once, on what one nn.Conv2d or
    nn.Linear returns to nobody else. Weights that are shared or computed, modules with hooks, and
    other classes are left alone. Fold before convolutions become linear layers.

    Args:
        model: In evaluation mode.
        also: Subclasses of nn.Conv2d or nn.Linear whose result is linear in weight and bias.

    Returns:
        Names of the norms that were folded, in the order in which they are called.

    Raises:
        ArgumentError: `model` is no module, or a norm of it is in training mode.
        UnsupportedError: The model cannot be traced.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)).eval()
        >>> fold_batch_norms(net), net[0].bias is not None
        (('1',), True)
    """
    if not isinstance(model, nn.Module) or isinstance(model, _NORMS):
        raise ArgumentError(
            f"a {type(model).__name__} as the model",
            need="a module that holds batch norms and what is ahead of them",
            hint="nn.Sequential(layer, norm)",
        )
    norms = {name: each for name, each in model.named_modules() if isinstance(each, _NORMS)}
    training = [name for name, norm in norms.items() if norm.training]
    if training:
        raise ArgumentError(
            f"batch norm {training[0]} in training mode",
            need="one that uses its statistics",
            hint="model.eval()",
        )
    if not norms:
        return ()
    folded: list[str] = []
    owners = _owners(model)
    for ahead, behind in _pairs(model, (*_LEAVES, *also)):
        layer, norm = model.get_submodule(ahead), model.get_submodule(behind)
        if not _may_fold(layer, norm, also, owners):
            continue
        _fold(layer, norm)
        parent, _, child = behind.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
        folded.append(behind)
    return tuple(folded)


def _pairs(model: nn.Module, leaves: tuple[type[nn.Module], ...]) -> list[tuple[str, str]]:
    """Names of modules of which the second alone gets what the first returns; each called once."""
    from torch import fx

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, leaves) or super().is_leaf_module(module, name)

    try:
        graph = Tracer().trace(model)
    except Exception as error:
        # Whatever a model does with a stand-in for its input says that it cannot be followed.
        raise UnsupportedError(
            f"a {type(model).__name__} that cannot be traced ({error})",
            need="a forward without decisions on what tensors hold",
            hint="fold_batch_norms(model.blocks), the part that has the norms",
        ) from error
    calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    found = []
    for node in graph.nodes:
        ahead = node.args[0] if node.op == "call_module" and node.args else None
        if not isinstance(ahead, fx.Node) or ahead.op != "call_module" or len(ahead.users) != 1:
            continue
        names = str(ahead.target), str(node.target)
        if all(calls[name] == 1 for name in names):
            found.append(names)
    return found


def _owners(model: nn.Module) -> dict[int, int]:
    """How many modules hold a parameter, by its id; and in how many places a module stands."""
    owners = uses_of(model)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners


def _may_fold(
    layer: nn.Module, norm: nn.Module, also: tuple[type[nn.Module], ...], owners: dict[int, int]
) -> bool:
    if type(norm) not in _NORMS or type(layer) not in (nn.Conv2d, nn.Linear, *also):
        return False
    if has_hooks(layer, norm) or any(map(parametrize.is_parametrized, (layer, norm))):
        return False
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    weight = layer._parameters.get("weight")
    if weight is None or norm.running_mean is None or norm.running_var is None:
        return False
    held = [weight, layer._parameters.get("bias"), layer, norm]
    return all(each is None or owners.get(id(each), 0) == 1 for each in held)


@torch.no_grad()
def _fold(layer: nn.Module, norm: nn.Module) -> None:
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    weight = layer._parameters["weight"]
    assert weight is not None
    # In float64: a weight of 16 bits is rounded once.
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    old = layer._parameters.get("bias")
    bias = -norm.running_mean.double() if old is None else old.double() - norm.running_mean.double()
    bias = bias * scale
    if norm.bias is not None:
        bias = bias + norm.bias.double()
    wide = weight.double() * scale.view(-1, *[1] * (weight.ndim - 1))
    for name, made in (("weight", wide), ("bias", bias)):
        # A sum of products keeps the strides of the weight, and so its memory format.
        made = nn.Parameter(made.to(weight.dtype), requires_grad=weight.requires_grad)
        setattr(layer, name, made)

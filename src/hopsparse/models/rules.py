"""Where the blocks of a model are, and which of its linear layers may become sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import ArgumentError, UnsupportedError
from ..formats import BlockPattern, Form, NMPattern, Unstructured
from ..nn import Convolution, Pointwise, has_hooks
from ..prune import Recipe
from . import llama, qwen
from ._family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen.FAMILY)

#: It fits every shape, so only what belongs to the layer itself keeps a layer out of a plan.
FITS_ALL = Unstructured(0.5)

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Selection:
    """The linear layers of a model, divided.

    Attributes:
        blocks: Module path of each block in run order; ("",) when the model is one block.
        eligible: Layers to prune, full names, by block.
        kept_dense: Why each other linear layer stays dense, by full name.
    """

    blocks: tuple[str, ...]
    eligible: dict[str, tuple[str, ...]]
    kept_dense: dict[str, str]


def family_of(model_type: str) -> Family:
    """The family that a `model_type` of config.json belongs to.

    Raises:
        UnsupportedError: No family here describes that architecture.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(kind for family in FAMILIES for kind in family.model_types)
    raise UnsupportedError(
        f"model type {model_type!r}",
        need=f"one of {', '.join(known)}",
        hint="load the model yourself and call hopsparse.sparsify(model, ...)",
    )


def family_blocks(family: Family, model: nn.Module) -> tuple[str, ...]:
    """Paths of the decoder blocks of a language model."""
    blocks = model.get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList)
    return tuple(f"{family.blocks}.{index}" for index in range(len(blocks)))


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of what may be the repeated blocks: the longest list of modules of one class.

    A model without such a list is one block, named "", and so is one whose longest list holds
    1x1 convolutions: a convolutional network, with much of its weight in stem and head. Whether
    the blocks are a chain, each fed with nothing but the output of the one before, shows only when
    the model runs (`hopsparse.prune.is_chain`).
    """
    best: tuple[str, ...] = ("",)
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        alike = len({type(child) for child in module}) == 1
        # A list of bare linear layers is no list of blocks: its parent is the block.
        blocks = alike and not isinstance(module[0], nn.Linear) and _holds(nn.Linear, module)
        if blocks and len(module) > len(best):
            best = tuple(f"{name}.{index}" for index in range(len(module)))
    pixels = any(
        _holds(kind, model.get_submodule(path))
        for path in best
        for kind in (Pointwise, Convolution)
    )
    return ("",) if pixels else best


def select(model: nn.Module, blocks: Iterable[str], recipe: Recipe) -> Selection:
    """Divide the linear layers of `model` into those to change and those that stay dense.

    Args:
        model: Any module; weights may be on the meta device.
        blocks: Module path of each block.
        recipe: Says by full name which form each layer takes.

    Raises:
        ArgumentError: A glob matches no linear layer.
        UnsupportedError: Nothing is left to prune.
    """
    paths = tuple(blocks)
    linears = linear_names(model)
    _check_globs((*recipe.keep, *(glob for glob, _ in recipe.parsed_forms)), linears)
    # A block or a layer that is registered twice belongs to its first place.
    owner: dict[nn.Module, tuple[str, str]] = {}
    for path in paths:
        for name, module in model.get_submodule(path).named_modules():
            owner.setdefault(module, (path, f"{path}.{name}".strip(".")))
    structure = _structural_reasons(model)
    eligible: dict[str, tuple[str, ...]] = {}
    kept: dict[str, str] = {}
    for module, names in linears.items():
        path, name = owner.get(module, ("", names[0]))
        reason = _reason_to_keep(name, names, module, recipe)
        if reason is None and module not in owner:
            reason = "outside the blocks"
        reason = reason or structure.get(module) or _reason_in_weight(module)
        if reason is not None:
            kept[name] = reason
        else:
            eligible[path] = (*eligible.get(path, ()), name)
    if not eligible:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(kept.items())[:3])
        raise UnsupportedError(
            f"a model of class {type(model).__name__} without any layer to prune"
            + (f" ({reasons})" if reasons else ""),
            need=f"at least one nn.Linear in a block that {recipe.pattern} fits",
            hint="fewer --keep globs, or another pattern",
        )
    return Selection(paths, eligible, kept)


def linear_names(model: nn.Module) -> dict[nn.Linear, list[str]]:
    """Every linear layer of `model` with all names that it is registered under."""
    names: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(module, []).append(name)
    return names


def replace_module(model: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> None:
    """Put `make(old)` in the place of the module called `name`."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, child, make(getattr(parent, child)))


def _reason_to_keep(name: str, names: list[str], linear: nn.Linear, recipe: Recipe) -> str | None:
    for glob in recipe.keep:
        if any(fnmatchcase(alias, glob) for alias in names):
            return f"kept by {glob!r}"
    form = recipe.form_of(name)
    pattern = form.pattern
    if form == Form():
        return "dense by plan"
    if isinstance(pattern, NMPattern) and linear.in_features % pattern.m:
        return f"k = {linear.in_features} is not a multiple of {pattern.m}"
    if isinstance(pattern, BlockPattern):
        blocks = -(-linear.out_features // pattern.rows) * -(-linear.in_features // pattern.cols)
        # As `prune.keep_mask` counts: all or nothing is no pruning.
        zeroed = round(blocks * pattern.sparsity)
        if zeroed in (0, blocks):
            return f"{pattern} zeroes {zeroed} of its {blocks} blocks"
    return None


def _structural_reasons(model: nn.Module) -> dict[nn.Module, str]:
    """Layers whose weight the modules around them use, with the reason."""
    found: dict[nn.Module, str] = {}
    users: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found[module.out_proj] = "nn.MultiheadAttention reads its weight without calling it"
        if isinstance(module, nn.TransformerEncoderLayer):
            # In eval mode without gradients its fast path hands both weights to a fused operator,
            # and asks for them before it decides. The decoder layer has no such path.
            for linear in (module.linear1, module.linear2):
                found[linear] = "nn.TransformerEncoderLayer reads its weight without calling it"
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(parameter, []).append((f"{name}.{key}".strip("."), module))
    for parameter, places in users.items():
        for name, module in places:
            others = [other for other, _ in places if other != name]
            if others and isinstance(module, nn.Linear) and module.weight is parameter:
                found.setdefault(module, f"weight shared with {others[0]}")
    return found


def _reason_in_weight(linear: nn.Linear) -> str | None:
    """Why the layer is more than y = x @ weight.T + bias with a weight that can be pruned."""
    if parametrize.is_parametrized(linear):
        return "it has a parametrization"
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}, a subclass of nn.Linear"
    if "forward" in vars(linear):
        return "its forward was replaced"
    if has_hooks(linear):
        return "it has hooks"
    weight = linear._parameters.get("weight")
    if weight is None or not weight.is_leaf:
        return "its weight is computed from other tensors"
    if weight.dtype not in _WEIGHT_DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return None


def _check_globs(globs: tuple[str, ...], linears: dict[nn.Linear, list[str]]) -> None:
    names = [name for aliases in linears.values() for name in aliases]
    for glob in globs:
        if names and not any(fnmatchcase(name, glob) for name in names):
            raise ArgumentError(
                f"a glob {glob!r} of layers that matches no linear layer",
                need="globs over full layer names, such as " + ", ".join(names[:4]),
                hint=f"'*{glob.strip('*')}*', or without it",
            )


def _holds(kind: type[nn.Module], module: nn.Module) -> bool:
    return any(isinstance(child, kind) for child in module.modules())

"""Where the blocks of a model are, and which of its linear layers may become sparse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..errors import UnsupportedError
from ..formats import NMPattern, Pattern
from . import llama, qwen
from ._family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, qwen.FAMILY)


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

    A model without such a list is one block, named "". Whether the blocks are a chain, each fed
    with nothing but the output of the one before, shows only when the model runs
    (`hopsparse.prune.is_chain`).
    """
    best: tuple[str, ...] = ("",)
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        alike = len({type(child) for child in module}) == 1
        # A list of bare linear layers is no list of blocks: its parent is the block.
        blocks = alike and not isinstance(module[0], nn.Linear) and _has_linear(module)
        if blocks and len(module) > len(best):
            best = tuple(f"{name}.{index}" for index in range(len(module)))
    return best


def select(
    model: nn.Module, blocks: Iterable[str], pattern: Pattern, keep: Iterable[str] = ()
) -> Selection:
    """Divide the linear layers of `model` into those to prune and those that stay dense.

    Args:
        model: Any module; weights may be on the meta device.
        blocks: Module path of each block.
        pattern: What the layers will be pruned to.
        keep: Glob patterns over full layer names, such as `*.down_proj`.

    Raises:
        UnsupportedError: Nothing is left to prune.
    """
    paths, patterns = tuple(blocks), tuple(keep)
    eligible: dict[str, tuple[str, ...]] = {}
    kept: dict[str, str] = {}
    owner = {
        f"{path}.{name}".strip("."): path
        for path in paths
        for name, module in model.get_submodule(path).named_modules()
        if isinstance(module, nn.Linear)
    }
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = _reason_to_keep(name, module, pattern, patterns)
        if reason is None and name not in owner:
            reason = "outside the blocks"
        if reason is not None:
            kept[name] = reason
        else:
            eligible[owner[name]] = (*eligible.get(owner[name], ()), name)
    if not eligible:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(kept.items())[:3])
        raise UnsupportedError(
            f"a model of class {type(model).__name__} without any layer to prune"
            + (f" ({reasons})" if reasons else ""),
            need=f"at least one nn.Linear in a block that {pattern} fits",
            hint="fewer --keep globs, or another pattern",
        )
    return Selection(paths, eligible, kept)


def replace_module(model: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> None:
    """Put `make(old)` in the place of the module called `name`."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, child, make(getattr(parent, child)))


def _reason_to_keep(
    name: str, linear: nn.Linear, pattern: Pattern, keep: tuple[str, ...]
) -> str | None:
    for glob in keep:
        if fnmatchcase(name, glob):
            return f"kept by {glob!r}"
    if isinstance(pattern, NMPattern) and linear.in_features % pattern.m:
        return f"k = {linear.in_features} is not a multiple of {pattern.m}"
    return None


def _has_linear(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Linear) for child in module.modules())

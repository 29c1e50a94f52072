"""Make a model sparse: one in memory, or a checkpoint on disk a block at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError
from ..nn import SparseLinear
from ..prune import Activations, LayerReport, Recipe, Reference, is_chain, quiet
from ._block import Pruned, prune_path
from ._calls import as_inputs, call, first_inputs
from ._family import Family
from ._prune_job import Job
from ._summary import asked_for, repeat_command
from .options import ProgressCallback, SparsifyOptions, StepClock
from .rules import FAMILIES, Selection, find_blocks, linear_names, replace_module, select
from .save import attach_to_transformers


def sparsify(
    model: nn.Module,
    recipe: Recipe | str = "2:4",
    calibration: Iterable[Any] = (),
    *,
    progress: ProgressCallback = lambda _: None,
) -> list[LayerReport]:
    """Prune the linear layers of a model in place and replace them by `SparseLinear`.

    Args:
        model: Any module. If its longest list of alike modules is a chain, those are its blocks,
            and later ones are calibrated behind pruned ones, with one block's statistics in
            memory at a time. Otherwise the model is one block.
        recipe: What becomes of each layer; a pattern such as "2:4" stands for `Recipe(pattern)`.
        calibration: Inputs for `model(...)`: tensors, tuples of arguments, or mappings of keyword
            arguments. Not needed for magnitude pruning.
        progress: Called after each block.

    Returns:
        One report for each pruned layer, in run order.

    Raises:
        UnsupportedError: No layer can be pruned to the pattern.
        ArgumentError: The model or the recipe cannot be used, inputs are missing, or a weight is
            not finite.
        CalibrationError: Inputs cannot be used. Weights pruned before an error stay pruned.

    Example:
        >>> mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
        >>> reports = sparsify(mlp, "2:4", [torch.randn(32, 64) for _ in range(4)])
        >>> mlp[0].matrix.pattern
        NMPattern(n=2, m=4)
    """
    _check_model(model)
    chosen, items = _as_recipe(recipe), as_inputs(calibration)
    blocks = find_blocks(model)
    # Before anything runs: a model without a layer to prune may not run at all.
    select(model, ("",), chosen)
    with quiet(model):
        if items and blocks != ("",):
            modules = [model.get_submodule(path) for path in blocks]
            if not is_chain(modules, lambda: call(model, items[0])):
                blocks = ("",)
        selection = select(model, blocks, chosen)
        _check_weights(model, selection)
        activations = first_inputs(model, blocks[0], items) if items else None
        pruned = _prune_all(model, selection, activations, chosen, progress)
    _replace_all(model, pruned, chosen)
    attach_to_transformers(model, asked_for(chosen), chosen.method, selection.kept_dense)
    return [report for part in pruned for report in part.reports]


def sparsify_checkpoint(
    model: str,
    out: Path | str,
    recipe: Recipe,
    *,
    options: SparsifyOptions = SparsifyOptions(),  # noqa: B008
    progress: ProgressCallback = lambda _: None,
) -> dict[str, Any]:
    """Read a dense model, prune it a block at a time, and write a sparse checkpoint.

    Args:
        model: A local HF folder, a .gguf file, or a packaged model such as "smollm2-135m".
        out: Folder to make; it appears when it is complete. Until then OUT.partial holds what is
            finished, block by block.
        recipe: How to prune.
        options: Texts, sizes, device, plan, resume and overwrite.
        progress: Called after each block and at each later phase.

    Returns:
        The report that is also written as OUT/report.json.

    Raises:
        CheckpointError: The model or the plan cannot be read, or OUT cannot be written.
        ArgumentError: The plan is none of this model; it says the line of a layer.
        CalibrationError: A text cannot be used.
        UnsupportedError: The architecture is unknown, or no layer can be pruned.
    """
    job = Job.of(model, recipe, options)
    command = repeat_command(model, Path(out), recipe, options)
    return job.run(out, command=command, progress=progress)


def _prune_all(
    model: nn.Module,
    selection: Selection,
    activations: Activations | None,
    recipe: Recipe,
    progress: ProgressCallback,
) -> list[Pruned]:
    """Prune block by block; each is calibrated behind those before it."""
    blocks = selection.blocks
    family = _known_family(model, blocks)
    if activations is not None and recipe.resolved_fit_to != "layer":
        residual = dict(family.residual) if family is not None else {}
        activations.reference = Reference(activations, residual)
    clock = StepClock("prune", len(blocks), progress)
    pruned: list[Pruned] = []
    for path in blocks:
        names = selection.eligible.get(path, ())
        more = activations is not None and path != blocks[-1]
        block = model.get_submodule(path)
        pruned.append(
            prune_path(block, path, names, activations, recipe, then_advance=more, family=family)
        )
        clock.step(path or type(model).__name__)
    return pruned


def _check_model(model: object) -> None:
    """Refuse what has no layers to replace in place."""
    if not isinstance(model, nn.Module):
        got = f"a {type(model).__name__} as the model"
        raise ArgumentError(got, need="an nn.Module", hint="sparsify_checkpoint for a folder")
    if isinstance(model, torch.jit.ScriptModule):
        got = f"a scripted {model.original_name}"
        raise ArgumentError(got, need="an nn.Module in Python", hint="sparsify before torch.jit")
    if isinstance(model, nn.Linear):
        raise ArgumentError(
            "a model that is itself an nn.Linear, which cannot be replaced in place",
            need="a module that holds nn.Linear layers",
            hint="nn.Sequential(linear), or SparseLinear.from_linear after pruning its weight",
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            got = f"a model whose {name} is on the meta device"
            raise ArgumentError(got, need="weights in memory", hint="load them first")


def _as_recipe(recipe: object) -> Recipe:
    if isinstance(recipe, str):
        return Recipe(pattern=recipe)
    if not isinstance(recipe, Recipe):
        got = f"a {type(recipe).__name__} as the recipe"
        raise ArgumentError(got, need="a Recipe or a pattern as text", hint='"2:4"')
    return recipe


def _known_family(model: nn.Module, blocks: tuple[str, ...]) -> Family | None:
    """What is known of the blocks of `model`, if they are those of a family."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    family = next((family for family in FAMILIES if kind in family.model_types), None)
    is_its = family is not None and blocks[0].startswith(f"{family.blocks}.")
    return family if is_its else None


def _check_weights(model: nn.Module, selection: Selection) -> None:
    """Refuse a weight that is not finite before anything is pruned or run on it."""
    for name in (name for names in selection.eligible.values() for name in names):
        weight = model.get_parameter(f"{name}.weight").detach()
        bad = ~weight.isfinite()
        if bad.any():
            row, column = bad.nonzero()[0].tolist()
            raise ArgumentError(
                f"layer {name}: weight holds {float(weight[row, column])} at row {row}, "
                f"column {column}",
                need="finite numbers",
                hint=f"repair the weights, or Recipe(..., keep=({name!r},))",
            )


def _replace_all(model: nn.Module, pruned: Iterable[Pruned], recipe: Recipe) -> None:
    """Put a `SparseLinear` in every place of every pruned layer."""
    places = linear_names(model)
    # Packed first: an error leaves every layer an nn.Linear.
    packed: list[tuple[list[str], SparseLinear]] = []
    for part in pruned:
        for name in (report.name for report in part.reports):
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            weight = linear.weight.detach()
            matrix = part.pack(name, weight, recipe.form_of(name), weight.dtype)
            sparse = SparseLinear(matrix, linear.bias).train(linear.training)
            packed.append((places[linear], sparse))
    for names, sparse in packed:
        for name in names:
            replace_module(model, name, lambda _, new=sparse: new)  # type: ignore[misc]

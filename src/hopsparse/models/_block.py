"""One block of a model: its layers pruned, rounded and stored, and put back from what is stored."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import CalibrationError
from ..formats import Form, Quantized, SparseMatrix
from ..prune import Activations, LayerReport, Recipe, prune_block, quiet, trace_groups
from ..prune.activations import call
from ..quant import Rounding, measure_scales, quantize_matrix, rounded_inputs, store_matrix
from ._family import Family
from ._files import read_tensors
from ._resume import RunState
from .checkpoint import ModuleEntry
from .permute import permute_block
from .smooth import smooth_block


@dataclass(frozen=True)
class Pruned:
    """What became of the layers of a block, whose weights changed in place.

    Attributes:
        reports: One a layer, in run order.
        scales: Weight scales [out, groups] of each layer that has a scheme, by full name.
        rounding: How the inputs of layers are rounded, by full name.
    """

    reports: list[LayerReport]
    scales: dict[str, Tensor]
    rounding: dict[str, Rounding]

    def pack(self, name: str, weight: Tensor, form: Form, dtype: torch.dtype) -> SparseMatrix:
        """Store the weight of the layer `name`, which stands for one of `dtype`."""
        if form.scheme is None:
            return store_matrix(weight.to(dtype), form.pattern)
        known = self.rounding.get(name)
        scale = known.scale if known else None
        return quantize_matrix(weight, form, self.scales[name], dtype=dtype, input_scale=scale)


def prune_path(
    block: nn.Module,
    path: str,
    eligible: Iterable[str],
    activations: Activations | None,
    recipe: Recipe,
    *,
    store_dtype: torch.dtype | None = None,
    then_advance: bool = True,
    family: Family | None = None,
) -> Pruned:
    """Prune the `eligible` layers (full names) of the block at `path`, in run order.

    The inputs of layers whose scheme rounds them are rounded all the while, so that statistics and
    the activations behind the block are those of what will run.
    """
    prefix = f"{path}." if path else ""
    names = [name.removeprefix(prefix) for name in eligible]
    groups = [[name] for name in names]
    if activations is not None and len(activations) > 1:
        # Several windows: each group is one more forward, so layers that share an input share it.
        groups = trace_groups(block, names, partial(call, block, activations, 0))
    if activations is not None:
        prepare(block, path, activations, recipe, family)
    layers = {prefix + name: block.get_submodule(name) for name in names}
    rounding = _input_rounding(block, layers, activations, recipe)
    scales: dict[str, Tensor] = {}
    with rounded_inputs((layers[name], how) for name, how in rounding.items()):
        reports = prune_block(
            block,
            groups,
            activations,
            recipe,
            prefix=prefix,
            then_advance=then_advance,
            store_dtype=store_dtype,
            scales_out=scales,
        )
    return Pruned(reports, scales, rounding)


def prepare(
    block: nn.Module, path: str, activations: Activations, recipe: Recipe, family: Family | None
) -> None:
    """Bring the dense block at `path` into the order and scale in which it will be pruned.

    What it computes stays the same. The reference, if there is one, enters it.
    """
    if family is not None and recipe.permute:
        permute_block(block, path, activations, recipe, family)
    if family is not None and recipe.smooth:
        smooth_block(block, path, activations, recipe, family)
    if activations.reference is not None:
        activations.reference.enter(block)


def restore_shard(model: nn.Module, folder: Path, shard: RunState.Shard) -> dict[str, Rounding]:
    """Put what a finished block holds into `model`, whose weights of that block are loaded.

    Returns:
        How the inputs of its layers are rounded, by full name.
    """
    tensors = read_tensors(folder / shard.file)
    rounding: dict[str, Rounding] = {}
    for module, entry in shard.entries.items():
        matrix = ModuleEntry.from_json(module, entry).matrix(module, tensors.__getitem__)
        for part in matrix.parts():
            del tensors[f"{module}.{part}"]
        if isinstance(matrix, Quantized):
            # Not in the dtype it stands for: what ran were the numbers of the grid.
            tensors[f"{module}.weight"] = matrix.to_dense(torch.float32)
            scale = matrix.input_scale
            device = model.get_parameter(f"{module}.weight").device
            rounding[module] = Rounding(matrix.scheme, None if scale is None else scale.to(device))
        else:
            tensors[f"{module}.weight"] = matrix.to_dense()
    for name, value in tensors.items():
        model.get_parameter(name).data.copy_(value)
    return rounding


def rounding_in(model: nn.Module, rounding: dict[str, Rounding]) -> AbstractContextManager[None]:
    """While open, the layers of `model` round their inputs as `rounding` says by full name."""
    return rounded_inputs((model.get_submodule(name), how) for name, how in rounding.items())


def _input_rounding(
    block: nn.Module, layers: dict[str, nn.Module], activations: Activations | None, recipe: Recipe
) -> dict[str, Rounding]:
    """How the inputs of each layer will be rounded; scales of static schemes are measured."""
    schemes = {name: scheme for name in layers if (scheme := recipe.form_of(name).scheme)}
    static = {name: (layers[name], scheme) for name, scheme in schemes.items() if scheme.static}
    scales: dict[str, Tensor] = {}
    if static:
        if activations is None:
            name, (_, scheme) = next(iter(static.items()))
            raise CalibrationError(
                f"layer {name} under {scheme} and no calibration inputs",
                need="inputs to measure its static scale from",
                hint=str(scheme).removesuffix(":static"),
            )
        scales = measure_scales(static, lambda: _run(block, activations))
    return {name: Rounding(scheme, scales.get(name)) for name, scheme in schemes.items()}


def _run(block: nn.Module, activations: Activations) -> None:
    with quiet(block):
        for index in range(len(activations)):
            call(block, activations, index)

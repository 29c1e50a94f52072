"""Runs a model a block at a time: memory stays at one block and the inputs of one block.

activations = capture_inputs(run, blocks[0], windows)
for block in blocks:
    reports += prune_block(block, groups, activations, recipe)
    advance(block, activations)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .activations import Activations, advance, call, quiet, store
from .gather import Gatherer, Seen, add_target
from .hooks import StopForward, layer_input, tensor_version
from .layer import new_statistics, prune_layer
from .recipe import LayerReport, Recipe
from .reference import DenseCall, watch_residuals
from .statistics import Statistics


def prune_block(
    block: nn.Module,
    groups: Sequence[Sequence[str]],
    activations: Activations | None,
    recipe: Recipe,
    *,
    prefix: str = "",
    then_advance: bool = False,
    store_dtype: torch.dtype | None = None,
    scales_out: dict[str, Tensor] | None = None,
) -> list[LayerReport]:
    """Prune the layers of one block in place.

    With refresh `group` (see `Recipe`) the statistics of a group come from a forward
    in which earlier groups are already pruned. If `activations` is one batch, each layer is
    pruned inside that forward just before it is called: one forward for statistics, and with
    `then_advance` the same forward makes the inputs of the next block. With several windows the
    forward is repeated a group, up to the group. With `block` one forward of the dense block
    serves all groups.

    Args:
        block: Takes hidden states first; returns them, or a tuple that starts with them.
        groups: Layer names relative to the block, in the order in which they run.
        activations: The block's inputs; None only for magnitude (then no output error). If they
            have a reference, it has entered this block, and moves on with them.
        recipe: What to do. `recipe.keep` sees `prefix + name`.
        prefix: Put before each name in reports.
        then_advance: Also do `advance(block, activations)`, in the same forward where possible.
        store_dtype: Round new weights to what this dtype holds, before they are run: for a block
            that computes in float32 and is stored in 16 bits. Weights on the grid of a scheme
            stay on it.
        scales_out: Filled with the scales [out, groups] of each layer that has a scheme, by
            `prefix + name`.

    Returns:
        One report a layer, in the order of `groups`.

    Raises:
        ArgumentError: A name that is no nn.Linear of the block, or a weight that is not finite.
        CalibrationError: Non-finite activations; the message names the layer.

    Example:
        >>> block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> acts = Activations([torch.randn(1, 64, 8)], [()], [{}])
        >>> [r.density for r in prune_block(block, [["0"], ["2"]], acts, Recipe("2:4"))]
        [0.5, 0.5]
    """
    layers = _find_layers(block, groups)
    work = _Work(block, layers, recipe, prefix, store_dtype, scales_out)
    if activations is None and (recipe.method != "magnitude" or then_advance):
        raise ArgumentError(
            f"method {recipe.method} without activations",
            need="activations from capture_inputs",
            hint="method magnitude, which needs none",
        )
    with quiet(block):
        _prune_all(work, groups, activations, then_advance)
    return [work.reports[name] for name in layers]


@dataclass
class _Work:
    """One block being pruned."""

    block: nn.Module
    layers: Mapping[str, nn.Module]
    recipe: Recipe
    prefix: str
    store_dtype: torch.dtype | None
    scales_out: dict[str, Tensor] | None
    reports: dict[str, LayerReport] = field(default_factory=dict)

    def prune(self, name: str, statistics: Statistics | None) -> None:
        full = self.prefix + name
        self.reports[name] = prune_layer(
            full,
            self.layers[name],
            statistics,
            self.recipe,
            store_dtype=self.store_dtype,
            scales_out=self.scales_out,
        )

    def wanted(self, names: Sequence[str]) -> dict[str, nn.Module]:
        """By full name, the layers that need statistics: not those that stay dense."""
        full = {self.prefix + name: self.layers[name] for name in names}
        return {name: layer for name, layer in full.items() if not self.recipe.keeps(name)}


def _prune_all(
    work: _Work,
    groups: Sequence[Sequence[str]],
    activations: Activations | None,
    then_advance: bool,
) -> None:
    """Choose between no statistics, one forward for all, and one forward a group."""
    if activations is None:
        for name in work.layers:
            work.prune(name, None)
        return
    if work.recipe.resolved_refresh == "group" and len(activations) == 1:
        _prune_inside(work, activations, then_advance)
        return
    whole = [list(work.layers)] if work.recipe.resolved_refresh == "block" else groups
    for group in whole:
        _prune_between(work, group, activations)
    if then_advance:
        advance(work.block, activations)
        if activations.reference is not None:
            activations.reference.advance()


def _prune_between(work: _Work, group: Sequence[str], activations: Activations) -> None:
    """Gather over all windows, then prune the group."""
    wanted = work.wanted(group)
    targets = _Targets(work, activations, group)
    make = partial(new_statistics, recipe=work.recipe)
    with targets, Gatherer(wanted, make) as gatherer:
        for index in range(len(activations) if wanted else 0):
            targets.look(index)
            gatherer.run(partial(call, work.block, activations, index), targets.of)
    for name in group:
        # Popped, so that a Hessian and its factor go with the last layer that shares them.
        work.prune(name, gatherer.found.pop(work.prefix + name, None))


def _prune_inside(work: _Work, activations: Activations, then_advance: bool) -> None:
    """Prune each layer in the forward of the only batch, just before the layer runs."""
    wanted = work.wanted(list(work.layers))
    targets = _Targets(work, activations, list(work.layers))
    targets.look(0, then_advance=then_advance)
    latest: dict[str, Any] = {}
    done: set[str] = set()

    def before(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in done:
                return
            inputs = layer_input(args, kwargs)
            version = tensor_version(inputs)
            if latest.get("inputs") is not inputs or latest["version"] != version:
                latest.clear()
                statistics = new_statistics(inputs, work.recipe)
                statistics.add(inputs, name, targets.of(name).inputs)
                latest.update(inputs=inputs, version=version, statistics=statistics)
            add_target(latest["statistics"], inputs, name, targets.of(name))
            done.add(name)
            work.prune(name.removeprefix(work.prefix), latest["statistics"])
            if not then_advance and len(done) == len(wanted):
                raise StopForward

        return hook

    handles = [
        layer.register_forward_pre_hook(before(name), with_kwargs=True)
        for name, layer in wanted.items()
    ]
    try:
        with targets:
            if wanted or then_advance:
                output = call(work.block, activations, 0, copy=not then_advance)
                if then_advance:
                    store(activations, 0, output)
    except StopForward:
        pass
    finally:
        for handle in handles:
            handle.remove()
    for name in work.layers:
        if name not in work.reports:
            work.prune(name, None)


class _Targets:
    """What the dense model does in the place of each layer, window by window."""

    def __init__(self, work: _Work, activations: Activations, names: Sequence[str]) -> None:
        use = work.recipe.resolved_fit_to != "layer"
        self._reference = activations.reference if use else None
        self._work = work
        self._names = [name for name in names if not work.recipe.keeps(work.prefix + name)]
        residual = self._reference.residual if self._reference else {}
        pulls = work.recipe.resolved_fit_to == "residual"
        self._residual = {n: residual[n] for n in self._names if n in residual} if pulls else {}
        self._calls: dict[str, DenseCall] = {}
        self._streams: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles = watch_residuals(self._work.block, self._residual, self._streams)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def look(self, index: int, *, then_advance: bool = False) -> None:
        """Run the dense block on window `index`."""
        if self._reference is not None and (self._names or then_advance):
            self._calls = self._reference.calls(index, self._names, then_advance=then_advance)

    def of(self, full_name: str) -> Seen:
        """What the layer of this full name gets and should put out, in the last window."""
        name = full_name.removeprefix(self._work.prefix)
        dense, now = self._calls.get(name), self._streams.get(name)
        if dense is None:
            return Seen()
        wanted = dense.stream if name in self._residual else None
        if wanted is not None and now is not None and now.shape == wanted.shape:
            return Seen(target=wanted - now)
        return Seen(dense.inputs)


def _find_layers(block: nn.Module, groups: Sequence[Sequence[str]]) -> dict[str, nn.Module]:
    modules = dict(block.named_modules())
    layers: dict[str, nn.Module] = {}
    for name in (name for group in groups for name in group):
        if not isinstance(modules.get(name), nn.Linear) or name in layers:
            known = [n for n, m in modules.items() if isinstance(m, nn.Linear)]
            raise ArgumentError(
                f"layer {name!r}" + (" twice" if name in layers else ""),
                need="names of nn.Linear modules of the block, each once",
                hint=", ".join(known) or "a block that has nn.Linear modules",
            )
        layers[name] = modules[name]
    return layers

"""Runs a model a block at a time: memory stays at one block and the inputs of one block.

activations = capture_inputs(run, blocks[0], windows)
for block in blocks:
    reports += prune_block(block, groups, activations, recipe)
    advance(block, activations)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CalibrationError
from .layer import new_statistics, prune_layer
from .recipe import LayerReport, Recipe
from .statistics import Gatherer, Statistics, StopForward, layer_input, tensor_version


@dataclass
class Activations:
    """The calls of one block: a hidden state a window, and the other arguments.

    Args:
        hidden: The first argument of each call; `advance` replaces them.
        args: The other positional arguments of each call.
        kwargs: The keyword arguments of each call. Calls with equal arguments share one object.

    Example:
        >>> len(Activations(hidden=[torch.zeros(1, 4, 8)], args=[()], kwargs=[{}]))
        1
    """

    hidden: list[Tensor] = field(default_factory=list)
    args: list[tuple[Any, ...]] = field(default_factory=list)
    kwargs: list[dict[str, Any]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.hidden)


def capture_inputs(
    run: Callable[[Tensor], Any], first_block: nn.Module, windows: Sequence[Tensor]
) -> Activations:
    """Record how the first block is called for each window; the forward stops there.

    One call per window, so a window that is a batch [b, tokens] makes a batched stream. All
    windows in one batch are the fastest way to prune: see `prune_block`.

    Args:
        run: Runs the model on a window, without a cache (transformers: `use_cache=False`).
        first_block: The first block that will be pruned.
        windows: What `run` takes; usually token ids [batch, tokens].

    Raises:
        CalibrationError: No window, the block is not reached, or it is called with objects that
            cannot be passed again (a cache, for one).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
        >>> len(capture_inputs(model, model[1], [torch.zeros(1, 3, 4)]))
        1
    """
    found = Activations()

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _record(found, args, kwargs)
        raise StopForward

    if not len(windows):
        raise CalibrationError("no window", need="at least one window", hint="a longer text")
    handle = first_block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            for index, window in enumerate(windows):
                try:
                    run(window)
                except StopForward:
                    continue
                raise CalibrationError(
                    f"window {index} never reached the first block",
                    need="a run that calls it",
                    hint="check which module was passed as first_block",
                )
    finally:
        handle.remove()
    return found


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
        activations: The block's inputs; None only for magnitude (then no output error).
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


def advance(block: nn.Module, activations: Activations) -> None:
    """Replace the hidden states by the block's outputs, one call at a time.

    Args:
        block: The block that `activations` belong to.
        activations: Changed in place: now the inputs of the next block.

    Raises:
        CalibrationError: The output is no hidden state of the same shape, or not finite.

    Example:
        >>> acts = Activations([torch.ones(1, 2, 4)], [()], [{}])
        >>> advance(nn.Identity(), acts)
        >>> acts.hidden[0].shape
        torch.Size([1, 2, 4])
    """
    with quiet(block):
        for index in range(len(activations)):
            _store(activations, index, _call(block, activations, index, copy=False))


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


def _prune_between(work: _Work, group: Sequence[str], activations: Activations) -> None:
    """Gather over all windows, then prune the group."""
    wanted = work.wanted(group)
    with Gatherer(wanted, lambda inputs: new_statistics(inputs, work.recipe)) as gatherer:
        if wanted:
            for index in range(len(activations)):
                gatherer.run(lambda index=index: _call(work.block, activations, index))  # type: ignore[misc]
    for name in group:
        # Popped, so that a Hessian and its factor go with the last layer that shares them.
        work.prune(name, gatherer.found.pop(work.prefix + name, None))


def _prune_inside(work: _Work, activations: Activations, then_advance: bool) -> None:
    """Prune each layer in the forward of the only batch, just before the layer runs."""
    wanted = work.wanted(list(work.layers))
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
                statistics.add(inputs, name)
                latest.update(inputs=inputs, version=version, statistics=statistics)
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
        if wanted or then_advance:
            output = _call(work.block, activations, 0, copy=not then_advance)
            if then_advance:
                _store(activations, 0, output)
    except StopForward:
        pass
    finally:
        for handle in handles:
            handle.remove()
    for name in work.layers:
        if name not in work.reports:
            work.prune(name, None)


def _call(block: nn.Module, activations: Activations, index: int, *, copy: bool = True) -> Any:
    # A block may add to its input in place; with `copy` the next call still sees the original.
    hidden = activations.hidden[index]
    hidden = hidden.clone() if copy else hidden
    return block(hidden, *activations.args[index], **activations.kwargs[index])


def _store(activations: Activations, index: int, output: Any) -> None:
    hidden = output[0] if isinstance(output, (tuple, list)) and output else output
    before = activations.hidden[index]
    if not isinstance(hidden, Tensor) or hidden.shape != before.shape:
        what = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise CalibrationError(
            f"a block that returns {what} for hidden states {tuple(before.shape)}",
            need="hidden states of the same shape, alone or first in a tuple",
            hint="pass the repeated blocks of the model only",
        )
    if not bool(hidden.isfinite().all()):
        raise CalibrationError(
            f"window {index}: the block's output is not finite",
            need="finite activations",
            hint="another calibration text, or the model in float32",
        )
    activations.hidden[index] = hidden


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


@contextmanager
def quiet(block: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; the modes of all submodules come back."""
    modes = [(module, module.training) for module in block.modules()]
    block.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _record(found: Activations, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = dict(kwargs)
    hidden, rest = (args[0], args[1:]) if args else (named.pop("hidden_states", None), ())
    if not isinstance(hidden, Tensor):
        raise CalibrationError(
            f"a block called with {type(hidden).__name__}",
            need="hidden states as the first argument",
            hint="pass the first of the repeated blocks",
        )
    _check_plain(rest, "an argument")
    for key, value in named.items():
        _check_plain(value, f"argument {key}")
    if found.hidden and _equal((found.args[-1], found.kwargs[-1]), (rest, named)):
        rest, named = found.args[-1], found.kwargs[-1]
    found.hidden.append(hidden.detach())
    found.args.append(rest)
    found.kwargs.append(named)


def _check_plain(value: Any, what: str) -> None:
    """Refuse objects that change when a block is called (caches): blocks are called repeatedly."""
    if isinstance(value, (tuple, list)):
        for item in value:
            _check_plain(item, what)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_plain(item, f"{what}[{key!r}]")
    elif not isinstance(value, (Tensor, type(None), bool, int, float, str, torch.dtype)):
        raise CalibrationError(
            f"a block called with {what} of type {type(value).__name__}",
            need="tensors and plain values, so that the block can be called again",
            hint="use_cache=False",
        )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)

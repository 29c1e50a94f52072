"""Vision models: from any module of convolutions and linear layers to a sparse one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..nn import convolutions_as_linear, fold_batch_norms, restore_convolutions
from ..nn.convolution import LEAST_CHANNELS
from ..prune import LayerReport, Recipe
from .options import ProgressCallback
from .sparsify import sparsify


def sparsify_vision(
    model: nn.Module,
    recipe: Recipe | str = "2:4",
    images: Iterable[Any] = (),
    *,
    fold: bool = True,
    also: tuple[type[nn.Conv2d], ...] = (),
    least_channels: int = LEAST_CHANNELS,
    progress: ProgressCallback = lambda _: None,
) -> list[LayerReport]:
    """Prune the linear layers and the convolutions of a model, in place.

    Of torchvision, timm or your own, in evaluation mode. Batch norms are folded into the layer
    ahead, 1x1 convolutions become a `Pointwise`, others a `Convolution`, all of these and linear
    layers are pruned by `hopsparse.sparsify`, and what stays dense is an nn.Conv2d again.

    Args:
        model: Holds nn.Linear or nn.Conv2d layers; those with groups, few channels or another
            padding than zeros stay as they are.
        recipe: As for `sparsify`; layers of convolutions are named `NAME.linear`.
        images: Inputs for `model(...)`, one batch for best speed; not needed for magnitude pruning.
        fold: Whether batch norms are folded. Statistics cannot be corrected any more then.
        also: Subclasses of nn.Conv2d that compute what it does.
        least_channels: Input channels from which on a convolution of several taps is pruned.
        progress: As for `sparsify`.

    Returns:
        One report for each pruned layer.

    Raises:
        ArgumentError: As for `sparsify`, or a batch norm is in training mode.
        UnsupportedError: No layer can be pruned; or the model cannot be traced to fold its norms.
        CalibrationError: Images cannot be used.

    Example:
        >>> import torch
        >>> convs = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32)
        >>> net = nn.Sequential(*convs, nn.ReLU(), nn.Flatten(), nn.Linear(512, 8)).eval()
        >>> reports = sparsify_vision(net, "2:4", [torch.randn(4, 3, 8, 8)])
        >>> [report.name for report in reports], type(net[2]).__name__
        (['1.linear', '5'], 'Identity')
    """
    if fold:
        fold_batch_norms(model, also=also)
    # A transformer whose one convolution is its stem has linear layers all the same.
    with suppress(UnsupportedError):
        convolutions_as_linear(model, also=also, least_channels=least_channels)
    try:
        return sparsify(model, recipe, images, progress=progress)
    finally:
        restore_convolutions(model)


def replace_layers(
    model: nn.Module, make: Callable[[str, nn.Linear], nn.Module | None]
) -> tuple[str, ...]:
    """Put layers of your own in the place of linear layers, in place.

    Args:
        model: Holds nn.Linear layers, also inside a `Pointwise` or a `Convolution`.
        make: Given a name and a layer, the layer that replaces it; None leaves it.

    Returns:
        Names of what was replaced.

    Example:
        >>> from hopsparse.nn import SparseLinear
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> replace_layers(net, lambda name, linear: SparseLinear.from_linear(linear, "csr"))
        ('0', '1')
    """
    made: dict[nn.Module, nn.Module | None] = {}
    names = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is not nn.Linear or not name:
            continue
        if module not in made:
            made[module] = make(name, module)
        new = made[module]
        if new is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
            names.append(name)
    return tuple(names)

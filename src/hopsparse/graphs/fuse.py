"""An activation behind a sparse layer moves into the kernel of that layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from ..nn import SparseLinear


@dataclass
class Fused:
    """What was fused, and the way back.

    Attributes:
        count: Activations that became part of a layer.
    """

    _layers: list[SparseLinear] = field(default_factory=list, repr=False)
    _activations: list[tuple[nn.Sequential, str, nn.Module]] = field(
        default_factory=list, repr=False
    )

    @property
    def count(self) -> int:
        """Activations that became part of a layer."""
        return len(self._layers)

    def undo(self) -> None:
        """Put every activation back where it was; again does nothing."""
        for layer in self._layers:
            layer.act = None
        for parent, name, activation in self._activations:
            parent._modules[name] = activation
        self._layers, self._activations = [], []


def fuse_activations(model: nn.Module) -> Fused:
    """Let layers apply the activation that follows them, so that both are one launch.

    Found are pairs of neighbours in an `nn.Sequential`: a `SparseLinear` that has none yet, then
    ReLU, GELU or SiLU. The activation becomes an `nn.Identity`; names in the state dict stay. A
    layer or an activation that the model holds in two places is left alone, and so are those that
    have hooks, which would see another value.

    Args:
        model: Changed in place.

    Returns:
        What was done; `undo()` takes it back.

    Example:
        >>> layer = SparseLinear.from_linear(nn.Linear(8, 8), "csr")
        >>> model = nn.Sequential(layer, nn.ReLU())
        >>> fused = fuse_activations(model)
        >>> fused.count, model[0].act, type(model[1]).__name__
        (1, 'relu', 'Identity')
        >>> fused.undo()
        >>> type(model[1]).__name__
        'ReLU'
    """
    uses: dict[int, int] = {}
    for parent in model.modules():
        for child in parent._modules.values():
            uses[id(child)] = uses.get(id(child), 0) + 1
    fused = Fused()
    for parent in model.modules():
        if not isinstance(parent, nn.Sequential):
            continue
        for (_, layer), (name, activation) in pairwise(list(parent._modules.items())):
            act = _name_of(activation)
            if not isinstance(layer, SparseLinear) or layer.act is not None or act is None:
                continue
            if uses[id(layer)] > 1 or uses[id(activation)] > 1 or _hooked(layer, activation):
                continue
            layer.act = act
            parent._modules[name] = nn.Identity().train(activation.training)
            fused._layers.append(layer)
            fused._activations.append((parent, name, activation))
    return fused


def _name_of(activation: nn.Module | None) -> str | None:
    """As operators call it; None for what they do not have."""
    if type(activation) is nn.ReLU:
        return "relu"
    if type(activation) is nn.SiLU:
        return "silu"
    if type(activation) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    return None


def _hooked(*modules: nn.Module | None) -> bool:
    return any(
        module is not None
        and (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        )
        for module in modules
    )

"""An activation behind a sparse layer moves into the kernel of that layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from ..errors import ArgumentError
from ..nn import SparseLinear, has_hooks, uses_of

_IN_TURN = nn.Sequential.forward


@dataclass
class Fused:
    """What was fused, and the way back.

    Attributes:
        count: Activations that became part of a layer.
    """

    _layers: list[SparseLinear] = field(default_factory=list, repr=False)
    _activations: list[tuple[nn.Sequential, nn.Identity, nn.Module]] = field(
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
        for parent, stand_in, activation in self._activations:
            for name, child in parent._modules.items():  # It may have moved since.
                if child is stand_in:
                    parent._modules[name] = activation.train(stand_in.training)
        self._layers, self._activations = [], []


def fuse_activations(model: nn.Module) -> Fused:
    """Let layers apply the activation that follows them, so that both are one launch.

    Found are pairs of neighbours in an `nn.Sequential`: a `SparseLinear` that has none yet, then
    ReLU, GELU or SiLU. The activation becomes an `nn.Identity`; names in the state dict stay. A
    layer or an activation that the model holds in two places is left alone, and so are those that
    have hooks, which would see another value. Who else holds such a layer, or calls it alone, gets
    the activation too: that cannot be seen here.

    Args:
        model: Changed in place.

    Raises:
        ArgumentError: It is no module.

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
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"a {type(model).__name__} to fuse", need="a torch module", hint="model"
        )
    uses = uses_of(model)
    fused = Fused()
    for parent in model.modules():
        # A subclass may do other things with its children than call one after the other.
        if not isinstance(parent, nn.Sequential) or type(parent).forward is not _IN_TURN:
            continue
        for (_, layer), (name, activation) in pairwise(list(parent._modules.items())):
            act = _name_of(activation)
            if type(layer) is not SparseLinear or layer.act is not None or act is None:
                continue
            if uses[id(layer)] > 1 or uses[id(activation)] > 1:
                continue
            if activation is None or has_hooks(parent, layer, activation):
                continue
            layer.act, stand_in = act, nn.Identity().train(activation.training)
            parent._modules[name] = stand_in
            fused._layers.append(layer)
            fused._activations.append((parent, stand_in, activation))
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

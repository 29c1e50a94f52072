"""Whether somebody listens to a module, or calls it in another way."""

from __future__ import annotations

from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(*modules: nn.Module | None) -> bool:
    """Whether a hook, or a `forward` put on the instance, would be lost if these were replaced.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> handle = layer.register_forward_hook(lambda *_: None)
        >>> has_hooks(layer, None), has_hooks(nn.Linear(2, 2))
        (True, False)
    """
    return any(
        module is not None
        and ("forward" in vars(module) or any(getattr(module, each) for each in HOOKS))
        for module in modules
    )


def uses_of(model: nn.Module) -> dict[int, int]:
    """In how many places each module of a model stands, by its id.

    Example:
        >>> layer = nn.ReLU()
        >>> uses_of(nn.Sequential(layer, layer))[id(layer)]
        2
    """
    uses: dict[int, int] = {}
    for parent in model.modules():
        for child in parent._modules.values():
            uses[id(child)] = uses.get(id(child), 0) + 1
    return uses

"""Whether somebody listens to a module."""

from __future__ import annotations

from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(*modules: nn.Module | None) -> bool:
    """Whether a hook would see another value, or none, if these were fused or replaced.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> handle = layer.register_forward_hook(lambda *_: None)
        >>> has_hooks(layer, None), has_hooks(nn.Linear(2, 2))
        (True, False)
    """
    return any(module is not None and any(getattr(module, h) for h in HOOKS) for module in modules)

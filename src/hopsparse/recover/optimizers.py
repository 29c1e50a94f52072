"""The optimizer as a plug: any function from parameter groups to a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..errors import CheckpointError, UnsupportedError
from .options import RecoverOptions

#: Takes groups with "params", their "names", and "weight_decay". The learning rate of every group
#: is set before each step; gradients of pruned weights are zero, and whatever a step writes there
#: is made zero again. Its state must be tensors and plain numbers, so that it can be saved.
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]


def adamw(options: RecoverOptions) -> OptimizerFactory:
    """AdamW (arXiv:1711.05101) with the betas of the options.

    Example:
        >>> groups = parameter_groups(dict(nn.Linear(2, 2).named_parameters()), 0.1)
        >>> adamw(RecoverOptions())(groups).defaults["betas"]
        (0.9, 0.95)
    """

    def make(groups: list[dict[str, Any]]) -> Optimizer:
        # Fused: one pass over the weights. On two CPU cores that is a fifth of a step.
        return AdamW(groups, lr=options.lr, betas=options.betas, fused=True)

    return make


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices, which decay, and the others, which do not; without empty groups."""
    matrices = {name: each for name, each in parameters.items() if each.dim() > 1}
    others = {name: each for name, each in parameters.items() if each.dim() <= 1}
    return [
        {"params": list(part.values()), "names": list(part), "weight_decay": decay}
        for part, decay in ((matrices, weight_decay), (others, 0.0))
        if part
    ]


def flat_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of an optimizer as tensors by name, and as plain numbers by name.

    Raises:
        UnsupportedError: It holds something else.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            name = f"{index}.{key}"
            if isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, int | float | bool | str | None):
                numbers[name] = value
            else:
                raise UnsupportedError(
                    f"optimizer {type(optimizer).__name__}, which keeps a {type(value).__name__} "
                    f"under {key!r}",
                    need="state of tensors and plain numbers, which can be saved without pickle",
                    hint="an optimizer such as torch.optim.AdamW",
                )
    return tensors, numbers


def load_flat_state(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]
) -> None:
    """Give an optimizer of the same parameters the state that `flat_state` took.

    Raises:
        CheckpointError: It is the state of other parameters.
    """
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    known = {index for group in groups for index in group["params"]}
    if not set(state) <= known:
        raise CheckpointError(
            "an optimizer state of other parameters",
            need="the state of the same run",
            hint="--overwrite to start again",
        )
    optimizer.load_state_dict({"state": state, "param_groups": groups})

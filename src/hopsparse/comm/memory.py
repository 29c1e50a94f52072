"""What a rank keeps of each parameter between steps, by the name of the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ArgumentError


@dataclass
class Kept:
    """What is kept of one parameter.

    Attributes:
        numel: Values of the parameter.
        start: The first of them in the whole parameter, of which this may be a shard.
        steps: How often it was reduced.
        residual: What was not sent yet, float32 [numel]; None as long as there is nothing.
        velocity: Momentum of this rank's gradients, float32 [numel]; None without.
    """

    numel: int
    start: int = 0
    steps: int = 0
    residual: Tensor | None = None
    velocity: Tensor | None = None


@dataclass
class Memory:
    """What is kept of all parameters, by name.

    Buckets of DDP change after the first step, and FSDP has none; names stay.
    """

    kept: dict[str, Kept] = field(default_factory=dict)

    def of(self, name: str, numel: int) -> Kept:
        """What is kept of a parameter; made where it is new.

        Raises:
            ArgumentError: The name is known with another size.
        """
        found = self.kept.setdefault(name, Kept(numel))
        if found.numel != numel:
            raise ArgumentError(
                f"{name} with {numel} values, after {found.numel} before",
                need="one size for one name",
                hint="another name for another tensor, or a new HybridState for another model",
            )
        return found

    def rescale(self, factor: float) -> None:
        """Multiply everything: gradients come with another loss scale from now on."""
        for each in self.kept.values():
            for tensor in (each.residual, each.velocity):
                if tensor is not None:
                    tensor.mul_(factor)

    def nbytes(self) -> int:
        """Bytes of it."""
        tensors = [(each.residual, each.velocity) for each in self.kept.values()]
        return sum(each.nbytes for pair in tensors for each in pair if each is not None)

    def tensors(self, parts_of: Callable[[int], Iterable[str]]) -> dict[str, Tensor]:
        """Everything as tensors, by `residual.NAME`, `velocity.NAME` and `steps.NAME`.

        What is empty is given as zeros, so that names depend on model and options alone.

        Args:
            parts_of: Which of `PARTS` a parameter with so many values has.
        """
        found: dict[str, Tensor] = {}
        for name, each in self.kept.items():
            found[f"steps.{name}"] = torch.tensor(each.steps)
            for part in parts_of(each.numel):
                value = getattr(each, part)
                found[f"{part}.{name}"] = torch.zeros(each.numel) if value is None else value
        return found

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` gave, in another process.

        Raises:
            ArgumentError: A tensor has another size than the parameter of its name.
        """
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            if part == "steps":
                self.kept.setdefault(name, Kept(0)).steps = int(value)
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            if part in PARTS:
                each = self.kept.setdefault(name, Kept(value.numel()))
                each.numel = each.numel or value.numel()
                self.of(name, value.numel())
                setattr(each, part, value.detach().clone().float())


#: What is kept as tensors.
PARTS = ("residual", "velocity")

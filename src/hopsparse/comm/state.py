"""One state for every way to reduce gradients: what is sent, what is kept, what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError
from .collective import Group
from .counters import Counters
from .memory import Memory
from .options import HybridOptions


@dataclass(frozen=True)
class Place:
    """Whose residuals these are: of which replica, and of which part of the parameters.

    Attributes:
        replica: Number of the replica of the model, from 0.
        replicas: How many there are.
        shard: Number of the part of each parameter that this rank reduces.
        shards: How many parts there are; 1 for DDP, and where a rank keeps whole parameters.
    """

    replica: int = 0
    replicas: int = 1
    shard: int = 0
    shards: int = 1

    def __str__(self) -> str:
        return f"{self.replica}of{self.replicas}.{self.shard}of{self.shards}"


class HybridState:
    """What `hybrid_hook` and `aggregate` keep between steps; one for a model and process.

    A `Stateful` of torch.distributed.checkpoint: give it to `save` and `load` with the model, under
    any name. Ranks keep different residuals, so that every rank must save and load.

    Args:
        group: Ranks whose gradients are averaged; None: all.
        options: Attributes of `HybridOptions`, by name.

    Attributes:
        options: What is sent.
        counters: What it cost, until now.
        memory: What is kept.

    Raises:
        ArgumentError: An option that means nothing.

    Example:
        >>> state = HybridState(k=0.001, remainder="int4", every=2)
        >>> state.options.every
        2
    """

    def __init__(self, *, group: Group | None = None, **options: Any) -> None:
        known = HybridOptions().facts()
        if unknown := ", ".join(name for name in options if name not in known):
            raise ArgumentError(
                f"options {unknown}",
                need="one of " + ", ".join(known),
                hint="HybridState(k=0.001, remainder='int4')",
            )
        self.options = HybridOptions(**options)
        self.group = group
        self.counters = Counters()
        self.memory = Memory()
        self.loss_scale = 1.0
        #: What the ranks agreed on already: names, sizes and dtypes of an exchange.
        self.agreed: set[str] = set()
        self._place: Place | None = None
        self._names: dict[int, str] = {}

    @property
    def place(self) -> Place:
        """Whose residuals these are; of this rank in its group, if nothing else was said."""
        if self._place is not None:
            return self._place
        if not dist.is_initialized():
            return Place()
        return Place(dist.get_rank(self.group), dist.get_world_size(self.group))

    @place.setter
    def place(self, place: Place) -> None:
        self._place = place

    def bind(self, model: nn.Module) -> HybridState:
        """Learn the names of the parameters; before the hook runs or a checkpoint is loaded.

        Args:
            model: The model as it is without DDP, or inside of it.

        Returns:
            The state itself.

        Raises:
            ArgumentError: A parameter has another size than under this name before.

        Example:
            >>> state = HybridState().bind(nn.Linear(2, 3))
            >>> sorted(state.state_dict())
            ['0of1.0of1.loss_scale', '0of1.0of1.steps.bias', '0of1.0of1.steps.weight']
        """
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad:
                self._names[id(parameter)] = name
                self.memory.of(name, parameter.numel())
        return self

    def names(self, parameters: Iterable[Tensor]) -> list[str]:
        """The names of parameters.

        Raises:
            ArgumentError: One is of no model that this state was bound to.
        """
        found = [self._names.get(id(each)) for each in parameters]
        if None in found:
            raise ArgumentError(
                f"a parameter without a name; {len(self._names)} are known",
                need="state.bind(model) before the first backward",
                hint="register(ddp, state), which does it",
            )
        return [name for name in found if name is not None]

    def follow_scale(self, loss_scale: float) -> None:
        """Say with what the loss is multiplied from now on; before each backward under a scaler.

        What is kept was scaled by what the loss was scaled with before.

        Args:
            loss_scale: `scaler.get_scale()`, of torch.amp.GradScaler: a power of two, so that
                nothing is rounded.

        Raises:
            ArgumentError: It is not positive and finite.
        """
        if not 0 < loss_scale < float("inf"):
            raise ArgumentError(
                f"loss_scale = {loss_scale}", need="a positive number", hint="scaler.get_scale()"
            )
        if loss_scale != self.loss_scale:
            self.memory.rescale(loss_scale / self.loss_scale)
            self.loss_scale = loss_scale

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that a later process needs, under names that say whose it is.

        Returns:
            Tensors of `Memory.tensors`, with the place before the name.
        """
        tensors = self.memory.tensors(self.options.parts_of)
        tensors["loss_scale"] = torch.tensor(self.loss_scale, dtype=torch.float64)
        return {f"{self.place}.{key}": value for key, value in tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: It is of another rank or number of ranks.
            ArgumentError: A tensor has another size than the parameter of its name.
        """
        mine = f"{self.place}."
        tensors = {
            key.removeprefix(mine): value for key, value in state.items() if key.startswith(mine)
        }
        if "loss_scale" not in tensors:
            raise CheckpointError(
                f"a state without {mine}*",
                need="what this rank saved, with as many ranks",
                hint="hopsparse.comm.load_state, which takes another number of ranks",
            )
        self.loss_scale = float(tensors.pop("loss_scale"))
        self.memory.load(tensors)
        self.agreed.clear()

"""What ranks kept, out of a checkpoint of torch.distributed, for as many ranks or others.

With as many ranks `torch.distributed.checkpoint.load` does it too. With others it would look for
what nobody saved; here every rank gets the mean of what all had: the part of each rank in the mean
of the gradients is what counts, and the mean of equal parts is that part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ..errors import CheckpointError
from .memory import PARTS
from .state import HybridState, Place

_KEY = re.compile(r"(\d+)of(\d+)\.(\d+)of(\d+)\.(.+)")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint has of a state.

    Attributes:
        path: The folder.
        name: Under which name the state was saved.
        sizes: Shape and dtype of each tensor, by place and key.
    """

    path: Path
    name: str
    sizes: Mapping[Place, Mapping[str, tuple[torch.Size, torch.dtype]]]

    @property
    def replicas(self) -> int:
        """How many replicas saved it."""
        return next(iter(self.sizes)).replicas

    @property
    def shards(self) -> int:
        """How many parts each parameter had."""
        return next(iter(self.sizes)).shards

    def read(self, *places: Place) -> list[dict[str, Tensor]]:
        """Everything that ranks at these places saved; all ranks must read as often."""
        tensors = {
            f"{self.name}.{place}.{key}": torch.empty(shape, dtype=dtype)
            for place in places
            for key, (shape, dtype) in self.sizes[place].items()
        }
        load(tensors, storage_reader=FileSystemReader(self.path))
        return [
            {key: tensors[f"{self.name}.{place}.{key}"] for key in self.sizes[place]}
            for place in places
        ]


def load_state(state: HybridState, checkpoint: Path | str, *, name: str = "comm") -> None:
    """Take over what was saved, by as many ranks or by others; every rank must call it.

    With as many ranks each gets its own back, bit by bit. With another number each gets the mean
    of all, momentum too: what the ranks had not sent yet will be sent all the same, in another way.
    Parameters that are sharded are put together and cut anew.

    Args:
        state: Bound to the model.
        checkpoint: Folder that `torch.distributed.checkpoint.save` wrote.
        name: Under which the state was in what was saved.

    Raises:
        CheckpointError: There is no checkpoint, nothing of that name in it, or it is of another
            model.
    """
    saved = _saved(Path(checkpoint), name)
    place = state.place
    if (saved.replicas, saved.shards) == (place.replicas, place.shards):
        tensors = saved.read(place)[0]
    else:
        tensors = _resharded(state, saved)
    for key, value in tensors.items():
        part, _, parameter = key.partition(".")
        kept = state.memory.kept.get(parameter)
        if part in PARTS and (kept is None or kept.numel != value.numel()):
            raise CheckpointError(
                f"{checkpoint}: {parameter} with {value.numel()} values",
                need="the model that the state is bound to",
                hint="state.bind(model) before load_state; the checkpoint of this model",
            )
    state.load_state_dict({f"{place}.{key}": value for key, value in tensors.items()})


def _saved(path: Path, name: str) -> Saved:
    try:
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}",
            need="a folder that torch.distributed.checkpoint.save wrote",
            hint="the checkpoint_id that was given to it",
        ) from error
    sizes: dict[Place, dict[str, tuple[torch.Size, torch.dtype]]] = {}
    for key, found in metadata.items():
        match = _KEY.fullmatch(key.removeprefix(f"{name}."))
        if match is None or not key.startswith(f"{name}."):
            continue
        *numbers, inner = match.groups()
        if isinstance(found, TensorStorageMetadata):
            place = Place(*map(int, numbers))
            sizes.setdefault(place, {})[inner] = (found.size, found.properties.dtype)
    if not sizes:
        others = sorted({key.split(".")[0] for key in metadata})
        raise CheckpointError(
            f"{path} has no {name}.*, but {', '.join(others) or 'nothing'}",
            need="a HybridState that was saved under that name",
            hint="load_state(state, path, name=...)",
        )
    return Saved(path, name, sizes)


def _resharded(state: HybridState, saved: Saved) -> dict[str, Tensor]:
    """The mean over the replicas of what they kept, and of it this rank's part."""
    means: dict[str, Tensor] = {}
    for replica in range(saved.replicas):
        shards = saved.read(
            *(Place(replica, saved.replicas, shard, saved.shards) for shard in range(saved.shards))
        )
        for key, first in shards[0].items():
            if key.partition(".")[0] not in PARTS:
                means[key] = first
                continue
            whole = torch.cat([shard[key] for shard in shards])
            means[key] = whole if replica == 0 else means[key].add_(whole)
    for key, total in means.items():
        part, _, parameter = key.partition(".")
        kept = state.memory.kept.get(parameter)
        if part in PARTS and kept is not None:
            means[key] = total.div_(saved.replicas)[kept.start : kept.start + kept.numel]
    return means

"""What an interrupted sparsify run has finished, kept beside its shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from ..errors import CheckpointError
from ..prune import LayerReport
from ._files import STATE_NAME as STATE_NAME
from ._files import read_json
from .checkpoint import CheckpointWriter


class RunState:
    """The finished blocks of a run; written anew after each.

    Args:
        identity: Model, recipe and calibration of the run, as JSON values.
    """

    @dataclass(frozen=True)
    class Shard:
        """A finished block.

        Attributes:
            file: Its safetensors file.
            sha256: Digest of that file.
            entries: `ModuleEntry` of each sparse layer, as JSON.
            layers: `LayerReport` of each layer, as JSON.
        """

        file: str
        sha256: str
        entries: dict[str, Any]
        layers: list[dict[str, Any]]

    def __init__(self, identity: Mapping[str, Any]) -> None:
        self._identity = dict(identity)
        self._shards: list[RunState.Shard] = []
        self._resumed = 0

    @classmethod
    def resume(cls, writer: CheckpointWriter, identity: Mapping[str, Any]) -> Self:
        """Read the state of `writer.partial`; empty when that run finished no block.

        Raises:
            CheckpointError: The interrupted run was another one, or a shard of it is damaged.
        """
        state = cls(identity)
        path = writer.partial / STATE_NAME
        if not path.exists():
            return state
        stored = read_json(path)
        before, shards = stored.get("identity"), stored.get("shards")
        if not isinstance(before, dict) or not isinstance(shards, list):
            raise _damaged(path)
        for key, value in identity.items():
            if before.get(key) != value:
                raise CheckpointError(
                    f"the interrupted run has {key} = {before.get(key)!r}",
                    need=f"the same command; this one has {value!r}",
                    hint="--overwrite to start again",
                )
        state._shards = [_parse_shard(path, shard) for shard in shards]
        for shard in state._shards:
            writer.keep_shard(shard.file, shard.sha256)
        state._resumed = len(state._shards)
        return state

    @property
    def shards(self) -> list[RunState.Shard]:
        """The finished blocks, in order."""
        return list(self._shards)

    def is_done(self, index: int) -> bool:
        """Whether block `index` is finished."""
        return index < len(self._shards)

    def was_resumed(self, index: int) -> bool:
        """Whether block `index` was finished by the interrupted run."""
        return index < self._resumed

    def shard(self, index: int) -> RunState.Shard:
        """The finished block `index`."""
        return self._shards[index]

    def add(
        self,
        written: tuple[str, dict[str, Any]],
        reports: Iterable[LayerReport],
        writer: CheckpointWriter,
    ) -> None:
        """Record the next block, whose shard is on disk."""
        file, entries = written
        layers = [asdict(report) for report in reports]
        self._shards.append(self.Shard(file, writer.digest(file), entries, layers))
        shards = [asdict(shard) for shard in self._shards]
        writer.write_json(STATE_NAME, {"identity": self._identity, "shards": shards})


def _parse_shard(path: Path, value: object) -> RunState.Shard:
    """Read one finished block.

    Raises:
        CheckpointError: It is none.
    """
    if not isinstance(value, dict):
        raise _damaged(path)
    file, digest = value.get("file"), value.get("sha256")
    entries, layers = value.get("entries"), value.get("layers")
    # A shard name is data from a file: it must not lead out of the folder.
    if not isinstance(file, str) or Path(file).name != file or not isinstance(digest, str):
        raise _damaged(path)
    if not isinstance(entries, dict) or not isinstance(layers, list):
        raise _damaged(path)
    known = {field.name for field in fields(LayerReport)}
    for layer in layers:
        if (
            not isinstance(layer, dict)
            or layer.keys() != known
            or str(layer["name"]) not in entries
        ):
            raise _damaged(path)
    return RunState.Shard(file, digest, entries, layers)


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged",
        need="what an interrupted `hopsparse sparsify` left",
        hint="--overwrite to start again",
    )

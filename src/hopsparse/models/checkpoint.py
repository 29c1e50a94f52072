"""The checkpoint folder: config.json, safetensors shards, tokenizer files (docs/formats.md).

Reading is lazy: a shard is opened when one of its tensors is asked for, and a matrix is read
without the rest. `_writer.py` writes, `_entries.py` holds what config.json says.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from torch import Tensor

from ..errors import CheckpointError
from ..files import open_tensors, unbroken, unreadable
from ..formats import FORMAT_VERSION as FORMAT_VERSION
from ..formats import SparseMatrix
from ._entries import QUANT_METHOD as QUANT_METHOD
from ._entries import ModuleEntry as ModuleEntry
from ._entries import SparseConfig as SparseConfig
from ._entries import quantization_of
from ._files import INDEX_NAME as INDEX_NAME
from ._files import partial_of as partial_of
from ._files import read_json
from ._writer import CheckpointWriter as CheckpointWriter
from ._writer import StagedWriter as StagedWriter

SINGLE_NAME = "model.safetensors"


class CheckpointReader:
    """Reads tensors and matrices of a checkpoint folder one at a time.

    Works on dense HF folders too; `sparse` is None there. Use as a context manager, or let it go:
    shards are memory-mapped and closed with it.

    Args:
        folder: A folder with config.json and safetensors shards.

    Raises:
        CheckpointError: The folder, its config or a shard is missing or damaged.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is no folder",
                need="a checkpoint folder with config.json",
                hint="check the path; `hopsparse sparsify MODEL -o OUT` makes one",
            )
        self.config = read_json(self.folder / "config.json")
        quantization = quantization_of(self.config)
        is_ours = quantization.get("quant_method") == QUANT_METHOD
        self.sparse = SparseConfig.from_json(quantization) if is_ours else None
        #: SHA-256 of each shard as it was written, where the index says so.
        self.digests: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        self._shard_of = self._index()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all shards."""
        self._open.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """Names of all stored tensors, sorted."""
        return sorted(self._shard_of)

    def shards(self) -> list[str]:
        """File names of the shards, sorted."""
        return sorted(set(self._shard_of.values()))

    def names_in(self, shard: str) -> list[str]:
        """Names of the tensors of one shard, sorted."""
        return [name for name in self.names() if self._shard_of[name] == shard]

    def load(self, name: str) -> Tensor:
        """Read one tensor."""
        if name not in self._shard_of:
            raise CheckpointError(
                f"{self.folder} holds no tensor {name!r}",
                need="every tensor that config.json speaks of",
                hint="download or write the checkpoint again",
            )
        shard = self._shard_of[name]
        try:
            with unbroken():
                tensor: Tensor = self._shard(shard).get_tensor(name)
        except SafetensorError as error:
            raise unreadable(self.folder / shard, error) from error
        return tensor

    def matrix(self, module: str) -> SparseMatrix:
        """Read the sparse weight of `module`; contents are not validated."""
        if self.sparse is None or module not in self.sparse.modules:
            raise CheckpointError(
                f"{self.folder} holds no sparse weight for {module!r}",
                need="a module named in quantization_config",
                hint="`hopsparse inspect` lists them",
            )
        return self.sparse.modules[module].matrix(module, self.load)

    def _index(self) -> dict[str, str]:
        if (self.folder / INDEX_NAME).exists():
            stored = read_json(self.folder / INDEX_NAME)
            index = stored.get("weight_map")
            if not isinstance(index, dict) or not all(isinstance(s, str) for s in index.values()):
                raise CheckpointError(
                    f"{self.folder / INDEX_NAME} has no sound weight_map",
                    need="a map from tensor names to shard names",
                    hint="restore the index file",
                )
            for shard in sorted(set(index.values())):
                self._require(shard)
            metadata = stored.get("metadata")
            digests = metadata.get("sha256") if isinstance(metadata, dict) else None
            self.digests = digests if isinstance(digests, dict) else {}
            return index
        self._require(SINGLE_NAME)
        return dict.fromkeys(self._shard(SINGLE_NAME).keys(), SINGLE_NAME)

    def _require(self, shard: str) -> None:
        # A shard name is data from a file: it must not lead out of the folder.
        try:
            there = Path(shard).name == shard and (self.folder / shard).is_file()
        except (OSError, ValueError):  # Too long, or with characters that no file name has.
            there = False
        if not there:
            raise CheckpointError(
                f"shard {shard!r} of {self.folder} is missing",
                need="every shard that the index names, in safetensors",
                hint="download it again; pickled .bin files are never loaded",
            )

    def _shard(self, shard: str) -> Any:
        if shard not in self._open:
            self._open[shard] = self._stack.enter_context(open_tensors(self.folder / shard))
        return self._open[shard]

"""The checkpoint folder: config.json, safetensors shards, tokenizer files (docs/formats.md).

Reading is lazy: a shard is opened when one of its tensors is asked for, and a matrix is read
without the rest. Writing happens in `OUT.partial`, which becomes OUT when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError
from ..formats import FORMATS, Attribute, SparseMatrix
from ._files import exclusive, flush_folder, read_json, write_json, write_tensors

FORMAT_VERSION = 1
QUANT_METHOD = "hopsparse"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class ModuleEntry:
    """How the weight of one module is stored.

    Attributes:
        format: A key of `hopsparse.formats.FORMATS`.
        shape: Logical [out_features, k].
        dtype: Name of the values' torch dtype, such as "bfloat16".
        attributes: Facts the format needs besides shape and dtype.
    """

    format: str
    shape: tuple[int, int]
    dtype: str
    attributes: dict[str, Attribute]

    @classmethod
    def of(cls, matrix: SparseMatrix) -> Self:
        """Describe `matrix`."""
        dtype = str(matrix.dtype).removeprefix("torch.")
        return cls(matrix.name, matrix.shape, dtype, matrix.attributes())

    @classmethod
    def from_json(cls, module: str, value: Mapping[str, Any]) -> Self:
        """Read one entry of `quantization_config["modules"]`."""
        try:
            rows, cols = (_positive(side) for side in value["shape"])
            entry = cls(value["format"], (rows, cols), value["dtype"], dict(value["attributes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the entry of {module} in config.json is malformed ({error!r})",
                need="format, shape, dtype and attributes",
                hint="restore config.json from the original checkpoint",
            ) from error
        if entry.format not in FORMATS or not isinstance(entry.torch_dtype, torch.dtype):
            raise CheckpointError(
                f"{module} is stored as {entry.format!r} of {entry.dtype!r}",
                need=f"a format among {', '.join(FORMATS)} and a torch dtype",
                hint="upgrade hopsparse, or convert the checkpoint with the version that wrote it",
            )
        return entry

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return getattr(torch, self.dtype, None)  # type: ignore[return-value]

    def matrix(self, module: str, load: Callable[[str], Tensor]) -> SparseMatrix:
        """Build the weight of `module` from its stored parts; contents are not validated."""
        kind = FORMATS[self.format]
        parts = {part: load(f"{module}.{part}") for part in kind.PARTS}
        return kind.from_parts(self.shape, parts, self.attributes)


@dataclass(frozen=True)
class SparseConfig:
    """The `quantization_config` of a checkpoint.

    Attributes:
        pattern: What was asked for, such as "2:4".
        method: How the weights were pruned, or "imported".
        modules: Stored form of each sparse weight by module name.
        kept_dense: Why each other projection stayed dense, by module name.
    """

    pattern: str
    method: str
    modules: dict[str, ModuleEntry]
    kept_dense: dict[str, str]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read a `quantization_config`.

        Raises:
            CheckpointError: It was written by a newer version, or is malformed.
        """
        version = value.get("format_version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"checkpoint of format version {version}",
                need=f"version {FORMAT_VERSION} or older",
                hint="pip install --upgrade hopsparse",
            )
        modules = {
            name: ModuleEntry.from_json(name, entry)
            for name, entry in value.get("modules", {}).items()
        }
        kept = dict(value.get("kept_dense", {}))
        return cls(str(value.get("pattern")), str(value.get("method")), modules, kept)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, as stored under `quantization_config`."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            "pattern": self.pattern,
            "method": self.method,
            "modules": {name: asdict(entry) for name, entry in self.modules.items()},
            "kept_dense": self.kept_dense,
        }


def _positive(side: object) -> int:
    if not isinstance(side, int) or side < 1:
        raise ValueError(f"side {side!r}")
    return side


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
        quantization = self.config.get("quantization_config") or {}
        is_ours = quantization.get("quant_method") == QUANT_METHOD
        self.sparse = SparseConfig.from_json(quantization) if is_ours else None
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
            tensor: Tensor = self._shard(shard).get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(shard, error) from error
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
            index = read_json(self.folder / INDEX_NAME).get("weight_map")
            if not isinstance(index, dict):
                raise CheckpointError(
                    f"{self.folder / INDEX_NAME} has no weight_map",
                    need="a map from tensor to shard",
                    hint="restore the index file",
                )
            for shard in sorted(set(index.values())):
                self._require(shard)
            return index
        self._require(SINGLE_NAME)
        return dict.fromkeys(self._shard(SINGLE_NAME).keys(), SINGLE_NAME)

    def _require(self, shard: str) -> None:
        # A shard name is data from a file: it must not lead out of the folder.
        if Path(shard).name != shard or not (self.folder / shard).is_file():
            raise CheckpointError(
                f"shard {shard!r} of {self.folder} is missing",
                need="every shard that the index names, in safetensors",
                hint="download it again; pickled .bin files are never loaded",
            )

    def _shard(self, shard: str) -> Any:
        if shard not in self._open:
            self._open[shard] = self._stack.enter_context(self._opened(shard))
        return self._open[shard]

    def _opened(self, shard: str) -> Any:
        try:
            return safe_open(self.folder / shard, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._damaged(shard, error) from error

    def _damaged(self, shard: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / shard} cannot be read ({error})",
            need="a complete safetensors file",
            hint="download or write that shard again",
        )


class CheckpointWriter:
    """Writes a checkpoint folder that appears complete or not at all.

    Everything goes to `OUT.partial` until `commit` renames it. Leaving the context without a
    commit keeps `OUT.partial`, so that a run can be resumed.

    Args:
        out: The folder to make.
        overwrite: Replace an existing hopsparse checkpoint, and discard an interrupted run.
        resume: Continue in an existing `OUT.partial`.

    Raises:
        CheckpointError: `out` exists, is something else, or another process writes it.
    """

    def __init__(self, out: Path | str, *, overwrite: bool = False, resume: bool = False) -> None:
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        self._resume = resume
        self._check_out(overwrite)
        if self.partial.exists() and not (resume or overwrite):
            raise CheckpointError(
                f"{self.partial} holds an interrupted run",
                need="a decision",
                hint="--resume to continue it, or --overwrite to start again",
            )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.partial.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(exclusive(self.partial))
        if not self._resume:
            self._clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def write_shard(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write one complete safetensors file."""
        write_tensors(self.partial / name, tensors)

    def write_json(self, name: str, value: object) -> None:
        """Write one complete JSON file."""
        write_json(self.partial / name, value)

    def copy(self, path: Path) -> None:
        """Copy a file of the source model, such as its tokenizer."""
        shutil.copyfile(path, self.partial / path.name)

    def remove(self, name: str) -> None:
        """Delete a file of the unfinished folder."""
        (self.partial / name).unlink()

    def commit(self, config: Mapping[str, Any]) -> None:
        """Write config.json and the index of all shards, then give the folder its name."""
        weight_map, total = {}, 0
        for path in self._shard_paths():
            with safe_open(path, framework="pt") as file:
                weight_map.update(dict.fromkeys(file.keys(), path.name))
            total += path.stat().st_size
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        self.write_json(INDEX_NAME, index)
        self.write_json("config.json", config)
        (self.partial / ".lock").unlink()
        replaced = self.out.with_name(self.out.name + ".replaced")
        if self.out.exists():
            self.out.rename(replaced)
        self.partial.rename(self.out)
        flush_folder(self.out.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _shard_paths(self) -> Iterator[Path]:
        yield from sorted(self.partial.glob("*.safetensors"))

    def _clear(self) -> None:
        for path in self.partial.iterdir():
            if path.name != ".lock":
                path.unlink()

    def _check_out(self, overwrite: bool) -> None:
        if not self.out.exists():
            return
        if self.out.is_dir() and not any(self.out.iterdir()):
            return
        if not overwrite:
            raise CheckpointError(
                f"{self.out} exists", need="a new folder", hint="another -o, or --overwrite"
            )
        # Overwriting deletes a folder: only ever one that this package wrote.
        with_config = self.out.is_dir() and (self.out / "config.json").is_file()
        config = read_json(self.out / "config.json") if with_config else {}
        if (config.get("quantization_config") or {}).get("quant_method") != QUANT_METHOD:
            raise CheckpointError(
                f"{self.out} exists and is no hopsparse checkpoint",
                need="a new folder, or one that hopsparse wrote",
                hint="another -o",
            )

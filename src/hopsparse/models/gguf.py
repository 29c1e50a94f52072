"""Dense weights out of a GGUF file, one tensor at a time."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, UnsupportedError
from ._family import Family
from .rules import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Where fields end is not worth parsing: they start the file, and a tokenizer is about as long.
_FIELDS_BYTES = 1 << 20


class GGUFSource:
    """A GGUF file of the Llama or Qwen family, dequantised.

    All weights get one dtype: float16 or float32 where the file holds its matrices in those,
    bfloat16 where they are bfloat16 or quantised.

    Args:
        path: The .gguf file.
        name: What reports call the model.

    Raises:
        CheckpointError: The file is damaged.
        UnsupportedError: Its architecture or a tensor type cannot be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        from gguf import GGUFReader

        self.name = name
        self._path = path
        try:
            self._reader = GGUFReader(path)
            field = self._reader.fields["general.architecture"]
            self._architecture = bytes(field.parts[field.data[0]]).decode()
        except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as GGUF ({error})",
                need="a complete GGUF file, version 2 or 3",
                hint="download it again",
            ) from error
        self._family = _family_of(self._architecture, path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_types()
        self._check_rotary()

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype in which weights are read."""
        kinds = {
            tensor.tensor_type.name for tensor in self._reader.tensors if tensor.shape.size > 1
        }
        if kinds == {"F32"}:
            return torch.float32
        return torch.float16 if kinds <= {"F16", "F32"} else torch.bfloat16

    @cached_property
    def config(self) -> PretrainedConfig:
        """The HF configuration that transformers derives from the file's fields."""
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.from_pretrained(
            self._path.parent, gguf_file=self._path.name
        )
        config.tie_word_embeddings = "output.weight" not in self._tensors
        config.dtype = self.dtype
        return config

    def config_json(self) -> dict[str, Any]:
        """What differs from the defaults of the architecture."""
        facts: dict[str, Any] = self.config.to_diff_dict()
        facts.pop("_name_or_path", None)
        return facts | {"architectures": [self._model_class]}

    @cached_property
    def _model_class(self) -> str:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)].__name__)

    def names(self) -> list[str]:
        """HF names of all tensors; one that the architecture does not know has its own name."""
        unknown = self._tensors.keys() - set(self._hf_names.values())
        return sorted([*self._hf_names, *unknown])

    def load(self, name: str) -> Tensor:
        """Dequantise one tensor to `dtype`."""
        from gguf.quants import dequantize

        stored = self._hf_names.get(name)
        if stored is None:
            raise CheckpointError(
                f"{self._path} holds no tensor for {name!r}",
                need=f"every weight of a {self._family.name} model",
                hint="check that the file is a whole model and no adapter",
            )
        tensor = self._tensors[stored]
        # A copy: unquantised tensors are views of the read-only file mapping.
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        if self._family.gguf_interleaves_rotary:
            if name.endswith(("q_proj.weight", "q_proj.bias")):
                weight = _halve_rotary(weight, self.config.num_attention_heads)
            elif name.endswith(("k_proj.weight", "k_proj.bias")):
                weight = _halve_rotary(weight, self.config.num_key_value_heads)
        return weight.to(self.dtype)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer stored in the file.

        Raises:
            CheckpointError: It stores none, one without merges and scores, or one of another kind.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self._path.parent, gguf_file=self._path.name
            )
        except (KeyError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{self._path} stores no tokenizer that transformers can read ({error!r})",
                need="tokenizer.ggml.tokens, and .merges or .scores",
                hint="convert the model again with its tokenizer, or take its HF folder",
            ) from error
        return tokenizer

    def save_extras(self, folder: Path) -> None:
        """Write the tokenizer in HF form."""
        self.tokenizer().save_pretrained(folder)

    def identity(self) -> dict[str, Any]:
        """Path, size and time of the file, and a digest of its fields."""
        status = self._path.stat()
        with self._path.open("rb") as file:
            fields = hashlib.sha256(file.read(_FIELDS_BYTES)).hexdigest()
        return {
            "file": str(self._path.resolve()),
            "bytes": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "fields_sha256": fields,
        }

    @cached_property
    def _hf_names(self) -> dict[str, str]:
        """HF tensor name -> GGUF tensor name."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
        from transformers import AutoModelForCausalLM

        arch = next(key for key, text in MODEL_ARCH_NAMES.items() if text == self._architecture)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        table = get_tensor_name_map(arch, self.config.num_hidden_layers)
        names = {}
        for name in model.state_dict():
            base, _, suffix = name.rpartition(".")
            stored = f"{table.get_name(base)}.{suffix}"
            if stored in self._tensors:
                names[name] = stored
        return names

    def _check_rotary(self) -> None:
        """Refuse scaled rotary frequencies: transformers does not read them from GGUF files."""
        if "rope_freqs.weight" in self._tensors:
            raise UnsupportedError(
                f"{self._path} scales its rotary frequencies (rope_freqs.weight)",
                need="a model whose rotary embedding follows from its fields",
                hint="the HF folder of the same model",
            )

    def _check_types(self) -> None:
        """Dequantise one row of each type now, so that a bad type fails before any work."""
        from gguf.quants import dequantize

        one_of_each = {tensor.tensor_type: tensor for tensor in self._tensors.values()}
        for kind, tensor in one_of_each.items():
            try:
                dequantize(tensor.data[:1], kind)
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"tensor {tensor.name} of {self._path} has type {kind.name}",
                    need="a type that the gguf package can dequantise (F16, Q4_1, Q8_0, ...)",
                    hint="convert the model to F16, BF16 or Q8_0",
                ) from error


def _family_of(architecture: str, path: Path) -> Family:
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    known = sorted(name for family in FAMILIES for name in family.gguf_architectures)
    raise UnsupportedError(
        f"{path} holds a model of architecture {architecture!r}",
        need=f"one of {', '.join(known)}",
        hint="convert it to an HF folder and load that",
    )


def _halve_rotary(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from (re, im, re, im, ...) to (re, re, ..., im, im, ...)."""
    rows = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)

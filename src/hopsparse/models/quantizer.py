"""The HF quantizer of our checkpoints: `from_pretrained` builds and fills SparseLinear layers.

Importing this module enters both classes in transformers' own registry; `register` does that as
soon as transformers is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import __version__ as transformers_version
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..errors import CheckpointError, UnsupportedError
from ..formats import Quantized
from ..nn import SparseLinear
from ..ops import COMPUTE_DTYPES
from ._layers import StoredSpecs, check_contents, check_stored, make_sparse, stored_specs
from .checkpoint import QUANT_METHOD, SparseConfig
from .low_rank import warn_of_products
from .rules import replace_module
from .save import sparse_modules


@register_quantization_config(QUANT_METHOD)
class HopsparseConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a checkpoint, as transformers passes it around."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method = QUANT_METHOD
        self.sparse = SparseConfig.from_json(fields)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form that config.json stores."""
        return self.sparse.to_json()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


@register_quantizer(QUANT_METHOD)
class HopsparseQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads and saves models whose linear layers are sparse.

    Weights are loaded in the dtype in which they are stored, a part at a time, and cast a layer
    at a time afterwards: memory stays near the packed size plus one layer.
    """

    requires_calibration = True
    quantization_config: HopsparseConfig

    def __init__(self, quantization_config: HopsparseConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._dtype: torch.dtype | None = None
        self._names: list[str] = []
        self._expected: dict[str, torch.Size] = {}
        self._strict: set[str] = set()

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Remember what the caller asked for: layers are cast to it once they are filled."""
        self._dtype = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        sparse = self.quantization_config.sparse
        if not checkpoint_files:
            # transformers 4 does not say which files it reads, so they could not be checked.
            raise UnsupportedError(
                f"transformers {transformers_version}",
                need="transformers 5, and a checkpoint on disk",
                hint='pip install --upgrade "hopsparse[models]"',
            )
        files = [Path(file) for file in checkpoint_files]
        if any(file.suffix != ".safetensors" for file in files):
            raise UnsupportedError(
                "a sparse checkpoint that is not in safetensors files",
                need="the folder that hopsparse wrote",
                hint="AutoModelForCausalLM.from_pretrained(OUT)",
            )
        warn_of_products(files[0].parent)
        stored = stored_specs(files)
        check_stored(sparse, stored)
        self._names = make_sparse(model, sparse.modules)
        self._expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._check_shapes(type(model).__name__, stored)
        self._strict = self._not_stored(model, set(stored))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.device.type == "meta":
                continue  # Offloaded to disk.
            if name in self._strict and not getattr(tensor, "_is_hf_initialized", False):
                raise CheckpointError(
                    f"the shards hold no tensor {name}",
                    need=f"every weight of {type(model).__name__}",
                    hint="download or write the checkpoint again",
                )
        for name in self._names:
            layer = model.get_submodule(name)
            if not any(tensor.is_meta for tensor in layer.state_dict().values()):
                check_contents(name, layer.matrix)
            if self._dtype in COMPUTE_DTYPES and layer.values_dtype != self._dtype:
                layer.to(self._dtype)
        return model

    def get_state_dict_and_metadata(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[None, dict[str, str]]:
        """Called by `save_pretrained`: brings config.json up to date with casts since loading."""
        sparse = self.quantization_config.sparse
        current = replace(sparse, modules=sparse_modules(model))
        updated = HopsparseConfig(**current.to_json())
        model.config.quantization_config = updated
        self.quantization_config = updated
        return None, {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """`save_pretrained` writes the packed form."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Gradients pass through to inputs, biases and adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """The layers are one graph."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, module in list(model.named_modules()):
            if isinstance(module, SparseLinear):
                replace_module(model, name, lambda old: _dense(old, dtype))
        return model

    def _check_shapes(self, model_class: str, stored: StoredSpecs) -> None:
        """Some versions of transformers leave shapes to the quantizer, others report them late."""
        for name, wanted in self._expected.items():
            shape = stored[name][0] if name in stored else tuple(wanted)
            if shape != tuple(wanted):
                raise CheckpointError(
                    f"{name} is stored as {list(shape)}",
                    need=f"{list(wanted)} for {model_class}",
                    hint="download or write the checkpoint again",
                )

    def _not_stored(self, model: Any, stored: set[str]) -> set[str]:
        """Weights of `model` that must come from the shards and are not there by name.

        transformers may still find them under a name it converts. What another architecture
        than the stored one adds, such as a new head, is initialised by transformers, which says so.
        """
        written_by = model.config.architectures or []
        ignored = getattr(model, "all_tied_weights_keys", {}) or {}
        missing = {name for name in self._expected if name not in stored and name not in ignored}
        if type(model).__name__ in written_by:
            return missing
        prefix = getattr(model, "base_model_prefix", "")
        of_layers = tuple(f"{name}." for name in self._names)
        return {
            name
            for name in missing
            if name.startswith(of_layers) and f"{prefix}.{name}" not in stored
        }


def attach(model: Any, sparse: SparseConfig) -> None:
    """Give a model whose layers became sparse in memory what a loaded one has."""
    config = HopsparseConfig(**sparse.to_json())
    # A copy: other models may have been made from the same configuration, and stay dense.
    model.config = deepcopy(model.config)
    model.config.quantization_config = config
    model.hf_quantizer = HopsparseQuantizer(config)
    model.quantization_method = QUANT_METHOD
    model.is_quantized = True


def _dense(layer: nn.Module, dtype: torch.dtype | None) -> nn.Linear:
    assert isinstance(layer, SparseLinear)
    matrix = layer.matrix
    if isinstance(matrix, Quantized):
        weight = matrix.to_dense(dtype)
    else:
        weight = matrix.to_dense().to(dtype)
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.detach().to(weight.dtype))
    return linear

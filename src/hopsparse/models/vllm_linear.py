"""The quantisation "hopsparse" of vLLM: its linear layers multiply by stored sparse matrices.

vLLM makes one layer of q, k and v, and one of gate and up, and hands over the tensors of a
checkpoint by name and shard. They are kept as they come; once all are there, they become
`SparseLinear`s, of which those that go together are one. Importing this module needs vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ..errors import CheckpointError, UnsupportedError
from ..formats import NM, Scheme, SparseMatrix
from ..nn import SparseLinear
from ._entries import QUANT_METHOD, SparseConfig
from ._layers import check_contents
from .joined import join, why_apart
from .sparse24 import PARTS, read_packed
from .sparse24_codes import BESIDE, check_codes, pack_codes, scheme_of, with_scales

_SHARDS = {"q": 0, "k": 1, "v": 2}
_BITMASK = "sparse-24-bitmask"


@register_quantization_config(QUANT_METHOD)
class HopsparseVllmConfig(QuantizationConfig):  # type: ignore[misc]
    """The `quantization_config` of a checkpoint, as vLLM passes it around.

    Args:
        sparse: Of a checkpoint of hopsparse: what each module stores; else None.
        section: The JSON form.
    """

    def __init__(self, sparse: SparseConfig | None, section: Mapping[str, Any]) -> None:
        super().__init__()
        self.sparse, self.section = sparse, section
        self.scheme = None if sparse else scheme_of(section, "the checkpoint")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Read what config.json holds.

        Raises:
            CheckpointError: It is malformed, or of another tool and no `sparse-24-bitmask`.
            UnsupportedError: It quantises in a way that no scheme here describes.
        """
        if config.get("quant_method") == QUANT_METHOD:
            return cls(SparseConfig.from_json(config), config)
        if not _is_bitmask(config):
            raise CheckpointError(
                f"a checkpoint of {config.get('quant_method')!r}",
                need=f"one of hopsparse, or of compressed-tensors as {_BITMASK}",
                hint="`hopsparse sparsify` makes one; leave quantization=... out for others",
            )
        return cls(None, config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take over `sparse-24-bitmask` where the user asks for "hopsparse"."""
        asked = user_quant == QUANT_METHOD and _is_bitmask(hf_quant_cfg or {})
        return QUANT_METHOD if asked else None

    def get_name(self) -> str:
        """As users write it."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What inputs may be."""
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper."""
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: all is in config.json."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """How a layer multiplies: by sparse matrices where the checkpoint has one for it.

        Args:
            layer: Of vLLM.
            prefix: Its name there; `packed_modules_mapping` says which layers of the checkpoint
                are in it.
        """
        if not isinstance(layer, LinearBase):
            return None
        home, _, last = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(last, [last])
        names = [f"{home}.{part}".strip(".") for part in parts]
        if self.sparse is not None and not any(name in self.sparse.modules for name in names):
            return UnquantizedLinearMethod()
        return HopsparseLinearMethod(self, names)


@dataclass
class _Arrived:
    """Tensors of one layer of a checkpoint; read like a checkpoint of it alone.

    Attributes:
        module: Its name.
        config: What config.json says of dtypes.
        tensors: By part.
    """

    module: str
    config: dict[str, Any]
    folder: str = "the checkpoint"
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Full names."""
        return [f"{self.module}.{part}" for part in self.tensors]

    def load(self, name: str) -> Tensor:
        """One tensor, by its full name."""
        part = name.rpartition(".")[2]
        if part not in self.tensors:
            raise CheckpointError(
                f"the checkpoint holds no tensor {name!r}",
                need="every part of a stored matrix",
                hint="download or write the checkpoint again",
            )
        return self.tensors[part]


class HopsparseLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """What vLLM asks of a kind of linear layer.

    Args:
        config: Of the model.
        names: Layers of the checkpoint that this one stands for, in order.
    """

    def __init__(self, config: HopsparseVllmConfig, names: list[str]) -> None:
        self.config, self.names = config, names

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give a layer empty parameters under the names that the checkpoint has.

        Raises:
            UnsupportedError: The layer is cut over several GPUs.
        """
        whole = (
            input_size_per_partition == input_size and sum(output_partition_sizes) == output_size
        )
        if not whole or len(output_partition_sizes) != len(self.names):
            raise UnsupportedError(
                f"{self.names[0]} with {sum(output_partition_sizes)} of {output_size} rows and "
                f"{input_size_per_partition} of {input_size} columns",
                need="whole layers: packed weights are not cut over GPUs",
                hint="tensor_parallel_size=1",
            )
        arrived = [_Arrived(name, {"dtype": str(params_dtype)}) for name in self.names]
        # Beside the modules and parameters, where vLLM looks for what it loads.
        layer.__dict__["_hopsparse"] = arrived, list(output_partition_sizes), params_dtype
        for part in self._parts():
            # As vLLM's own layers: whoever reads the checkpoint calls what hangs on the parameter.
            empty = nn.Parameter(torch.empty(0), requires_grad=False)
            empty.weight_loader = _loader(arrived, part)  # type: ignore[attr-defined]
            layer.register_parameter(part, empty)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Make matrices of what arrived.

        Raises:
            CheckpointError: Parts are missing or damaged.
        """
        arrived, rows, dtype = layer.__dict__["_hopsparse"]
        pieces = [self._made(each).to(dtype) for each in arrived]
        for piece, wanted, name in zip(pieces, rows, self.names, strict=True):
            if piece.out_features != wanted:
                raise CheckpointError(
                    f"{name} is stored with {piece.out_features} rows",
                    need=f"{wanted} for this model",
                    hint="load it into the architecture that config.json names",
                )
        if len(pieces) > 1 and why_apart(pieces) is None:
            pieces = [join(cast(list[SparseLinear], pieces))]
        layer.hopsparse_layers = nn.ModuleList(pieces).eval().requires_grad_(False)
        for part in self._parts():
            delattr(layer, part)
        for each in arrived:
            each.tensors.clear()

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: [..., in] to [..., rows of all]."""
        made = [each(x) for each in cast(nn.ModuleList, layer.hopsparse_layers)]
        y: Tensor = made[0] if len(made) == 1 else torch.cat(made, -1)
        return y if bias is None else y + bias

    def _parts(self) -> list[str]:
        """Names that tensors of these layers may have in the checkpoint."""
        sparse = self.config.sparse
        if sparse is None:
            return ["weight", *PARTS, *BESIDE]
        known = {name: sparse.modules.get(name) for name in self.names}
        parts = {part for entry in known.values() if entry for part in entry.parts}
        return sorted(parts | ({"weight"} if None in known.values() else set()))

    def _made(self, arrived: _Arrived) -> Any:
        matrix = self._matrix(arrived)
        if matrix is None:
            weight = arrived.load(f"{arrived.module}.weight")
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            return linear
        check_contents(arrived.module, matrix)
        return SparseLinear(matrix)

    def _matrix(self, arrived: _Arrived) -> SparseMatrix | None:
        """The stored matrix; None of a layer that is dense."""
        name, sparse, scheme = arrived.module, self.config.sparse, self.config.scheme
        if sparse is not None:
            entry = sparse.modules.get(name)
            return None if entry is None else entry.matrix(name, arrived.load)
        coded = scheme if "weight_scale" in arrived.tensors else None
        codes = _codes(arrived, coded)
        if codes is None or coded is None:
            return codes
        return with_scales(cast(Any, arrived), name, codes, coded)


def _codes(arrived: _Arrived, scheme: Scheme | None) -> SparseMatrix | None:
    """Values or codes of `sparse-24-bitmask`; codes that lie there dense too."""
    if "compressed" in arrived.tensors:
        # Unpacked where it arrived, so that the GPU does it for a model that goes there.
        return NM.from_dense(read_packed(cast(Any, arrived), arrived.module, scheme).to_dense())
    if scheme is None:
        return None
    weight = arrived.load(f"{arrived.module}.weight")
    check_codes(arrived.module, weight.dtype, scheme)
    return pack_codes(weight)


def _loader(arrived: list[_Arrived], part: str) -> Any:
    """What vLLM calls with a tensor of the checkpoint."""

    def load(param: nn.Parameter, loaded: Tensor, shard: str | int | None = None) -> None:
        if shard is None and len(arrived) > 1:
            raise UnsupportedError(
                f"{part} of {', '.join(each.module for each in arrived)} in one tensor",
                need="a tensor for each of these layers",
                hint="a checkpoint whose q, k and v, and gate and up, are apart",
            )
        place = 0 if shard is None else _SHARDS.get(cast(str, shard), shard)
        # A copy: what vLLM hands over may be the memory of a file.
        arrived[cast(int, place)].tensors[part] = loaded.detach().to(param.device, copy=True)

    return load


def _is_bitmask(config: Mapping[str, Any]) -> bool:
    sparsity = config.get("sparsity_config")
    return isinstance(sparsity, Mapping) and sparsity.get("format") == _BITMASK

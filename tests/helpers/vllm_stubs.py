"""The parts of vLLM that a quantisation out of its tree meets, as far as loading weights goes.

Written after vLLM's base_config.py, linear.py and the load_weights of its Llama; nothing of its
memory, graphs, schedulers or kernels is here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

STACKED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class LinearMethodBase:
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer: nn.Module, columns: int, rows: list[int], *_: Any, **extra: Any
    ) -> None:
        weight = nn.Parameter(torch.empty(sum(rows), columns), requires_grad=False)
        layer.register_parameter("weight", weight)
        starts = [sum(rows[:i]) for i in range(len(rows))]

        def load(param: nn.Parameter, loaded: Tensor, shard: str | int | None = None) -> None:
            at = {"q": 0, "k": 1, "v": 2, None: 0}.get(shard, shard)  # type: ignore[arg-type]
            param.data[starts[at] :][: len(loaded)] = loaded  # type: ignore[index]

        weight.weight_loader = load  # type: ignore[attr-defined]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return nn.functional.linear(x, layer.weight, bias)  # type: ignore[arg-type]


class LinearBase(nn.Module):
    """A layer of rows that belong to several layers of the checkpoint."""

    def __init__(
        self, columns: int, rows: list[int], bias: bool, config: Any, prefix: str, ranks: int = 1
    ) -> None:
        super().__init__()
        method = config.get_quant_method(self, prefix=prefix)
        assert method is not None, "All linear layers should support quant method."
        self.quant_method = method
        mine = [each // ranks for each in rows]
        method.create_weights(
            self, columns, mine, columns, sum(rows), torch.float32, weight_loader=None
        )
        self.bias = nn.Parameter(torch.zeros(sum(mine)), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.quant_method.apply(self, x, self.bias)
        return y


def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """As the Llama of vLLM does: names of merged layers, and a shard of each."""
    parameters, loaded = dict(model.named_parameters()), set()
    for name, tensor in weights:
        for part, (merged, shard) in STACKED.items():
            if f".{part}." not in name:
                continue
            target = name.replace(part, merged)
            if target.endswith(".bias"):
                break
            param: Any = parameters[target]
            param.weight_loader(param, tensor, shard)
            loaded.add(target)
            break
        else:
            if name in parameters:
                param = parameters[name]
                param.weight_loader(param, tensor)
                loaded.add(name)
    for module in model.modules():
        if isinstance(module, LinearBase):
            module.quant_method.process_weights_after_loading(module)
    return loaded


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Put the stubs where vLLM would be; returns what is registered, by name."""
    registered: dict[str, type] = {}

    def register(name: str) -> Callable[[type], type]:
        def enter(kind: type) -> type:
            assert issubclass(kind, QuantizationConfig)
            assert name not in registered
            registered[name] = kind
            return kind

        return enter

    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        layers: {},
        f"{layers}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{layers}.quantization": {"register_quantization_config": register},
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    }
    for name, facts in contents.items():
        module = ModuleType(name)
        module.__dict__.update(facts)
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    return registered


def forget() -> None:
    """Let the module that derives from these be imported anew."""
    sys.modules.pop("hopsparse.models.vllm_linear", None)
    vars(sys.modules["hopsparse.models"]).pop("vllm_linear", None)

"""The plug-in of vLLM against stubs of vLLM: it registers, and its layers load and multiply.

Nothing here shows that a vLLM of some version runs it: tests/helpers/vllm_stubs.py is all of it.
"""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import hopsparse
from hopsparse.errors import CheckpointError, UnsupportedError
from hopsparse.files import read_header
from hopsparse.models.load import load
from hopsparse.models.sparse24 import export_sparse24
from tests.helpers import vllm_stubs
from tests.helpers.tiny_models import tiny_llama

BLOCK = "model.layers.0"
ROWS = {"qkv_proj": [32, 16, 16], "o_proj": [32], "gate_up_proj": [64, 64], "down_proj": [32]}
HOMES = {"qkv_proj": "self_attn", "o_proj": "self_attn", "gate_up_proj": "mlp", "down_proj": "mlp"}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = vllm_stubs.install(monkeypatch)
    import_module("hopsparse.models.vllm_plugin").register()
    yield found
    vllm_stubs.forget()


def checkpoint(folder: Path, form: str, **words: Any) -> Path:
    model = tiny_llama()
    pattern, _, scheme = form.partition("+")
    recipe = hopsparse.Recipe(pattern, "magnitude", scheme=scheme or None, **words)
    hopsparse.sparsify(model, recipe)
    hopsparse.save(model, folder / "sparse")
    return folder / "sparse"


def section_of(folder: Path) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return dict(found["quantization_config"])


def block_of(kind: Any, folder: Path, *, ranks: int = 1) -> nn.Module:
    """The linear layers of the first block of a Llama of vLLM, filled."""
    config = kind.from_config(section_of(folder))
    config.packed_modules_mapping = vllm_stubs.PACKED
    model = nn.Module()
    for name, rows in ROWS.items():
        path, columns = f"{BLOCK}.{HOMES[name]}.{name}", 64 if name == "down_proj" else 32
        parent: nn.Module = model
        for step in path.split(".")[:-1]:
            if step not in parent._modules:
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        parent.add_module(name, vllm_stubs.LinearBase(columns, rows, False, config, path, ranks))
    tensors: dict[str, Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        assert read_header(shard).tensors
        tensors |= load_file(shard)
    names = [name for name in sorted(tensors) if name.startswith(f"{BLOCK}.") and "_proj" in name]
    vllm_stubs.load_weights(model, ((name, tensors[name]) for name in names))
    return model


def assert_same(model: nn.Module, wanted: Any) -> None:
    nn.Module.float(wanted)  # transformers refuses it for models of codes.
    for name, rows in ROWS.items():
        home = f"{BLOCK}.{HOMES[name]}"
        parts = vllm_stubs.PACKED.get(name, [name])
        x = torch.randn(3, 64 if name == "down_proj" else 32)
        with torch.no_grad():
            found = model.get_submodule(f"{home}.{name}")(x)
        right = torch.cat([wanted.get_submodule(f"{home}.{part}")(x) for part in parts], -1)
        assert found.shape == (3, sum(rows))
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("form", ["2:4", "2:4+int8", "2:4+fp8", "2:4+int4:64", "block:16x16:0.5"])
def test_checkpoints_of_ours(registered: dict[str, Any], tmp_path: Path, form: str) -> None:
    folder = checkpoint(tmp_path, form)
    model = block_of(registered["hopsparse"], folder)
    assert_same(model, load(folder))
    layers = model.get_submodule(f"{BLOCK}.self_attn.qkv_proj.hopsparse_layers")
    assert len(list(layers.children())) == (3 if "block" in form else 1)
    assert [name for name, _ in model.named_parameters() if name.endswith("values")] == []


def test_layers_that_stayed_dense(registered: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "2:4", keep=("*k_proj", "*down_proj"))
    model = block_of(registered["hopsparse"], folder)
    assert_same(model, load(folder))
    method = model.get_submodule(f"{BLOCK}.mlp.down_proj").quant_method
    assert isinstance(method, vllm_stubs.UnquantizedLinearMethod)


def test_stranded_checkpoints(registered: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "2:4", keep=("*up_proj",))
    export_sparse24(folder, tmp_path / "theirs")
    kind = registered["hopsparse"]
    section = section_of(tmp_path / "theirs")
    assert kind.override_quantization_method(section, "hopsparse") == "hopsparse"
    assert kind.override_quantization_method(section, None) is None
    assert kind.override_quantization_method({"quant_method": "awq"}, "hopsparse") is None
    assert_same(block_of(kind, tmp_path / "theirs"), load(folder))


@pytest.mark.parametrize(("kind", "how"), [("int", "token"), ("float", "none")])
def test_stranded_codes(registered: dict[str, Any], tmp_path: Path, kind: str, how: str) -> None:
    from tests.model.test_sparse24_codes import arguments, codes_of, packed

    section: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "sparsity_config": {"format": "sparse-24-bitmask"},
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": arguments(kind, "channel")}
        },
    }
    if how == "token":
        inputs = arguments(kind, "token", dynamic=True)
        section["config_groups"]["group_0"]["input_activations"] = inputs
    config = registered["hopsparse"].from_config(section)
    config.packed_modules_mapping = vllm_stubs.PACKED
    model = nn.Module()
    layer = vllm_stubs.LinearBase(64, [32, 16], False, config, "mlp.gate_up_proj")
    model.add_module("mlp", nn.ModuleDict({"gate_up_proj": layer}))
    dense, tensors = [], {}
    for name, rows in (("gate_proj", 32), ("up_proj", 16)):
        weight = torch.randn(rows, 64)
        weight.view(-1, 4)[:, 1:3] = 0
        codes, scale = codes_of(weight, kind, "channel")
        dense.append(codes.float() * scale)
        parts = packed(codes) | {"weight_scale": scale}
        tensors |= {f"mlp.{name}.{part}": value for part, value in parts.items()}
    vllm_stubs.load_weights(model, tensors.items())
    # Small whole numbers are codes already.
    x = torch.randint(-3, 4, (5, 64)).float()
    x[:, 0] = 127.0
    torch.testing.assert_close(layer(x), x @ torch.cat(dense).T)


def test_facts_that_vllm_asks_for(registered: dict[str, Any], tmp_path: Path) -> None:
    kind = registered["hopsparse"]
    config = kind.from_config(section_of(checkpoint(tmp_path, "2:4")))
    assert (config.get_name(), kind.get_min_capability()) == ("hopsparse", 90)
    assert config.get_supported_act_dtypes() == [torch.bfloat16, torch.float16]
    assert config.get_config_filenames() == []
    assert config.get_quant_method(nn.Embedding(2, 2), "model.embed_tokens") is None
    import_module("hopsparse.models.vllm_plugin").register()  # vLLM calls it in every process.


def test_bad_checkpoints_are_refused(registered: dict[str, Any], tmp_path: Path) -> None:
    kind, folder = registered["hopsparse"], checkpoint(tmp_path, "2:4")
    with pytest.raises(UnsupportedError, match="32 of 64 rows"):
        block_of(kind, folder, ranks=2)
    with pytest.raises(CheckpointError, match="a checkpoint of 'awq'"):
        kind.from_config({"quant_method": "awq"})
    config = kind.from_config(section_of(folder))
    config.packed_modules_mapping = vllm_stubs.PACKED
    layer = vllm_stubs.LinearBase(32, [32, 16, 16], False, config, f"{BLOCK}.self_attn.qkv_proj")
    with pytest.raises(UnsupportedError, match="in one tensor"):
        layer.values.weight_loader(layer.values, torch.ones(4))
    with pytest.raises(CheckpointError, match="holds no tensor"):
        layer.quant_method.process_weights_after_loading(layer)


def test_the_package_names_its_entry() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    entry = project["entry-points"]["vllm.general_plugins"]["hopsparse"]
    module, _, name = entry.partition(":")
    assert callable(getattr(import_module(module), name))

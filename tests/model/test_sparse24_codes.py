"""Folders of compressed-tensors that nobody reads any more, written here by other code, and loaded.

The writer is of numpy and knows nothing of hopsparse; logits are those of a dense model whose
weights are code * scale, and whose inputs are rounded by what stands here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hopsparse.errors import CheckpointError, UnsupportedError
from hopsparse.models.load import load
from hopsparse.models.sparse24 import import_sparse24
from hopsparse.models.sparse24_codes import scheme_of
from hopsparse.nn import SparseLinear

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
LARGEST = {"float": 448.0, "int": 127.0}
#: Weights that stay dense, as a recipe that skips them leaves them.
SKIPPED = "model.layers.1.mlp.down_proj"


def dense_llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        dtype=str(dtype).removeprefix("torch."),
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, module in model.named_modules():
        if name.endswith("_proj") and name != SKIPPED:
            groups = module.weight.view(-1, 4)
            groups[torch.rand_like(groups).argsort(-1) < 2] = 0
            groups[::5, :3] = 0
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype)
    return model


def packed(weight: Tensor) -> dict[str, Tensor]:
    """Two values of each group of four and a bit for each, as the format says."""
    rows, cols = weight.shape
    raw = weight.contiguous()
    values = raw.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[raw.element_size()]).numpy()
    live = (weight.float() != 0).numpy()
    kept = np.zeros((rows, cols // 2), values.dtype)
    bits = np.zeros((rows, -(-cols // 8)), np.uint8)
    for row in range(rows):
        for group in range(cols // 4):
            places = [c for c in range(4 * group, 4 * group + 4) if live[row, c]]
            places += [c for c in range(4 * group, 4 * group + 4) if c not in places]
            for at, column in enumerate(sorted(places[:2])):
                kept[row, 2 * group + at] = values[row, column]
                bits[row, column // 8] |= 1 << column % 8
    return {
        "compressed": torch.from_numpy(kept).view(weight.dtype),
        "bitmask": torch.from_numpy(bits),
        "shape": torch.tensor([[rows], [cols]]),
    }


def rounded(x: Tensor, kind: str, scale: Tensor | None = None) -> Tensor:
    """Codes times scale, one a row unless there is one for all."""
    most = LARGEST[kind]
    step = x.abs().amax(-1, keepdim=True) / most if scale is None else scale
    step = torch.where(step == 0, 1.0, step)
    if kind == "float":
        return (x / step).clamp(-most, most).to(torch.float8_e4m3fn).float() * step
    return (x / step).round().clamp(-most - (scale is not None), most) * step


def codes_of(weight: Tensor, kind: str, strategy: str) -> tuple[Tensor, Tensor]:
    peak = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax()
    scale = (peak / LARGEST[kind]).reshape(-1, *[1] * (strategy == "channel"))
    codes = weight / scale
    if kind == "float":
        return codes.to(torch.float8_e4m3fn), scale
    return codes.round().to(torch.int8), scale


def arguments(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}


def write(
    model: Any,
    folder: Path,
    group: dict[str, Any] | None,
    *,
    inputs: dict[str, Tensor] | None = None,
    shards: int = 1,
) -> Path:
    """The folder. Codes and scales of each layer are put into `model` as its dense weights."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor.clone()
            continue
        if group is not None:
            args = group["weights"]
            codes, scale = codes_of(tensor, args["type"], args["strategy"])
            tensor.copy_(codes.float() * scale)
            tensors[f"{module}.weight_scale"] = scale
            if inputs:
                tensors[f"{module}.input_scale"] = inputs[module]
        else:
            codes = tensor
        if module == SKIPPED:
            tensors[name] = codes.clone()
        else:
            tensors |= {f"{module}.{part}": value for part, value in packed(codes).items()}
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        mine = {name: tensors[name] for name in names[shard::shards]}
        path = folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(mine, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    section: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "version": "0.9.0",
        "sparsity_config": {
            "format": "sparse-24-bitmask",
            "targets": ["Linear"],
            "ignore": ["lm_head", SKIPPED],
            "sparsity_structure": "2:4",
        },
    }
    if group is not None:
        section |= {
            "config_groups": {"group_0": {"targets": ["Linear"], **group}},
            "format": f"{group['weights']['type']}-quantized",
            "ignore": ["lm_head"],
        }
    config["quantization_config"] = section
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_rounding(model: Any, kind: str, scales: dict[str, Tensor] | None = None) -> None:
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            scale = scales[name] if scales else None
            module.register_forward_pre_hook(
                lambda _, given, scale=scale: (rounded(given[0], kind, scale),)
            )


@pytest.mark.parametrize("shards", [1, 3])
def test_values_of_16_bits(tmp_path: Path, shards: int) -> None:
    model = dense_llama(torch.bfloat16)
    import_sparse24(write(model, tmp_path / "theirs", None, shards=shards), tmp_path / "ours")
    loaded = load(tmp_path / "ours")
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("how", ["none", "token", "static"])
def test_codes_and_scales(tmp_path: Path, kind: str, strategy: str, how: str) -> None:
    model = dense_llama()
    scales = None
    group: dict[str, Any] = {"weights": arguments(kind, strategy, dynamic=False)}
    if how == "token":
        group["input_activations"] = arguments(kind, "token", dynamic=True)
    elif how == "static":
        group["input_activations"] = arguments(kind, "tensor", dynamic=False)
        scales = {
            name: torch.tensor([0.01 + 0.001 * at])
            for at, (name, _) in enumerate(model.named_modules())
            if name.endswith("_proj")
        }
    theirs = write(
        model, tmp_path / "theirs", group, inputs=scales, shards=4 if how == "token" else 1
    )
    sparse = import_sparse24(theirs, tmp_path / "ours")
    assert len(sparse.modules) == 14
    stored = {name: entry for name, entry in sparse.modules.items() if name != SKIPPED}
    assert {entry.attributes["codes"] for entry in stored.values()} == {"nm"}
    assert sparse.modules[SKIPPED].attributes["codes"] == "dense"
    assert set(sparse.kept_dense) == {"lm_head"}
    loaded = load(tmp_path / "ours")
    for name in sparse.modules:
        layer = loaded.get_submodule(name)
        assert isinstance(layer, SparseLinear)
        assert torch.equal(layer.to_dense(), model.get_submodule(name).weight), name
    if how != "none":
        with_rounding(model, kind, scales)
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits)


def changed(folder: Path, name: str, value: Tensor | None) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
        if name in tensors:
            tensors.pop(name) if value is None else tensors.update({name: value})
            save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("weight_scale", torch.ones(3, 1), "3 numbers"),
        ("weight_scale", torch.full((48, 1), -1.0), "no scale"),
        ("compressed", torch.ones(48, 16), r"torch.float32 under int8"),
    ],
)
def test_damaged_codes_are_refused(tmp_path: Path, part: str, value: Tensor, told: str) -> None:
    group = {"weights": arguments("int", "channel")}
    theirs = write(dense_llama(), tmp_path / "theirs", group)
    changed(theirs, f"model.layers.0.mlp.up_proj.{part}", value)
    with pytest.raises(CheckpointError, match=told):
        import_sparse24(theirs, tmp_path / "ours")
    assert not list(tmp_path.glob("ours*"))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": arguments("int", "group", group_size=128)},
        {"weights": arguments("int", "channel") | {"num_bits": 4}},
        {"weights": arguments("int", "channel") | {"symmetric": False}},
        {"weights": arguments("int", "channel"), "input_activations": arguments("float", "token")},
        {"weights": arguments("int", "channel"), "targets": ["re:.*q_proj"]},
        {"weights": arguments("int", "channel", actorder="group")},
    ],
)
def test_what_no_scheme_describes_is_refused(change: dict[str, Any]) -> None:
    section = {"config_groups": {"group_0": {"targets": ["Linear"], **change}}}
    with pytest.raises(UnsupportedError, match="one group for Linear"):
        scheme_of(section, "here")
    both = {"a": {"targets": ["Linear"]}, "b": {"targets": ["Linear"]}}
    with pytest.raises(UnsupportedError, match="one group for Linear"):
        scheme_of({"config_groups": both}, "here")


def test_zero_points_must_be_zero(tmp_path: Path) -> None:
    group = {"weights": arguments("int", "channel")}
    theirs = write(dense_llama(), tmp_path / "theirs", group)
    path = next(theirs.glob("*.safetensors"))
    index = theirs / "model.safetensors.index.json"
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    weight_map = json.loads(index.read_text())["weight_map"] | {name: path.name}
    index.write_text(json.dumps({"weight_map": weight_map}))
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    save_file(tensors | {name: torch.zeros(48, 1, dtype=torch.int8)}, path)
    import_sparse24(theirs, tmp_path / "ours")
    save_file(tensors | {name: torch.ones(48, 1, dtype=torch.int8)}, path)
    with pytest.raises(UnsupportedError, match="zero points"):
        import_sparse24(theirs, tmp_path / "again")
    assert isinstance(load(tmp_path / "ours"), nn.Module)

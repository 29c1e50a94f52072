"""Checkpoints load through transformers and through hopsparse.load, exactly or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hopsparse.errors import ArgumentError, CheckpointError
from hopsparse.formats import FORMATS, NMPattern, convert
from hopsparse.models.checkpoint import CheckpointWriter, ModuleEntry, SparseConfig
from hopsparse.models.load import load
from hopsparse.models.register import register
from hopsparse.nn import SparseLinear

register()
transformers = pytest.importorskip("transformers")

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOKENS = torch.tensor([[1, 5, 9, 200, 3, 17]])


def tiny_llama(dtype: torch.dtype = torch.bfloat16, **changes: object) -> nn.Module:
    """A dense Llama whose projections obey 2:4."""
    torch.manual_seed(0)
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "attention_bias": True,
        **changes,
    }
    config = transformers.LlamaConfig(**settings)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Buffers stay in float32, as from_pretrained leaves them.
        parameter.data = parameter.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(PROJECTIONS):
            module.weight.view(-1, 4)[:, 1:3] = 0
            if module.bias is not None:
                module.bias.normal_()
    return model


def write(model: nn.Module, out: Path, fmt: str = "nm", **config_changes: object) -> Path:
    """Store `model` as sparsify does, in two shards."""
    shards: list[dict[str, Tensor]] = [{}, {}]
    modules = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        shard = shards[".1." in name]
        if module.endswith(PROJECTIONS) and name.endswith(".weight"):
            matrix = FORMATS[fmt].from_dense(tensor)
            shard.update({f"{module}.{part}": value for part, value in matrix.parts().items()})
            modules[module] = ModuleEntry.of(matrix)
        elif name != "lm_head.weight":
            shard[name] = tensor
    sparse = SparseConfig("2:4", "magnitude", modules, {"lm_head": "outside the blocks"})
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = sparse.to_json() | config_changes
    with CheckpointWriter(out) as writer:
        for index, shard in enumerate(shards):
            writer.write_shard(f"model-{index}.safetensors", shard)
        writer.commit(config)
    return out


def from_pretrained(folder: Path, **options: object) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}


def assert_same_state(first: nn.Module, second: nn.Module) -> None:
    left, right = first.state_dict(), second.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(dense: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(dense, tmp_path_factory.mktemp("checkpoint") / "out")


@pytest.fixture
def damaged(dense: nn.Module, tmp_path: Path) -> Path:
    """A checkpoint that a test may break."""
    return write(dense, tmp_path / "out")


class TestFromPretrained:
    @pytest.mark.parametrize("device_map", [None, "cpu"])
    def test_logits_equal_the_dense_model(self, folder: Path, device_map: str | None) -> None:
        model = from_pretrained(folder, dtype=torch.float32, device_map=device_map)
        layers = sparse_layers(model)
        assert len(layers) == 2 * len(PROJECTIONS)
        assert all(layer.matrix.dtype == torch.float32 for layer in layers.values())
        expected = tiny_llama().float()(TOKENS).logits
        assert torch.equal(model(TOKENS).logits, expected)

    @pytest.mark.parametrize(
        ("dtype", "wanted"),
        [("auto", torch.bfloat16), (torch.bfloat16, torch.bfloat16), ("float32", torch.float32)],
        ids=str,
    )
    def test_dtypes(self, folder: Path, dtype: object, wanted: torch.dtype) -> None:
        model = from_pretrained(folder, dtype=dtype)
        for name, layer in sparse_layers(model).items():
            assert layer.matrix.dtype == wanted, name
            assert layer.bias is None or layer.bias.dtype == wanted, name
            assert layer.meta.dtype == torch.int32
            layer.matrix.validate()
        assert model.model.embed_tokens.weight.dtype == wanted
        assert model(TOKENS).logits.dtype == wanted
        assert model.lm_head.weight is model.model.embed_tokens.weight

    @pytest.mark.parametrize("fmt", sorted(FORMATS))
    def test_every_format(self, dense: nn.Module, tmp_path: Path, fmt: str) -> None:
        model = from_pretrained(write(dense, tmp_path / "out", fmt), dtype=torch.float32)
        layer = model.model.layers[1].mlp.up_proj
        assert layer.matrix.name == fmt
        assert torch.equal(layer.to_dense(), dense.model.layers[1].mlp.up_proj.weight.float())

    @pytest.mark.parametrize("dtype", ["auto", torch.float32], ids=str)
    def test_saved_again_loads_bit_equal(self, folder: Path, tmp_path: Path, dtype: object) -> None:
        model = from_pretrained(folder, dtype=dtype)
        model.save_pretrained(tmp_path / "again")
        again = from_pretrained(tmp_path / "again", dtype="auto")
        assert_same_state(model, again)
        assert_same_state(model, load(tmp_path / "again"))
        stored = json.loads((tmp_path / "again" / "config.json").read_text())
        entry = stored["quantization_config"]["modules"]["model.layers.0.mlp.up_proj"]
        assert entry["dtype"] == str(model.dtype).removeprefix("torch.")
        assert stored["quantization_config"]["kept_dense"] == {"lm_head": "outside the blocks"}

    def test_generates(self, folder: Path) -> None:
        tokens = from_pretrained(folder).generate(TOKENS, max_new_tokens=3, do_sample=False)
        assert tokens.shape == (1, 9)

    def test_a_model_without_head_finds_its_layers(self, folder: Path, dense: nn.Module) -> None:
        body = transformers.AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
        layer = body.layers[0].self_attn.q_proj
        assert torch.equal(layer.to_dense(), dense.model.layers[0].self_attn.q_proj.weight)

    def test_dequantize_gives_the_dense_model_back(self, folder: Path, dense: nn.Module) -> None:
        model = from_pretrained(folder).dequantize()
        assert not sparse_layers(model)
        assert_same_state(model, dense)

    def test_gradients_reach_biases(self, folder: Path) -> None:
        model = from_pretrained(folder, dtype=torch.float32)
        model(TOKENS, labels=TOKENS).loss.backward()
        assert model.model.layers[0].mlp.up_proj.bias is None
        assert model.model.layers[0].self_attn.q_proj.bias.grad.any()


class TestRefusals:
    """Nothing is ever filled with random weights."""

    LOADERS = (
        from_pretrained,
        load,
        lambda folder: load(folder, into=tiny_llama()),
    )

    @pytest.fixture(params=LOADERS, ids=["transformers", "load", "into"])
    def loader(self, request: pytest.FixtureRequest) -> Iterator[object]:
        return request.param

    def rewrite(self, damaged: Path, drop: str, **add: Tensor) -> None:
        path = damaged / "model-0.safetensors"
        tensors = {name: t.clone() for name, t in load_file(path).items() if name != drop}
        save_file(tensors | add, path, metadata={"format": "pt"})
        index = json.loads((damaged / "model.safetensors.index.json").read_text())
        index["weight_map"].pop(drop, None)
        index["weight_map"].update(dict.fromkeys(add, path.name))
        (damaged / "model.safetensors.index.json").write_text(json.dumps(index))

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.0.mlp.up_proj.values",
            "model.layers.0.mlp.up_proj.meta",
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.input_layernorm.weight",
            "model.embed_tokens.weight",
        ],
    )
    def test_missing_tensor(self, damaged: Path, loader, name: str) -> None:
        self.rewrite(damaged, name)
        with pytest.raises(CheckpointError, match=f"(hold no tensor|lacks) {name}"):
            loader(damaged)

    @pytest.mark.parametrize(
        "name", ["model.layers.0.mlp.up_proj.values", "model.layers.0.input_layernorm.weight"]
    )
    def test_wrong_shape(self, damaged: Path, loader, name: str) -> None:
        self.rewrite(damaged, name, **{name: torch.zeros(7, dtype=torch.bfloat16)})
        with pytest.raises(CheckpointError, match=rf"{name} is stored as .*\[7\]"):
            loader(damaged)

    def test_missing_shard(self, damaged: Path, loader) -> None:
        (damaged / "model-1.safetensors").unlink()
        with pytest.raises((CheckpointError, OSError), match=r"model-1\.safetensors"):
            loader(damaged)

    def test_truncated_shard(self, damaged: Path, loader) -> None:
        path = damaged / "model-1.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="cannot be read"):
            loader(damaged)

    def test_newer_version(self, dense: nn.Module, tmp_path: Path, loader) -> None:
        out = write(dense, tmp_path / "out", format_version=99)
        with pytest.raises(CheckpointError, match="checkpoint of format version 99"):
            loader(out)

    def test_layer_that_the_model_has_not(self, damaged: Path, loader) -> None:
        config = json.loads((damaged / "config.json").read_text())
        modules = config["quantization_config"]["modules"]
        modules["model.layers.7.mlp.up_proj"] = modules["model.layers.0.mlp.up_proj"]
        (damaged / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"model\.layers\.7\.mlp\.up_proj"):
            loader(damaged)

    def test_wrong_pattern(self, damaged: Path, loader) -> None:
        config = json.loads((damaged / "config.json").read_text())
        entry = config["quantization_config"]["modules"]["model.layers.0.mlp.up_proj"]
        entry["attributes"]["pattern"] = "1:4"
        (damaged / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj"):
            loader(damaged)

    def test_index_out_of_range(self, dense: nn.Module, tmp_path: Path, loader) -> None:
        folder = write(dense, tmp_path / "out", "csr")
        name = "model.layers.0.mlp.up_proj.indices"
        indices = load_file(folder / "model-0.safetensors")[name].clone()
        indices[3] = 10_000
        self.rewrite(folder, name, **{name: indices})
        with pytest.raises(CheckpointError, match=r"up_proj: row 0 has column 10000"):
            loader(folder)

    def test_dense_folder(self, dense: nn.Module, tmp_path: Path) -> None:
        dense.save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=r"is a dense checkpoint.*from_pretrained"):
            load(tmp_path)

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="is no folder"):
            load(tmp_path / "none")

    def test_dtype_without_operator(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match=r"dtype torch\.float64"):
            load(folder, dtype=torch.float64)

    @pytest.mark.parametrize("device", ["foo", "cuda:77"])
    def test_device_that_is_not_there(self, folder: Path, device: str) -> None:
        with pytest.raises(ArgumentError, match=f"device '{device}'"):
            load(folder, device=device)

    @pytest.mark.parametrize("changes", [{"hidden_size": "x"}, {"hidden_act": "nope"}])
    def test_config_that_describes_no_model(
        self, damaged: Path, changes: dict[str, object]
    ) -> None:
        config = json.loads((damaged / "config.json").read_text())
        (damaged / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=r"transformers cannot build.*config\.json"):
            load(damaged)

    @pytest.mark.parametrize("names", [["pipeline"], [], None])
    def test_architecture_that_is_no_model(self, damaged: Path, names: object) -> None:
        config = json.loads((damaged / "config.json").read_text())
        (damaged / "config.json").write_text(json.dumps(config | {"architectures": names}))
        assert type(load(damaged)).__name__ == "LlamaForCausalLM"

    def test_threads_load_at_the_same_time(self, folder: Path) -> None:
        expected = load(folder)(TOKENS).logits
        with ThreadPoolExecutor(4) as pool:
            models = list(pool.map(load, [folder] * 8))
        assert all(torch.equal(model(TOKENS).logits, expected) for model in models)


class TestInto:
    @pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
    def test_fills_a_real_model(self, folder: Path, dtype: torch.dtype | None) -> None:
        model = tiny_llama()
        assert load(folder, into=model, dtype=dtype) is model
        assert_same_state(model, from_pretrained(folder, dtype=dtype or "auto"))
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_fills_a_meta_model(self, folder: Path, dense: nn.Module) -> None:
        accelerate = pytest.importorskip("accelerate")
        with accelerate.init_empty_weights(include_buffers=False):
            model = transformers.LlamaForCausalLM(dense.config)
        load(folder, into=model.eval(), dtype=torch.float32)
        assert torch.equal(model(TOKENS).logits, tiny_llama().float()(TOKENS).logits)

    def test_other_weights_are_refused_and_nothing_changes(self, folder: Path) -> None:
        model = tiny_llama(num_hidden_layers=3)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"the checkpoint lacks model\.layers\.2"):
            load(folder, into=model)
        after = model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


class _LargestTensor(TorchDispatchMode):
    """Bytes of the largest float storage that any operation makes on a real device."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not made.is_meta:
            self.nbytes = max(self.nbytes, made.numel() * made.element_size())
        return made


@pytest.mark.parametrize("how", ["transformers", "into"])
def test_loading_makes_nothing_of_the_size_of_a_dense_layer(tmp_path: Path, how: str) -> None:
    # The only large tensors of this model are its MLP weights; stored, they take 5/8 of that.
    model = tiny_llama(intermediate_size=8192, vocab_size=64, num_hidden_layers=1)
    folder = write(model, tmp_path / "out")
    dense_nbytes = 8192 * 64 * 2
    target = tiny_llama(intermediate_size=8192, vocab_size=64, num_hidden_layers=1)
    with _LargestTensor() as seen:
        loaded = from_pretrained(folder) if how == "transformers" else load(folder, into=target)
    assert seen.nbytes < dense_nbytes
    assert torch.equal(
        loaded.model.layers[0].mlp.up_proj.to_dense(), model.model.layers[0].mlp.up_proj.weight
    )


def test_transformers_may_be_imported_first(folder: Path) -> None:
    # The other order is that of this file.
    code = f"""
import transformers
transformers.AutoModelForCausalLM
from hopsparse.models.register import register
register(); register()
model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})
print(type(model.model.layers[0].mlp.up_proj).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "SparseLinear"


def test_relaxed_pattern_survives(dense: nn.Module, tmp_path: Path) -> None:
    folder = write(dense, tmp_path / "out")
    model = from_pretrained(folder)
    layer = model.model.layers[0].mlp.up_proj
    wide = convert(layer.matrix, "nm", pattern=NMPattern(6, 8))
    model.model.layers[0].mlp.up_proj = SparseLinear(wide)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert again.model.layers[0].mlp.up_proj.matrix.pattern == NMPattern(6, 8)
    assert_same_state(model, again)

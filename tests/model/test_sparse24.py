"""Checkpoints of compressed-tensors come in and go out bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hopsparse.errors import CheckpointError, FormatError, UnsupportedError
from hopsparse.models.load import load
from hopsparse.models.sparse24 import compress, export_sparse24, import_sparse24

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[1, 5, 9, 60, 3, 17]])

#: What compressed-tensors 0.14.0 wrote for these rows, beside torch 2.13 on a CPU.
KNOWN = [
    ([1, 0, 2, 0, 0, 3, 0, 4], [1, 2, 3, 4], [165]),
    ([0, 9, 0, 0, 0, 0, 0, 0], [9, 0, 0, 0], [202]),
    ([5, 0, 0, 0], [5, 0], [5]),
    ([5, 0, 0, 0, 0, 0, 0, 0], [5, 0, 0, 0], [197]),
    ([0, 5, 0, 0], [5, 0], [10]),
    ([0, 0, 5, 0], [5, 0], [12]),
    ([0, 0, 0, 5], [0, 5], [12]),
    ([0, 1, 0, 0, 2, 0, 0, 1, 0, 0, 2, 0], [1, 0, 2, 1, 2, 0], [154, 12]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("row", "compressed", "bitmask"), KNOWN)
def test_known_answers(
    row: list[float], compressed: list[float], bitmask: list[int], dtype: torch.dtype
) -> None:
    found = compress(torch.tensor([row], dtype=dtype))
    assert found["shape"].tolist() == [[1], [len(row)]]
    assert found["shape"].dtype == torch.int64
    assert found["compressed"].tolist() == [compressed]
    assert found["compressed"].dtype == dtype
    assert found["bitmask"].tolist() == [bitmask]
    assert found["bitmask"].dtype == torch.uint8


def test_compress_refuses_a_full_group() -> None:
    with pytest.raises(FormatError, match="row 1, group 1 holds 3 non-zeros"):
        compress(torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]]))


def tiny_llama() -> nn.Module:
    """A Llama in float32 of which one projection breaks 2:4 and one group is half empty."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, module in model.named_modules():
        if name.endswith("_proj") and name != "model.layers.1.mlp.down_proj":
            groups = module.weight.view(-1, 4)
            groups[torch.rand_like(groups).argsort(-1) < 2] = 0
            groups[::7, :3] = 0
    return model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_llama()


def sparsity_config(form: str) -> dict[str, object]:
    return {
        "format": form,
        "targets": ["Linear"],
        "ignore": ["lm_head"],
        "global_sparsity": 0.5,
        "sparsity_structure": "2:4",
    }


def write_theirs(model: nn.Module, folder: Path, form: str, **section: object) -> Path:
    """The folder that compressed-tensors left behind: in two shards, a weight across both."""
    model.save_pretrained(folder)
    state: dict[str, Tensor] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards: list[dict[str, Tensor]] = [{}, {}]
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        packed = form == "sparse-24-bitmask" and module.endswith("_proj")
        if not packed or "1.mlp.down_proj" in name:
            shards[0][name] = tensor
            continue
        for part, value in compress(tensor).items():
            shards[part == "bitmask"][f"{module}.{part}"] = value
    weight_map = {}
    for index, shard in enumerate(shards):
        if shard:
            path = folder / f"model-{index}.safetensors"
            save_file(shard, path, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "tokenizer_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "version": "0.14.0",
        "sparsity_config": sparsity_config(form),
        **section,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("form", ["sparse-24-bitmask", "dense"])
def test_import_gives_the_same_logits(model: nn.Module, tmp_path: Path, form: str) -> None:
    theirs = write_theirs(model, tmp_path / "theirs", form)
    sparse = import_sparse24(theirs, tmp_path / "ours")
    assert len(sparse.modules) == 13
    assert (sparse.pattern, sparse.method) == ("2:4", "imported")
    assert {entry.format for entry in sparse.modules.values()} == {"nm"}
    assert set(sparse.kept_dense) == {"lm_head", "model.layers.1.mlp.down_proj"}
    reason = sparse.kept_dense["model.layers.1.mlp.down_proj"]
    assert "row 0, group 0" in reason if form == "dense" else reason == "stored dense"
    assert (tmp_path / "ours" / "tokenizer_config.json").exists()
    loaded = load(tmp_path / "ours")
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_export_gives_back_every_bit(model: nn.Module, tmp_path: Path) -> None:
    theirs = write_theirs(model, tmp_path / "theirs", "sparse-24-bitmask")
    import_sparse24(theirs, tmp_path / "ours")
    assert export_sparse24(tmp_path / "ours", tmp_path / "back") == {}
    before, after = stored(theirs), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    assert "model.layers.0.mlp.up_proj.compressed" in after
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    section = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"
    found = section["sparsity_config"]
    assert (found["format"], found["sparsity_structure"]) == ("sparse-24-bitmask", "2:4")
    assert found["ignore"] == ["lm_head", "model.layers.1.mlp.down_proj"]
    assert 0.5 < found["global_sparsity"] < 0.6


def test_early_configs_used_another_key(model: nn.Module, tmp_path: Path) -> None:
    theirs = write_theirs(model, tmp_path / "theirs", "dense")
    config = json.loads((theirs / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (theirs / "config.json").write_text(json.dumps(config))
    import_sparse24(theirs, tmp_path / "ours")
    assert "compression_config" not in json.loads((tmp_path / "ours/config.json").read_text())


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "config_groups"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"format": "pack-quantized"}, "pack-quantized"),
    ],
)
def test_quantised_weights_are_refused_by_name(
    model: nn.Module, tmp_path: Path, section: dict[str, object], named: str
) -> None:
    theirs = write_theirs(model, tmp_path / "theirs", "dense", **section)
    with pytest.raises(UnsupportedError, match=f"also quantised .*{named}"):
        import_sparse24(theirs, tmp_path / "ours")
    assert not list(tmp_path.glob("ours*"))


def test_other_formats_are_refused(model: nn.Module, tmp_path: Path) -> None:
    config = sparsity_config("sparse-bitmask")
    theirs = write_theirs(model, tmp_path / "theirs", "dense", sparsity_config=config)
    with pytest.raises(UnsupportedError, match="stores its weights as 'sparse-bitmask'"):
        import_sparse24(theirs, tmp_path / "ours")


def test_dense_model_is_refused(model: nn.Module, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="carries no sparsity_config"):
        import_sparse24(tmp_path / "dense", tmp_path / "ours")
    with pytest.raises(CheckpointError, match="is a dense checkpoint"):
        export_sparse24(tmp_path / "dense", tmp_path / "theirs")


def test_nothing_to_pack_leaves_nothing_behind(tmp_path: Path) -> None:
    dense = tiny_llama()
    for name, module in dense.named_modules():
        if name.endswith("_proj"):
            module.weight.fill_(1)
    theirs = write_theirs(dense, tmp_path / "theirs", "dense")
    with pytest.raises(UnsupportedError, match=r"no weight of .* obeys 2:4"):
        import_sparse24(theirs, tmp_path / "ours")
    assert not list(tmp_path.glob("ours*"))


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("bitmask", lambda mask: mask | 15),
        ("bitmask", lambda mask: mask[:, :-1]),
        ("compressed", lambda values: values[:, :-1]),
        ("shape", lambda shape: shape[:1]),
    ],
)
def test_damaged_parts(model: nn.Module, tmp_path: Path, part: str, damage) -> None:
    theirs = write_theirs(model, tmp_path / "theirs", "sparse-24-bitmask")
    name = f"model.layers.0.mlp.up_proj.{part}"
    path = theirs / f"model-{int(part == 'bitmask')}.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    tensors[name] = damage(tensors[name]).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj in .* is damaged"):
        import_sparse24(theirs, tmp_path / "ours")
    assert not list(tmp_path.glob("ours*"))

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from hopsparse.errors import CheckpointError, UnsupportedError
from hopsparse.models.source import materialize_outside, open_source, skeleton
from tests.helpers.tiny_models import ALPHABET, save_model, tiny_llama, tiny_qwen3

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave_rotary(weight: Tensor, heads: int) -> Tensor:
    """What llama.cpp's converter does to the rows of q and k: two halves become pairs."""
    size = weight.shape[0] // heads
    order = [half * size // 2 + pair for pair in range(size // 2) for half in (0, 1)]
    return weight.view(heads, size, -1)[:, order].reshape(weight.shape)


def gguf_name(name: str) -> str:
    base = name.removesuffix(".weight")
    if base.startswith("model.layers."):
        _, _, index, rest = base.split(".", 3)
        return f"blk.{index}.{NAMES[rest]}.weight"
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    return outside.get(base, base) + ".weight"


def write_gguf(
    path: Path,
    state: dict[str, Tensor],
    architecture: str = "llama",
    tokenizer: tuple[str, ...] = ("tokens", "scores"),
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(ALPHABET) + 1)
    writer.add_tokenizer_model("gpt2")
    if "tokens" in tokenizer:
        writer.add_token_list([*ALPHABET, "<end>"])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(ALPHABET) + [gguf.TokenType.CONTROL])
    # Without merges transformers derives a tokenizer from the scores.
    if "scores" in tokenizer:
        writer.add_token_scores([0.0] * (len(ALPHABET) + 1))
    writer.add_bos_token_id(len(ALPHABET))
    writer.add_eos_token_id(len(ALPHABET))
    for name, weight in state.items():
        values = weight.float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleave_rotary(values, 4 if "q_proj" in name else 2)
        kind = np.float16 if values.ndim == 2 else np.float32
        writer.add_tensor(gguf_name(name), values.numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dense_state() -> dict[str, Tensor]:
    """Weights that both bfloat16 and float16 hold exactly."""
    state = tiny_llama().state_dict()
    state.pop("lm_head.weight", None)
    return {name: (weight * 64).round() / 64 for name, weight in state.items()}


def test_folder_reads_the_stored_weights(tmp_path: Path) -> None:
    model = tiny_qwen3()
    source = open_source(str(save_model(model, tmp_path / "m")))
    copy = skeleton(source)
    assert all(weight.device.type == "meta" for weight in copy.parameters())
    materialize_outside(copy, (), source, "cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], weight.float()), name


def test_gguf_reads_the_same_weights(tmp_path: Path) -> None:
    state = dense_state()
    source = open_source(str(write_gguf(tmp_path / "m.gguf", state)))
    assert set(source.names()) >= set(state)
    for name, weight in state.items():
        assert torch.equal(source.load(name).float(), weight.float()), name
    # The file holds its matrices in float16: nothing is rounded to another dtype.
    assert {source.load(name).dtype for name in state} == {torch.float16}
    assert source.config_json()["architectures"] == ["LlamaForCausalLM"]


def test_tied_head_follows_the_embedding(tmp_path: Path) -> None:
    source = open_source(str(write_gguf(tmp_path / "m.gguf", dense_state())))
    model = skeleton(source)
    materialize_outside(model, (), source, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_gguf_type_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q8_1]
    writer.add_tensor(
        "token_embd.weight",
        np.zeros((4, size * 32 // block), dtype=np.uint8),
        raw_dtype=GGMLQuantizationType.Q8_1,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"token_embd.weight .* has type Q8_1"):
        open_source(str(path))


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", dense_state(), architecture="mamba")
    with pytest.raises(UnsupportedError, match="architecture 'mamba'.*llama"):
        open_source(str(path))


@pytest.mark.parametrize("fields", [("scores",), ("tokens",)])
def test_gguf_without_a_whole_tokenizer(tmp_path: Path, fields: tuple[str, ...]) -> None:
    source = open_source(str(write_gguf(tmp_path / "m.gguf", dense_state(), tokenizer=fields)))
    with pytest.raises(CheckpointError, match=r"no tokenizer that .* and \.merges or \.scores"):
        source.tokenizer()


@pytest.mark.parametrize("keep", [0, 3, 100, 3000])
def test_truncated_gguf(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", dense_state())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        open_source(str(path))


def test_gguf_cut_inside_its_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", dense_state())
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        open_source(str(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_keep_the_dtype_in_which_they_are_stored(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """Whatever config.json says of it, or does not say."""
    folder = save_model(tiny_llama().to(dtype), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source(str(folder))
    assert {source.load(name).dtype for name in source.names()} == {dtype}


def test_writing_to_a_loaded_model_does_not_reach_its_file(tmp_path: Path) -> None:
    folder = save_model(tiny_llama().float(), tmp_path / "m")
    source = open_source(str(folder))
    model = skeleton(source)
    materialize_outside(model, (), source, "cpu")
    before = {name: source.load(name).clone() for name in source.names()}
    for parameter in model.parameters():
        parameter.zero_()
    assert all(torch.equal(source.load(name), value) for name, value in before.items())


def test_building_the_skeleton_leaves_the_configuration_alone(tmp_path: Path) -> None:
    source = open_source(str(save_model(tiny_llama(), tmp_path / "m")))
    before = source.config.to_dict()
    skeleton(source)
    assert source.config.to_dict() == before


def test_gguf_with_scaled_rotary_frequencies(tmp_path: Path) -> None:
    state = dense_state() | {"rope_freqs.weight": torch.ones(4)}
    with pytest.raises(UnsupportedError, match="scales its rotary frequencies"):
        open_source(str(write_gguf(tmp_path / "m.gguf", state)))


def test_a_weight_that_is_missing(tmp_path: Path) -> None:
    folder = save_model(tiny_qwen3(), tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    state.pop("model.norm.weight")
    save_file(state, folder / "model.safetensors")
    source = open_source(str(folder))
    with pytest.raises(CheckpointError, match="holds no tensor model.norm.weight"):
        materialize_outside(skeleton(source), (), source, "cpu")


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder, no .gguf file and no packaged model"):
        open_source(str(tmp_path / "nothing"))


def test_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    folder = save_model(tiny_llama(), tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled .bin files are never loaded"):
        open_source(str(folder))


def test_weights_that_do_not_belong_to_the_config(tmp_path: Path) -> None:
    folder = save_model(tiny_llama(), tmp_path / "m")
    other = save_model(tiny_llama(intermediate_size=128), tmp_path / "n")
    (other / "model.safetensors").replace(folder / "model.safetensors")
    source = open_source(str(folder))
    with pytest.raises(CheckpointError, match=r"shape \[128, 32\].*\[64, 32\]"):
        materialize_outside(skeleton(source), (), source, "cpu")


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def add_tensor(folder: Path, name: str, value: Tensor) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(state | {name: value}, folder / "model.safetensors", metadata={"format": "pt"})


def test_stored_layers_that_the_config_does_not_describe(tmp_path: Path) -> None:
    folder = save_model(tiny_llama(), tmp_path / "m")
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"stores model\.layers\.2\..* and 6 more, for which"):
        skeleton(open_source(str(folder)))


def test_a_stored_bias_that_the_config_does_not_describe(tmp_path: Path) -> None:
    folder = save_model(tiny_llama(), tmp_path / "m")
    name = "model.layers.0.self_attn.q_proj.bias"
    add_tensor(folder, name, torch.ones(32, dtype=torch.bfloat16))
    with pytest.raises(CheckpointError, match=name):
        skeleton(open_source(str(folder)))


def test_a_gguf_tensor_that_the_architecture_does_not_know(tmp_path: Path) -> None:
    state = dense_state() | {"blk.0.attn_q.bias": torch.ones(32)}
    source = open_source(str(write_gguf(tmp_path / "m.gguf", state)))
    with pytest.raises(CheckpointError, match="attn_q.bias"):
        skeleton(source)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_tied_copies_and_rotary_frequencies_may_be_stored(tmp_path: Path, name: str) -> None:
    folder = save_model(tiny_llama(), tmp_path / "m")
    value = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add_tensor(folder, name, value.clone() if name == "lm_head.weight" else torch.ones(4))
    skeleton(open_source(str(folder)))


@pytest.mark.parametrize(
    "changes", [{"hidden_size": "x"}, {"hidden_act": "nope"}, {"num_attention_heads": 0}]
)
def test_a_config_that_describes_no_model(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = save_model(tiny_llama(), tmp_path / "m")
    edit_config(folder, **changes)
    with pytest.raises((CheckpointError, UnsupportedError), match=r"config\.json"):
        skeleton(open_source(str(folder)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_identity_follows_the_files_that_say_how_to_read_the_weights(
    tmp_path: Path, name: str
) -> None:
    folder = save_model(tiny_llama(), tmp_path / "m")
    before = open_source(str(folder)).identity()
    assert open_source(str(folder)).identity() == before
    with (folder / name).open("a") as file:
        file.write("\n")
    assert open_source(str(folder)).identity() != before


def test_identity_follows_the_fields_of_a_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", dense_state())
    source, status = open_source(str(path)), path.stat()
    before = source.identity()
    data = path.read_bytes()
    place = data.index(b"llama.rope.freq_base") + len("llama.rope.freq_base") + 4
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert source.identity() != before

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hopsparse
from hopsparse.errors import ArgumentError, CalibrationError, CheckpointError, UnsupportedError
from hopsparse.models.checkpoint import CheckpointReader
from hopsparse.models.evaluate import compare, evaluate
from hopsparse.models.options import Progress, SparsifyOptions
from hopsparse.models.sparsify import sparsify_checkpoint
from hopsparse.models.text import leading_windows, read_text
from hopsparse.nn import SparseLinear
from hopsparse.prune import Recipe
from tests.helpers.tiny_models import byte_tokenizer, save_model, tiny_llama, tiny_qwen3, write_text

PROJECTIONS = 7 * 3


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return save_model(tiny_llama(), tmp_path / "dense")


@pytest.fixture
def options(tmp_path: Path) -> SparsifyOptions:
    text = write_text(tmp_path / "text.txt")
    return SparsifyOptions(
        calibration=text, evaluate=text, windows=4, window_tokens=32, eval_windows=2, samples=False
    )


def is_2_4(weight: torch.Tensor) -> bool:
    groups = (weight != 0).view(weight.shape[0], -1, 4).sum(-1)
    return int(groups.max()) <= 2


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_checkpoint_holds_what_was_pruned(
    dense: Path, options: SparsifyOptions, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "out"
    report = sparsify_checkpoint(str(dense), out, Recipe("2:4", method), options=options)
    assert not (tmp_path / "out.partial").exists()
    with CheckpointReader(out) as reader:
        assert reader.sparse is not None
        assert len(reader.sparse.modules) == PROJECTIONS
        assert set(reader.sparse.kept_dense) == {"lm_head"}
        for module in reader.sparse.modules:
            matrix = reader.matrix(module)
            matrix.validate()
            assert matrix.dtype == torch.bfloat16
            assert is_2_4(matrix.to_dense())
    assert [row["name"] for row in report["layers"]] == list(reader.sparse.modules)
    assert report == json.loads((out / "report.json").read_text())
    # Packed bfloat16 takes 9/16 of dense; these layers divide evenly into panels of 64 columns.
    gate = next(row for row in report["layers"] if row["name"].endswith("down_proj"))
    assert gate["bytes_sparse"] / gate["bytes_dense"] == pytest.approx(2 * 9 / 16)


def test_loaded_model_computes_what_was_measured(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    """Perplexity of the reloaded model is the one in the report: nothing is lost on disk."""
    out = tmp_path / "out"
    report = sparsify_checkpoint(str(dense), out, Recipe("2:4"), options=options)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    windows = leading_windows(read_text(tmp_path / "text.txt"), byte_tokenizer(), 2, 32)
    row = report["evaluation"][0]
    # Whole-model and block-wise runs add in the same order: equal but for the last digits.
    assert evaluate(model, windows).perplexity == pytest.approx(row["sparse"]["perplexity"])
    original = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    assert evaluate(original, windows).perplexity == pytest.approx(row["dense"]["perplexity"])
    found = compare(original, model, windows)
    assert row["sparse"]["kl"] == pytest.approx(found.kl, rel=1e-3)
    assert found.kl > 0
    assert row["sparse"]["agreement"] == found.agreement


@pytest.mark.parametrize("pattern", ["1:4", "4:8", "6:8", "unstructured:0.5", "block:16x16"])
def test_every_pattern_reloads(
    dense: Path, options: SparsifyOptions, tmp_path: Path, pattern: str
) -> None:
    out = tmp_path / "out"
    report = sparsify_checkpoint(str(dense), out, Recipe(pattern), options=options)
    model = hopsparse.load(out)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}
    assert len(layers) == PROJECTIONS
    for row in report["layers"]:
        stored = layers[row["name"]].to_dense()
        assert float((stored != 0).float().mean()) == pytest.approx(row["density"])


def test_both_loaders_give_the_stored_dtype(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    sparsify_checkpoint(str(dense), out, Recipe("2:4", "magnitude"), options=options)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "_name_or_path" not in config
    for model in (AutoModelForCausalLM.from_pretrained(out), hopsparse.load(out)):
        kinds = {value.dtype for value in model.state_dict().values() if value.is_floating_point()}
        assert kinds == {torch.bfloat16}


def test_float32_model_and_samples_of_both(options: SparsifyOptions, tmp_path: Path) -> None:
    """The dense sample comes from the dense weights, though pruning has been over by then."""
    folder = save_model(tiny_llama().float(), tmp_path / "m")
    choice = SparsifyOptions(**vars(options) | {"samples": True})
    out = tmp_path / "out"
    report = sparsify_checkpoint(str(folder), out, Recipe("1:4", "magnitude"), options=choice)
    tokenizer = byte_tokenizer()
    for model, key in ((tiny_llama().float(), "dense"), (hopsparse.load(out), "sparse")):
        for sample in report["samples"]:
            inputs = tokenizer(sample["prompt"], return_tensors="pt")
            new = model.generate(**inputs, max_new_tokens=32, do_sample=False)
            text = tokenizer.decode(
                new[0, inputs["input_ids"].shape[1] :],
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            assert text == sample[key]


def test_tokenizer_of_another_model(options: SparsifyOptions, tmp_path: Path) -> None:
    folder = save_model(tiny_llama(vocab_size=40, bos_token_id=1, eos_token_id=1), tmp_path / "m")
    with pytest.raises(CalibrationError, match="below the model's vocabulary of 40"):
        sparsify_checkpoint(str(folder), tmp_path / "out", Recipe("2:4"), options=options)


def test_qwen_with_its_own_head(options: SparsifyOptions, tmp_path: Path) -> None:
    folder = save_model(tiny_qwen3(), tmp_path / "qwen")
    sparsify_checkpoint(str(folder), tmp_path / "out", Recipe("2:4"), options=options)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = hopsparse.load(tmp_path / "out").state_dict()
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(before[name], after[name])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("2:4"),
        Recipe("2:4", permute=True, search="admm"),
        Recipe("2:4", scheme="int8", damping="search"),
    ],
    ids=["plain", "permuted", "smoothed"],
)
def test_interrupted_and_resumed_is_bit_identical(
    dense: Path, options: SparsifyOptions, tmp_path: Path, recipe: Recipe
) -> None:
    sparsify_checkpoint(str(dense), tmp_path / "whole", recipe, options=options)

    def interrupt(progress: Progress) -> None:
        if progress.done == 2:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        sparsify_checkpoint(str(dense), out, recipe, options=options, progress=interrupt)
    assert not out.exists()
    with pytest.raises(CheckpointError, match="interrupted run"):
        sparsify_checkpoint(str(dense), out, recipe, options=options)
    again = SparsifyOptions(**vars(options) | {"resume": True})
    with pytest.raises(CheckpointError, match="recipe"):
        sparsify_checkpoint(str(dense), out, Recipe("2:4", "wanda"), options=again)
    sparsify_checkpoint(str(dense), out, recipe, options=again)
    assert_same_shards(tmp_path / "whole", out)


def test_resuming_after_the_model_changed_is_refused(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    recipe, out = Recipe("2:4", "magnitude"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        sparsify_checkpoint(str(dense), out, recipe, options=options, progress=interrupt)
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    again = SparsifyOptions(**vars(options) | {"resume": True})
    with pytest.raises(CheckpointError, match="the interrupted run has model"):
        sparsify_checkpoint(str(dense), out, recipe, options=again)


def test_weights_that_the_config_does_not_describe_are_not_dropped(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"stores model\.layers\.2"):
        sparsify_checkpoint(str(dense), tmp_path / "out", Recipe("2:4"), options=options)
    assert not (tmp_path / "out.partial").exists()


def test_killed_and_resumed_is_bit_identical(
    dense: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    recipe = Recipe("2:4")
    sparsify_checkpoint(str(dense), tmp_path / "whole", recipe, options=options)
    out = tmp_path / "out"
    program = f"""
        import os, signal
        from pathlib import Path
        from hopsparse.models.options import SparsifyOptions
        from hopsparse.models.sparsify import sparsify_checkpoint
        from hopsparse.prune import Recipe
        text = Path({str(tmp_path / "text.txt")!r})
        options = SparsifyOptions(calibration=text, evaluate=text, windows=4, window_tokens=32,
                                  eval_windows=2, samples=False)
        def kill(progress):
            if progress.done == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        sparsify_checkpoint({str(dense)!r}, {str(out)!r}, Recipe("2:4"), options=options,
                            progress=kill)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    again = SparsifyOptions(**vars(options) | {"resume": True})
    sparsify_checkpoint(str(dense), out, recipe, options=again)
    assert_same_shards(tmp_path / "whole", out)


def assert_same_shards(left: Path, right: Path) -> None:
    names = sorted(path.name for path in left.glob("*.safetensors"))
    assert names == sorted(path.name for path in right.glob("*.safetensors"))
    assert names
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes()
    assert (left / "config.json").read_bytes() == (right / "config.json").read_bytes()


def test_output_that_exists(dense: Path, options: SparsifyOptions, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    over = SparsifyOptions(**vars(options) | {"overwrite": True})
    for choice in (options, over):
        with pytest.raises(CheckpointError, match="exists"):
            sparsify_checkpoint(str(dense), out, Recipe("2:4"), options=choice)
    assert (out / "thesis.txt").read_text() == "years of work"

    sparsify_checkpoint(str(dense), tmp_path / "b", Recipe("2:4", "magnitude"), options=options)
    first = load_file(tmp_path / "b" / "model-00001-of-00004.safetensors")
    with pytest.raises(CheckpointError, match="--overwrite"):
        sparsify_checkpoint(str(dense), tmp_path / "b", Recipe("2:4"), options=options)
    sparsify_checkpoint(str(dense), tmp_path / "b", Recipe("2:4"), options=over)
    second = load_file(tmp_path / "b" / "model-00001-of-00004.safetensors")
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_layers_that_do_not_fit_stay_dense_and_are_named(
    options: SparsifyOptions, tmp_path: Path
) -> None:
    folder = save_model(tiny_llama(intermediate_size=66), tmp_path / "odd")
    recipe = Recipe("2:4", keep=("*.q_proj",))
    report = sparsify_checkpoint(str(folder), tmp_path / "out", recipe, options=options)
    kept = report["kept_dense"]
    assert kept["model.layers.0.mlp.down_proj"] == "k = 66 is not a multiple of 4"
    assert kept["model.layers.2.self_attn.q_proj"] == "kept by '*.q_proj'"
    assert len(report["layers"]) == PROJECTIONS - 6
    hopsparse.load(tmp_path / "out")


def test_nothing_to_prune(dense: Path, options: SparsifyOptions, tmp_path: Path) -> None:
    recipe = Recipe("2:4", keep=("*",))
    with pytest.raises(UnsupportedError, match="without any layer to prune"):
        sparsify_checkpoint(str(dense), tmp_path / "out", recipe, options=options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "text.txt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"   \n", "is empty"),
        ("naïve café".encode("latin-1") * 40, "is not UTF-8: byte 0xef at offset 2"),
        (b"too short", "has 9 tokens"),
    ],
)
def test_calibration_that_cannot_be_used(
    dense: Path, options: SparsifyOptions, tmp_path: Path, content: bytes, message: str
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    choice = SparsifyOptions(**vars(options) | {"calibration": bad})
    with pytest.raises(CalibrationError, match=message):
        sparsify_checkpoint(str(dense), tmp_path / "out", Recipe("2:4"), options=choice)
    assert not (tmp_path / "out.partial").exists()


def test_sparse_input_is_refused(dense: Path, options: SparsifyOptions, tmp_path: Path) -> None:
    sparsify_checkpoint(str(dense), tmp_path / "a", Recipe("2:4", "magnitude"), options=options)
    with pytest.raises(UnsupportedError, match="already sparse"):
        sparsify_checkpoint(str(tmp_path / "a"), tmp_path / "b", Recipe("2:4"), options=options)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.norm.weight",
    ],
)
def test_weights_that_are_not_finite(options: SparsifyOptions, tmp_path: Path, name: str) -> None:
    model = tiny_llama()
    model.get_parameter(name).data.view(-1)[3] = float("nan")
    folder = save_model(model, tmp_path / "nan")
    with pytest.raises(ArgumentError, match=f"weight {name} holds NaN or infinity"):
        sparsify_checkpoint(str(folder), tmp_path / "out", Recipe("2:4"), options=options)
    assert not (tmp_path / "out").exists()

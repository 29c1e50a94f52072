"""A form for each layer: checkpoints of fewer bits, and of several patterns in one model."""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hopsparse
from hopsparse.errors import (
    ArgumentError,
    CalibrationError,
    CheckpointError,
    UnsupportedError,
    VerificationError,
)
from hopsparse.formats import Quantized, Scheme
from hopsparse.models import _stream
from hopsparse.models.checkpoint import CheckpointReader
from hopsparse.models.convert import convert_checkpoint
from hopsparse.models.evaluate import evaluate
from hopsparse.models.options import SparsifyOptions
from hopsparse.models.save import save
from hopsparse.models.sparsify import sparsify, sparsify_checkpoint
from hopsparse.models.text import leading_windows, read_text
from hopsparse.models.verify import verify_checkpoint
from hopsparse.nn import SparseLinear
from hopsparse.prune import Recipe
from hopsparse.quant import round_inputs
from tests.helpers.tiny_models import byte_tokenizer, save_model, tiny_llama, write_text

FORMS = {
    "*.0.self_attn.q_proj": "dense",
    "*.0.self_attn.k_proj": "6:8+fp8",
    "*.0.self_attn.v_proj": "unstructured:0.5+int4:32",
    "*.1.*": "dense+int4:32/int4",
    "*.2.self_attn.*": "2:4",
    "*.2.mlp.up_proj": "block:16x16+int8/none",
}
MIXED = Recipe("2:4", scheme="int8/int8:static", forms=FORMS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    save_model(tiny_llama(), folder / "dense")
    write_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def options(folder: Path) -> SparsifyOptions:
    text = folder / "text.txt"
    return SparsifyOptions(
        calibration=text, evaluate=text, windows=4, window_tokens=32, eval_windows=2, samples=False
    )


@pytest.fixture(scope="module")
def report(folder: Path, options: SparsifyOptions) -> dict[str, Any]:
    return sparsify_checkpoint(str(folder / "dense"), folder / "out", MIXED, options=options)


@pytest.fixture(scope="module")
def mixed(folder: Path, report: dict[str, Any]) -> Path:
    return folder / "out"


def windows(folder: Path) -> list[torch.Tensor]:
    return leading_windows(read_text(folder / "text.txt"), byte_tokenizer(), 2, 32)


def test_every_layer_has_the_form_that_was_asked_for(mixed: Path, report: dict[str, Any]) -> None:
    rows = {row["name"].removeprefix("model.layers."): row for row in report["layers"]}
    assert "0.self_attn.q_proj" not in rows
    assert report["kept_dense"]["model.layers.0.self_attn.q_proj"] == "dense by plan"
    expected = {
        "0.self_attn.k_proj": ("6:8", "fp8", "nm"),
        "0.self_attn.v_proj": ("unstructured:0.5", "int4:32", "bitmask"),
        "0.mlp.up_proj": ("2:4", "int8/int8:static", "nm"),
        "1.mlp.down_proj": ("dense", "int4:32/int4", "dense"),
        "2.self_attn.o_proj": ("2:4", "", "nm"),
        "2.mlp.up_proj": ("block:16x16:0.5", "int8/none", "bsr"),
    }
    found = {name: rows[name] for name in expected}
    assert {n: (r["pattern"], r["scheme"], r["format"]) for n, r in found.items()} == expected
    with CheckpointReader(mixed) as reader:
        assert reader.sparse is not None
        assert reader.sparse.pattern == "mixed"
        for name, row in rows.items():
            matrix = reader.matrix(f"model.layers.{name}")
            matrix.validate()
            assert (matrix.nbytes, row["bytes_dense"]) == (
                row["bytes_sparse"],
                2 * matrix.shape[0] * matrix.shape[1],
            )
            assert matrix.dtype == torch.bfloat16
            assert matrix.density == pytest.approx(row["density"])
            assert isinstance(matrix, Quantized) == bool(row["scheme"])
            if row["pattern"] == "2:4":
                live = (matrix.to_dense() != 0).view(matrix.shape[0], -1, 4).sum(-1)
                assert int(live.max()) <= 2


def test_both_loaders_compute_what_was_measured(
    mixed: Path, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit in float32: rounding of weights and inputs is in the measured perplexity."""
    texts = windows(mixed.parent)
    measured = report["evaluation"][0]["sparse"]["perplexity"]
    for model in (
        AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32),
        hopsparse.load(mixed, dtype=torch.float32),
        hopsparse.load(mixed, into=tiny_llama().float(), dtype=torch.float32),
    ):
        assert evaluate(model, texts).perplexity == pytest.approx(measured, rel=1e-9)
    # Without the rounding of inputs it is another number.
    monkeypatch.setattr("hopsparse.nn.sparse_linear.rounded", lambda x, form, scale: x)
    assert evaluate(model, texts).perplexity != pytest.approx(measured, rel=1e-6)


def test_loading_in_bfloat16_keeps_codes_and_scales(mixed: Path) -> None:
    with CheckpointReader(mixed) as reader:
        stored = {name: reader.load(name) for name in reader.names()}
    for model in (AutoModelForCausalLM.from_pretrained(mixed), hopsparse.load(mixed)):
        state = model.state_dict()
        assert {name: part.dtype for name, part in state.items() if name in stored} == {
            name: part.dtype for name, part in stored.items()
        }
        for name, part in stored.items():
            assert torch.equal(state[name].view(torch.uint8), part.view(torch.uint8))
        layer = model.model.layers[0].mlp.up_proj
        assert layer.values_dtype == torch.bfloat16
        assert evaluate(model, windows(mixed.parent)).perplexity < 300
    half = hopsparse.load(mixed, dtype=torch.float16)
    assert half.model.layers[0].mlp.up_proj.scales.dtype == torch.float32
    assert half.model.layers[1].mlp.up_proj.scales.dtype == torch.bfloat16


def test_saving_again_gives_the_same_tensors(mixed: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixed)
    model.save_pretrained(tmp_path / "hf")
    save(hopsparse.load(mixed), tmp_path / "own")
    with CheckpointReader(mixed) as first:
        for folder in (tmp_path / "hf", tmp_path / "own"):
            with CheckpointReader(folder) as second:
                assert second.sparse is not None
                assert first.sparse is not None
                assert second.sparse.modules == first.sparse.modules
                for name in first.names():
                    if not name.startswith("lm_head"):
                        one, other = first.load(name), second.load(name)
                        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert evaluate(hopsparse.load(tmp_path / "own"), windows(mixed.parent)).top1


def test_dequantized_model_has_plain_layers(mixed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixed, dtype=torch.float32)
    expected = model.model.layers[1].mlp.up_proj.matrix.to_dense(torch.float32)
    dense = model.dequantize()
    assert type(dense.model.layers[1].mlp.up_proj) is nn.Linear
    assert torch.equal(dense.model.layers[1].mlp.up_proj.weight, expected)


def test_the_checkpoint_verifies_and_damage_is_found(mixed: Path, tmp_path: Path) -> None:
    checks = {check.name: check.detail for check in verify_checkpoint(mixed)}
    assert checks["model.layers.0.self_attn.k_proj"] == "nm of fp8 16 x 32, valid"
    copy = Path(shutil.copytree(mixed, tmp_path / "copy"))
    shard = sorted(copy.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.up_proj.input_scale"][0] = float("nan")
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=r"up_proj: .*input_scale\[0\] is nan"):
        verify_checkpoint(copy)
    with pytest.raises(CheckpointError, match=r"up_proj: input_scale\[0\] is nan"):
        hopsparse.load(copy)
    tensors["model.layers.0.mlp.up_proj.scales"] = torch.ones(64, 2)
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.scales is stored as F32 \[64, 2\]"):
        hopsparse.load(copy)


@pytest.mark.parametrize("to", ["bitmask", "csr", "hyb"])
def test_converting_keeps_codes_scales_and_what_is_computed(
    mixed: Path, tmp_path: Path, to: str
) -> None:
    convert_checkpoint(mixed, tmp_path / "out", to=to)
    texts = windows(mixed.parent)
    one, other = (hopsparse.load(path, dtype=torch.float32) for path in (mixed, tmp_path / "out"))
    assert other.model.layers[1].mlp.up_proj.matrix.codes_format == to
    assert evaluate(one, texts).nll == evaluate(other, texts).nll
    verify_checkpoint(tmp_path / "out")


def test_what_cannot_hold_a_scheme_is_refused(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="as a plain dense weight"):
        convert_checkpoint(mixed, tmp_path / "dense", to="dense")
    with pytest.raises(UnsupportedError, match="codes and scales"):
        convert_checkpoint(mixed, tmp_path / "other", to="sparse-24-bitmask")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_continues_with_the_same_bytes(
    folder: Path,
    options: SparsifyOptions,
    mixed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Input scales of finished blocks come from their shards."""
    out, real, calls = tmp_path / "out", _stream.prune_path, []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(_stream, "prune_path", stopping)
    with pytest.raises(KeyboardInterrupt):
        sparsify_checkpoint(str(folder / "dense"), out, MIXED, options=options)
    again = replace(options, resume=True)
    turned = replace(MIXED, forms=dict(reversed(FORMS.items())))
    with pytest.raises(CheckpointError, match="the interrupted run has recipe"):
        sparsify_checkpoint(str(folder / "dense"), out, turned, options=again)
    resumed = sparsify_checkpoint(str(folder / "dense"), out, MIXED, options=again)
    assert len(calls) == 4
    first = json.loads((mixed / "report.json").read_text())
    assert resumed["evaluation"] == first["evaluation"]
    for path in mixed.glob("*.safetensors"):
        assert path.read_bytes() == (out / path.name).read_bytes()


def test_the_repeat_command_names_scheme_and_forms(report: dict[str, Any]) -> None:
    words = shlex.split(report["command"])
    assert words[words.index("--quant") + 1] == "int8/int8:static"
    forms = [words[at + 1] for at, word in enumerate(words) if word == "--form"]
    assert forms == [f"{glob}={form}" for glob, form in MIXED.parsed_forms]


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("scheme", ["int8", "fp8/fp8:static", "int4:32/int4"])
def test_one_scheme_everywhere(
    folder: Path, options: SparsifyOptions, tmp_path: Path, scheme: str, method: str
) -> None:
    recipe = Recipe("2:4", method, scheme=scheme)
    report = sparsify_checkpoint(str(folder / "dense"), tmp_path / "out", recipe, options=options)
    model = hopsparse.load(tmp_path / "out", dtype=torch.float32)
    assert model.config.quantization_config.sparse.pattern == f"2:4+{scheme}"
    found = evaluate(model, windows(folder)).perplexity
    assert found == pytest.approx(report["evaluation"][0]["sparse"]["perplexity"], rel=1e-9)


def test_samples_are_of_the_model_that_is_stored(
    folder: Path, options: SparsifyOptions, tmp_path: Path
) -> None:
    recipe = Recipe("2:4", "magnitude", scheme="int4:32/int4")
    choice = replace(options, samples=True)
    save_model(tiny_llama().float(), tmp_path / "dense")
    report = sparsify_checkpoint(str(tmp_path / "dense"), tmp_path / "o", recipe, options=choice)
    model, tokenizer = hopsparse.load(tmp_path / "o"), byte_tokenizer()
    for sample in report["samples"]:
        given = tokenizer(sample["prompt"], return_tensors="pt")
        new = model.generate(**given, max_new_tokens=32, do_sample=False)
        text = tokenizer.decode(new[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == sample["sparse"]


class Mlp(nn.Module):
    """A module of a user, with a layer that calibration may never call."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.idle = (
            nn.Linear(64, 96, dtype=dtype),
            nn.Linear(96, 33, dtype=dtype),
            nn.Linear(64, 8, dtype=dtype),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["int8", "int4:32", "fp8", "int8/int8:static"])
def test_a_module_in_memory(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, items = Mlp(dtype), [torch.randn(32, 64).to(dtype) for _ in range(2)]
    forms = {"down": f"dense+{scheme}", "idle": "dense"}
    recipe = Recipe("2:4", scheme=scheme, forms=forms)
    nearest = Recipe("2:4", "magnitude", scheme=scheme, forms=forms)
    simple = sparsify(copy.deepcopy(model), nearest, items)
    reports = sparsify(model, recipe, items)
    assert [(r.name, r.pattern, r.scheme) for r in reports] == [
        ("up", "2:4", scheme),
        ("down", "dense", scheme),
    ]
    assert type(model.idle) is nn.Linear
    matrix = model.up.matrix
    assert isinstance(matrix, Quantized)
    assert matrix.dtype == dtype
    matrix.validate()
    # The stored weight is what the pass left behind, and near what was there.
    assert torch.equal(matrix.codes().to_dense().float() != 0, matrix.to_dense() != 0)
    kept = matrix.to_dense() != 0
    assert 0.4 < float(kept.float().mean()) <= 0.5
    assert reports[0].output_error < simple[0].output_error
    if scheme.endswith("static"):
        peak = max(float(item.abs().max()) for item in items)
        assert float(matrix.input_scale) == pytest.approx(peak / 127)
    x = torch.randn(5, 64).to(dtype)
    before = model(x)
    save(model, tmp_path / "out")
    loaded = hopsparse.load(tmp_path / "out", into=Mlp(dtype))
    assert torch.equal(loaded(x), before)


def test_statistics_are_of_rounded_inputs() -> None:
    """Inputs of the second layer are rounded, and come from a first whose inputs were rounded."""
    model, x = Mlp(), torch.randn(64, 64)
    recipe = Recipe("2:4", "magnitude", scheme="int8/int4")
    sparsify(model, recipe, [x])
    scheme, up = Scheme("int8", 0, "int4"), model.up
    assert isinstance(up, SparseLinear)
    middle = nn.functional.linear(round_inputs(x, scheme), up.to_dense(), up.bias)
    assert torch.equal(up(x), middle)


def test_a_static_scheme_needs_calibration_that_reaches_the_layer() -> None:
    recipe = Recipe("2:4", "magnitude", scheme="int8/int8:static")
    with pytest.raises(CalibrationError, match="layer up under int8/int8:static"):
        sparsify(Mlp(), recipe)
    with pytest.raises(CalibrationError, match="layer idle: no input token"):
        sparsify(Mlp(), recipe, [torch.randn(4, 64)])
    reports = sparsify(Mlp(), replace(recipe, forms={"idle": "2:4+int8"}), [torch.randn(4, 64)])
    assert len(reports) == 3


def test_forms_that_fit_no_layer() -> None:
    with pytest.raises(ArgumentError, match=r"glob '\*nothing' of layers"):
        sparsify(Mlp(), Recipe("2:4", "magnitude", forms={"*nothing": "6:8"}))
    with pytest.raises(UnsupportedError, match="up: dense by plan"):
        sparsify(Mlp(), Recipe("2:4", "magnitude", forms={"*": "dense"}))
    odd = nn.Sequential(nn.Linear(63, 8), nn.Linear(8, 8))
    reports = sparsify(odd, Recipe("2:4", "magnitude", forms={"0": "dense+int4:32"}))
    assert [report.name for report in reports] == ["0", "1"]
    assert odd[0].matrix.scales.shape == (8, 2)
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    whole[0].weight = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
    kept = sparsify(whole, Recipe("2:4", "magnitude", scheme="int8"))
    assert [report.name for report in kept] == ["1"]

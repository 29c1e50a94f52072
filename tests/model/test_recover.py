from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hopsparse
from hopsparse.errors import ArgumentError, CalibrationError, CheckpointError, UnsupportedError
from hopsparse.formats import NM, Quantized
from hopsparse.models.checkpoint import CheckpointReader
from hopsparse.models.evaluate import compare
from hopsparse.models.low_rank import load_low_rank
from hopsparse.models.options import Progress, SparsifyOptions
from hopsparse.models.recover import RECOVER_REPORT, recover_checkpoint
from hopsparse.models.recover_texts import RecoverTexts, split_windows
from hopsparse.models.sparsify import sparsify_checkpoint
from hopsparse.models.text import leading_windows, read_text
from hopsparse.nn import SparseLinear
from hopsparse.prune import Recipe
from hopsparse.recover import RecoverOptions
from tests.helpers.tiny_models import byte_tokenizer, save_model, tiny_llama, write_text

OPTIONS = RecoverOptions(
    steps=12, lr=2e-3, warmup=0.0, batch_windows=2, window_tokens=24, evaluate_every=6
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recover")
    save_model(tiny_llama(), made / "dense")
    write_text(made / "train.txt", 6000)
    (made / "eval.txt").write_text("Not the same text at all, and not a long one. " * 30)
    return made


def sparsified(folder: Path, form: str = "2:4", **recipe: Any) -> Path:
    """The tiny model, pruned by magnitude; made once a form."""
    out = folder / f"sparse-{form.replace(':', '-')}"
    if not out.exists():
        pattern, _, scheme = form.partition("+")
        settings = SparsifyOptions(
            calibration=folder / "train.txt",
            evaluate=folder / "eval.txt",
            windows=2,
            window_tokens=24,
            samples=False,
        )
        chosen = Recipe(pattern, method="magnitude", scheme=scheme or None, **recipe)
        sparsify_checkpoint(str(folder / "dense"), out, chosen, options=settings)
    return out


def recovered(
    folder: Path, out: Path, form: str = "2:4", texts: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    options = RecoverOptions.from_json({**OPTIONS.to_json(), **changes})
    where: dict[str, Any] = {
        "calibration": folder / "train.txt",
        "evaluate": folder / "eval.txt",
        "windows": 8,
        "held_out": 3,
        "eval_windows": 2,
        "eval_tokens": 24,
    }
    return recover_checkpoint(
        sparsified(folder, form),
        out,
        teacher=str(folder / "dense"),
        options=options,
        texts=RecoverTexts(**(where | (texts or {}))),
    )


def matrices(path: Path) -> dict[str, Any]:
    with CheckpointReader(path) as reader:
        assert reader.sparse is not None
        return {name: reader.matrix(name) for name in reader.sparse.modules}


def test_a_better_checkpoint_of_the_same_form(folder: Path, tmp_path: Path) -> None:
    report = recovered(folder, tmp_path / "out", steps=60, evaluate_every=30)
    curve = report["curve"]
    assert curve[-1]["held_out_loss"] < 0.8 * curve[0]["held_out_loss"]
    old, new = matrices(sparsified(folder)), matrices(tmp_path / "out")
    assert old.keys() == new.keys()
    for name, matrix in new.items():
        assert isinstance(matrix, NM)
        matrix.validate()
        assert matrix.dtype == torch.bfloat16
        assert matrix.nbytes == old[name].nbytes
        before, after = old[name].to_dense(), matrix.to_dense()
        assert not bool((after != 0)[before == 0].any())
        assert not torch.equal(before, after)
    with CheckpointReader(sparsified(folder)) as one, CheckpointReader(tmp_path / "out") as other:
        assert one.config == other.config
        for name in set(one.names()) - {f"{m}.{p}" for m in old for p in ("values", "meta")}:
            assert torch.equal(one.load(name), other.load(name))
    assert json.loads((tmp_path / "out" / RECOVER_REPORT).read_text()) == report
    assert not (tmp_path / "out.partial").exists()


def test_what_the_report_says_is_what_loads(folder: Path, tmp_path: Path) -> None:
    # The last one has no teacher any more when it is judged.
    variants: tuple[dict[str, Any], ...] = (
        {"train": "all"},
        {"lora_rank": 2},
        {"cache_teacher": True},
    )
    for number, changes in enumerate(variants):
        out = tmp_path / f"out{number}"
        report = recovered(folder, out, **changes)
        windows = leading_windows(read_text(folder / "eval.txt"), byte_tokenizer(), 2, 24)
        model = hopsparse.load(out, dtype=torch.float32)
        if "lora_rank" in changes:
            assert len(load_low_rank(model, out)) == len(report["layers"])
        row = report["evaluation"][0]
        before = hopsparse.load(sparsified(folder), dtype=torch.float32)
        dense = tiny_llama().float()
        for student, role in ((before, "before"), (model, "after")):
            found = compare(dense, student, windows)
            assert row[role] == {
                "perplexity": found.b.perplexity,
                "agreement": found.agreement,
                "kl": found.kl,
            }
            assert found.a.perplexity == row["dense"]["perplexity"]


def test_the_report_of_the_pruned_model_becomes_that_of_the_recovered_one(
    folder: Path, tmp_path: Path
) -> None:
    sparse = sparsified(folder)
    found = recovered(folder, tmp_path / "out", lora_rank=2)
    old, new = (json.loads((f / "report.json").read_text()) for f in (sparse, tmp_path / "out"))
    assert new["layers"] == old["layers"]
    assert new["bytes"]["sparse"] == old["bytes"]["sparse"] + found["low_rank"]["bytes"]
    assert [row["sparse"] for row in new["evaluation"]] == [
        row["after"] for row in found["evaluation"]
    ]
    assert new["recover"]["curve"] == found["curve"]
    assert new["recover"]["tokens"] == 12 * 2 * 24
    own = f"hopsparse recover {sparse} -o {tmp_path / 'out'} --teacher {folder / 'dense'} "
    assert new["command"].splitlines()[1].startswith(own + "--steps 12 --lr 0.002")
    # Without a report of ours there is none to continue.
    other = Path(shutil.copytree(sparse, tmp_path / "other"))
    (other / "report.json").write_text('{"schema": "of something else"}')
    recover_checkpoint(
        other,
        tmp_path / "plain",
        teacher=str(folder / "dense"),
        options=OPTIONS,
        texts=RecoverTexts(folder / "train.txt", folder / "eval.txt", 8, 3, 2, 24),
    )
    assert not (tmp_path / "plain" / "report.json").exists()


@pytest.mark.parametrize(
    "form", ["6:8", "unstructured:0.5", "block:4x4", "2:4+int8", "2:4+int4:32"]
)
def test_every_form_keeps_its_zeros(form: str, folder: Path, tmp_path: Path) -> None:
    report = recovered(folder, tmp_path / "out", form, steps=40, evaluate_every=20)
    curve = report["curve"]
    assert report["best"]["held_out_loss"] < curve[0]["held_out_loss"]
    old, new = matrices(sparsified(folder, form)), matrices(tmp_path / "out")
    for name, matrix in new.items():
        matrix.validate()
        assert matrix.name == old[name].name
        if isinstance(matrix, Quantized):
            assert matrix.scheme == old[name].scheme
            assert matrix.codes_format == old[name].codes_format
        elif form.startswith("unstructured"):
            assert not bool((matrix.to_dense() != 0)[old[name].to_dense() == 0].any())
    hopsparse.load(tmp_path / "out")


def test_low_rank_is_counted(folder: Path, tmp_path: Path) -> None:
    report = recovered(folder, tmp_path / "out", lora_rank=2)
    path = tmp_path / "out" / "low_rank" / "products.safetensors"
    stored = hopsparse.files.open_tensors(path)
    assert report["low_rank"]["bytes"] == sum(
        stored.get_tensor(name).nbytes
        for name in stored.keys()  # noqa: SIM118
    )
    assert report["low_rank"]["time_us"] > 0
    old, new = matrices(sparsified(folder)), matrices(tmp_path / "out")
    assert all(torch.equal(old[n].to_dense(), new[n].to_dense()) for n in old)
    with pytest.raises(UnsupportedError, match="has low-rank products beside its weights"):
        recover_checkpoint(
            tmp_path / "out", tmp_path / "twice", teacher=str(folder / "dense"), options=OPTIONS
        )
    with pytest.raises(CheckpointError, match="holds a product for"):
        load_low_rank(nn.Identity(), tmp_path / "out")


class Killed(Exception):
    """Stands for the end of a process."""


def test_resumed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    recovered(folder, tmp_path / "whole")

    def kill(step: Progress) -> None:
        if (step.phase, step.done) == ("recover", 7):
            raise Killed

    where = RecoverTexts(
        folder / "train.txt", folder / "eval.txt", 8, 3, eval_windows=2, eval_tokens=24
    )
    options = RecoverOptions.from_json({**OPTIONS.to_json(), "save_every": 3})
    with pytest.raises(Killed):
        recover_checkpoint(
            sparsified(folder),
            tmp_path / "out",
            teacher=str(folder / "dense"),
            options=options,
            texts=where,
            progress=kill,
        )
    with pytest.raises(CheckpointError, match="holds an interrupted run"):
        recovered(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="the interrupted run has options"):
        recovered(folder, tmp_path / "out", texts={"resume": True}, steps=13)
    recovered(folder, tmp_path / "out", texts={"resume": True})
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert not list((tmp_path / "out").glob("recover-state*"))


def test_another_optimizer_can_be_plugged_in(folder: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def descent(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        seen.extend(groups[0]["names"])
        return torch.optim.SGD(groups, lr=0.1)

    recover_checkpoint(
        sparsified(folder),
        tmp_path / "out",
        teacher=str(folder / "dense"),
        options=OPTIONS,
        texts=RecoverTexts(folder / "train.txt", folder / "eval.txt", 8, 3, 2, 24),
        make_optimizer=descent,
    )
    assert len(seen) == 21
    assert "model.layers.0.self_attn.q_proj.weight" in seen


def test_held_out_windows_share_no_token_with_training_windows() -> None:
    ids = torch.arange(1000)
    corpus = split_windows(ids, 200, 5, 32, seed=3)
    kept: set[int] = {int(token) for window in corpus.held_out for token in window[0]}
    seen: set[int] = {int(token) for window in corpus.train for token in window[0]}
    assert len(kept) == 5 * 32
    assert not kept & seen
    assert {window.shape for window in corpus.train} == {torch.Size([1, 32])}
    again = split_windows(ids, 200, 5, 32, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(corpus.train, again.train, strict=True))
    other: list[Tensor] = list(split_windows(ids, 200, 5, 32, seed=4).held_out)
    assert not torch.equal(torch.cat(other), torch.cat(list(corpus.held_out)))


def test_inputs_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no teacher.*--teacher MODEL"):
        recover_checkpoint(sparsified(folder), tmp_path / "out", teacher=None, options=OPTIONS)
    with pytest.raises(CheckpointError, match="is a dense checkpoint"):
        recover_checkpoint(
            folder / "dense", tmp_path / "out", teacher=str(folder / "dense"), options=OPTIONS
        )
    with pytest.raises(CalibrationError, match="more than 300 windows"):
        recovered(folder, tmp_path / "out", texts={"held_out": 300})
    with pytest.raises(CalibrationError, match="as evaluation text too"):
        recovered(folder, tmp_path / "out", texts={"evaluate": folder / "train.txt"})
    with pytest.raises(ArgumentError, match=r"windows of 129 tokens.*context of 128"):
        recovered(folder, tmp_path / "out", window_tokens=129)
    with pytest.raises(ArgumentError, match="--eval-tokens 128"):
        recovered(folder, tmp_path / "out", texts={"eval_tokens": 129})
    short = write_text(tmp_path / "short.txt", 20)
    with pytest.raises(CalibrationError, match="at least one window of 24"):
        recovered(folder, tmp_path / "out", texts={"calibration": short})
    with pytest.raises(ArgumentError, match="resume and overwrite"):
        RecoverTexts(resume=True, overwrite=True)
    with pytest.raises(ArgumentError, match="device 'tpu'"):
        recovered(folder, tmp_path / "out", texts={"device": "tpu"})
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_teacher_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    save_model(tiny_llama(num_hidden_layers=2), tmp_path / "other")
    with pytest.raises(ArgumentError, match=r"teacher other in which model.layers.2.*missing"):
        recover_checkpoint(
            sparsified(folder),
            tmp_path / "out",
            teacher=str(tmp_path / "other"),
            options=OPTIONS,
            texts=RecoverTexts(folder / "train.txt", folder / "eval.txt", 8, 3, 2, 24),
        )


def test_sparse_layers_are_sparse_after_sr_ste(folder: Path, tmp_path: Path) -> None:
    recovered(folder, tmp_path / "out", masks="sr-ste", lr=0.02, steps=20, evaluate_every=20)
    model = hopsparse.load(tmp_path / "out", dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, SparseLinear)]
    assert len(layers) == 21
    for layer in layers:
        layer.matrix.validate()
        assert int((layer.to_dense().view(-1, 4) != 0).sum(-1).max()) <= 2


def test_layer_wise_brings_a_llama_closer(folder: Path, tmp_path: Path) -> None:
    report = recovered(folder, tmp_path / "out", level="layer-wise", steps=20, evaluate_every=20)
    assert report["tokens"] == 3 * 20 * 2 * 24
    for stage in range(3):
        first, last = (row for row in report["curve"] if row["stage"] == stage)
        assert last["held_out_loss"] < first["held_out_loss"]

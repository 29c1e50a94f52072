"""Scripts under benchmarks/ say what is wrong with their words, and where a GPU is missing."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from hopsparse.errors import UnsupportedError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
    import_module(script).main()


@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        ("quantize_rows", ("--codes", "int8,int9"), "--codes 'int9': one of int8, fp8, int4"),
        ("quantize_rows", ("--sources", "norms"), "--sources 'norms': one of plain"),
        ("quantize_rows", ("--rounds", "0"), "--rounds 0: at least 1"),
        ("candidates", ("--fit", "no-such-file.jsonl"), "no such file"),
        ("candidates", ("--out", "rows.jsonl", "--tokens", "0"), "at least 1"),
        ("candidates", ("--out", "rows.jsonl", "--rounds", "0"), "at least 1"),
        ("comm_convergence", ("--methods", "int5"), "--methods 'int5': one of dense"),
        ("hybrid_gradient", ("--remainders", "int4,int5"), "--remainders 'int5': one of int8"),
        ("hybrid_gradient", ("--dtypes", "float64"), "--dtypes 'float64': one of float32"),
        ("launches", ("--rounds", "0"), "--rounds 0: at least 1"),
        ("attention_decode", ("--out", "rows.jsonl", "--budget", "5"), "--budget 5: at least 64"),
        ("attention_scores", ("--out", "rows.jsonl", "--rounds", "0"), "--rounds 0: at least 1"),
        ("attention_training", ("--out", "rows.jsonl", "--rounds", "0"), "--rounds 0: at least 1"),
        ("selection", ("--out", "rows.jsonl", "--rounds", "0"), "--rounds 0: at least 1"),
        ("spmm_csr", ("--dtypes", "float64"), "--dtypes 'float64': one of bfloat16"),
        ("spmm_csr", ("--rounds", "0"), "--rounds 0: at least 1"),
        ("spmm_bsr", ("--out", "rows.jsonl", "--blocks", "24"), "--blocks 24: a multiple of 16"),
        ("spmm_bsr", ("--out", "rows.jsonl", "--sparsities", "1.0"), "from 0 to below 1"),
        ("spmm_bsr", ("--out", "rows.jsonl", "--shape", "4096"), "'4096': OUTxK"),
        ("tensor_parallel", ("--shapes", "mlp,moe"), "--shapes 'moe': one of mlp"),
        ("tensor_parallel", ("--tokens", "16,0"), "--tokens 0: at least 1"),
        ("comm_nccl", ("--links", "nvlink,wifi"), "--links 'wifi': one of nvlink"),
        ("comm_nccl", ("--methods", "int5"), "--methods 'int5': one of dense"),
        ("comm_nccl", ("--steps", "0"), "--steps 0: at least 1"),
        ("chain", ("--layers", "0"), "--layers 0: at least 1"),
        ("chain", ("--tokens", "16", "0"), "--tokens 0: at least 1"),
    ],
)
def test_words_that_mean_nothing_are_named(
    script: str,
    words: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, script, *words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_without_a_gpu_rows_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="sees no GPU"):
        run(monkeypatch, "quantize_rows", "--out", str(tmp_path / "rows.jsonl"))
    assert not list(tmp_path.iterdir())

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hopsparse.models.opened import open_model
from hopsparse.models.text import read_text
from tests.cli.conftest import Run
from tests.helpers.tiny_llama import write_tiny_llama
from tests.helpers.tiny_models import save_model, tiny_llama

RunJson = Callable[..., Any]
SIZES = ("--window-tokens", 32, "--windows", 3)


def test_numbers_of_one_model(run_json: RunJson, dense_model: Path, text_file: Path) -> None:
    found = run_json("evaluate", dense_model, "--text", text_file, *SIZES)
    assert found["model"]["kind"] == "dense"
    assert found["model"]["bytes"] > 0
    assert found["against"] is None
    (row,) = found["texts"]
    assert (row["text"], row["windows"], row["tokens"]) == (text_file.name, 3, 3 * 31)
    assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))
    assert row["nll_standard_error"] > 0


def test_bundled_texts_by_default(run: Run, dense_model: Path) -> None:
    result = run("evaluate", dense_model, *SIZES)
    assert result.exit_code == 0
    assert "held_out" in result.stdout
    assert "constitution" in result.stdout
    assert "±" in result.stdout
    assert "evaluate 6/6 constitution" in result.stderr


def test_sparse_checkpoint_has_the_perplexity_of_its_report(
    run_json: RunJson, sparse_model: Path, sparse_json: dict[str, Any], text_file: Path
) -> None:
    sizes = ("--window-tokens", 32, "--windows", 2)
    found = run_json("evaluate", sparse_model, "--text", text_file, *sizes)
    reported = sparse_json["evaluation"][0]["sparse"]["perplexity"]
    assert found["texts"][0]["perplexity"] == pytest.approx(reported, rel=1e-5)
    assert found["model"]["forms"] == {"2:4": 14}
    assert found["model"]["kept_dense"] == 1


def test_against_a_dense_model(
    run_json: RunJson, run: Run, sparse_model: Path, dense_model: Path, text_file: Path
) -> None:
    arguments = ("evaluate", sparse_model, "--against", dense_model, "--text", text_file, *SIZES)
    found = run_json(*arguments)
    (row,) = found["texts"]
    assert found["against"]["kind"] == "dense"
    assert row["ratio"] == pytest.approx(
        row["model"]["perplexity"] / row["reference"]["perplexity"]
    )
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    assert row["kl"] > 0
    assert 0 <= row["agreement"] <= 1
    table = run(*arguments).stdout
    assert "ratio (95 %)" in table
    assert f"{row['kl']:.4f}" in table


def test_compare_says_what_both_are(
    run_json: RunJson, run: Run, dense_model: Path, sparse_model: Path, text_file: Path
) -> None:
    arguments = ("compare", dense_model, sparse_model, "--text", text_file, *SIZES)
    found = run_json(*arguments)
    assert (found["a"]["kind"], found["b"]["kind"]) == ("dense", "sparse")
    assert found["texts"][0]["model"]["tokens"] == 3 * 31
    shown = run(*arguments)
    assert shown.exit_code == 0
    assert "bytes   " in shown.stdout
    assert "14 x 2:4, 1 kept dense" in shown.stdout
    # The same numbers as evaluate --against.
    other = run_json("evaluate", sparse_model, "--against", dense_model, *arguments[3:])
    assert other["texts"] == found["texts"]


def test_model_against_itself_and_its_copy(
    run_json: RunJson, dense_model: Path, text_file: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(dense_model, tmp_path / "copy")
    for other in (dense_model, copied):
        found = run_json("compare", dense_model, other, "--text", text_file, *SIZES)
        (row,) = found["texts"]
        assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (1.0, 1.0, 1.0)
        assert (row["kl"], row["agreement"]) == (0.0, 1.0)


def test_one_window_has_no_error(run: Run, dense_model: Path, text_file: Path) -> None:
    sizes = ("--text", text_file, "--window-tokens", 32, "--windows", 1)
    assert run("evaluate", dense_model, *sizes).stdout.count("±") == 1  # The legend alone.
    shown = run("compare", dense_model, dense_model, *sizes).stdout
    assert "1.000" in shown
    assert " to " not in shown


def test_vocabularies_that_differ(run: Run, dense_model: Path, tmp_path: Path) -> None:
    other = save_model(tiny_llama(), tmp_path / "other")
    result = run("compare", dense_model, other, *SIZES)
    assert result.exit_code == 2
    assert "vocabularies differ" in result.stderr
    assert "258" in result.stderr


def test_tokenizers_that_cut_differently(run: Run, dense_model: Path, tmp_path: Path) -> None:
    """The same words with another splitting: losses would count other tokens."""
    other = Path(shutil.copytree(dense_model, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = run("compare", dense_model, other, *SIZES)
    assert result.exit_code == 2
    assert "differently" in result.stderr


def test_nan_is_no_number(run: Run, run_json: RunJson, tmp_path: Path, text_file: Path) -> None:
    broken = write_tiny_llama(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    result = run("evaluate", broken, "--text", text_file, *SIZES)
    assert result.exit_code == 1
    assert "NaN logits in window 1, first at token 1 of 32" in result.stderr
    found = run_json("evaluate", broken, "--text", text_file, *SIZES, exit_code=1)
    assert found["error"]["kind"] == "VerificationError"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--windows", 0), "windows = 0"),
        (("--window-tokens", 1), "window_tokens = 1"),
        (("--window-tokens", 500), "at most its context of 128"),
        (("--dtype", "int8"), "dtype 'int8'"),
        (("--device", "nowhere"), "device 'nowhere'"),
        (("--text", "no/such.txt"), "cannot be read"),
        (("--against", "no/such/model"), "no/such/model"),
    ],
)
def test_options_that_mean_nothing(
    run: Run, dense_model: Path, arguments: tuple[object, ...], words: str
) -> None:
    result = run("evaluate", dense_model, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_text_shorter_than_a_window(run: Run, dense_model: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    for arguments in (("evaluate", dense_model), ("compare", dense_model, dense_model)):
        result = run(*arguments, "--text", tmp_path / "short.txt", *SIZES)
        assert result.exit_code == 2
        assert "text 'short.txt' has 9 tokens" in result.stderr


def test_two_texts_of_one_name(
    run: Run, dense_model: Path, tmp_path: Path, text_file: Path
) -> None:
    same = Path(shutil.copy(text_file, tmp_path / text_file.name))
    result = run("evaluate", dense_model, "--text", text_file, "--text", same, *SIZES)
    assert result.exit_code == 2
    assert "two texts called" in result.stderr


def test_tokenizer_that_is_missing(run: Run, damaged: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (damaged / name).unlink()
    result = run("evaluate", damaged, *SIZES)
    assert result.exit_code == 2
    assert "tokenizer" in result.stderr


def test_token_without_an_embedding(run: Run, tmp_path: Path, text_file: Path) -> None:
    small = write_tiny_llama(tmp_path / "small", vocab_size=40)
    result = run("evaluate", small, "--text", text_file, *SIZES)
    assert result.exit_code == 2
    assert "vocabulary of 40" in result.stderr


def test_arithmetic_in_sixteen_bits(dense_model: Path, text_file: Path) -> None:
    opened = open_model(str(dense_model), dtype=torch.bfloat16)
    assert {weight.dtype for weight in opened.model.parameters()} == {torch.bfloat16}
    # Rotary frequencies are no weights: in bfloat16 they would turn by wrong angles.
    assert {buffer.dtype for buffer in opened.model.buffers()} == {torch.float32}
    assert len(opened.windows(read_text(text_file), 2, 32)) == 2


def write_task(folder: Path) -> Path:
    """A multiple-choice task over four questions in a file next to it."""
    rows = [
        {"question": f"{start} the engineers made the", "choices": [" sparse", " x"], "answer": 0}
        for start in ("First", "Then", "Later", "At last")
    ]
    data = folder / "engineers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "engineers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    # JSON is YAML.
    (folder / "engineers.yaml").write_text(json.dumps(task))
    return folder


def test_tasks(
    run: Run, run_json: RunJson, sparse_model: Path, text_file: Path, tmp_path: Path
) -> None:
    """Without lm-eval its absence is said before anything is loaded; with it the task is run."""
    arguments = ("evaluate", sparse_model, "--text", text_file, *SIZES, "--tasks")
    own = ("engineers", "--task-path", write_task(tmp_path))
    if find_spec("lm_eval") is None:
        result = run(*arguments, *own)
        assert result.exit_code == 2
        assert 'pip install "hopsparse[eval]"' in result.stderr
        assert "reading" not in result.stderr
        return
    found = run_json(*arguments, *own, "--limit", 3)
    accuracy = found["tasks"][str(sparse_model)]["engineers"]["acc,none"]
    assert accuracy in [pytest.approx(right / 3) for right in range(4)]
    for wrong, words in (
        (("no_such_task",), "task 'no_such_task'"),
        (("engineers", "--task-path", tmp_path / "nowhere"), "is no folder"),
        ((*own, "--limit", 0), "limit = 0"),
    ):
        result = run(*arguments, *wrong)
        assert result.exit_code == 2
        assert words in result.stderr

"""`hopsparse generate`: text on standard output, the rest on standard error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import Run

RunJson = Callable[..., Any]


def test_text_goes_to_standard_output(run: Run, run_json: RunJson, sparse_model: Path) -> None:
    words = ("generate", sparse_model, "--prompt", "In the beginning", "--max-new-tokens", 12)
    found = run_json(*words)
    assert (found["prompt"], found["new_tokens"]) == ("In the beginning", 12)
    result = run(*words)
    assert result.exit_code == 0
    assert result.stdout == found["prompt"] + found["text"] + "\n"
    assert "12 tokens, text after" in result.stderr
    assert run_json(*words, "--no-fuse")["fused_layers"] == 0


def test_what_cannot_be_is_named(run: Run, sparse_model: Path) -> None:
    for words, told in (
        (("--prompt", ""), "a prompt of 0 tokens"),
        (("--prompt", "a", "--dtype", "int8"), "dtype 'int8'"),
        (("--prompt", "a", "--max-new-tokens", 1000), "its context of"),
        (("--prompt", "a", "--temperature", -1), "Sampling"),
    ):
        result = run("generate", sparse_model, *words)
        assert result.exit_code == 2
        assert told in result.stderr

"""Tiny models, made once, and a way to run commands on them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hopsparse.cli import app
from tests.helpers.tiny_llama import write_text, write_tiny_llama

SMALL = ("--windows", "2", "--window-tokens", "32", "--eval-windows", "2", "--no-samples")
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run a command in this process; unexpected exceptions come through."""

    def call(*arguments: object) -> Result:
        words = [str(argument) for argument in arguments]
        return CliRunner().invoke(app, words, catch_exceptions=False)

    return call


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Run a command with --json; standard output must be one JSON document."""

    def call(*arguments: object, exit_code: int = 0) -> Any:
        result = run(*arguments, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return call


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a command as users do."""
    program = "import sys; sys.argv[0] = 'hopsparse'; from hopsparse.cli import main; main()"
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("dense") / "tiny")


@pytest.fixture(scope="session")
def sparse_json(
    dense_model: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What `sparsify --json` says about the checkpoint of `sparse_model`."""
    out = tmp_path_factory.mktemp("sparse") / "tiny-sparse"
    texts = ("--calibration", str(text_file), "--eval", str(text_file))
    command = ["sparsify", str(dense_model), "-o", str(out), *texts, *SMALL, "--json"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="session")
def sparse_model(sparse_json: dict[str, Any]) -> Path:
    return Path(sparse_json["out"])


@pytest.fixture
def damaged(sparse_model: Path, tmp_path: Path) -> Path:
    """A copy of the sparse checkpoint, to be damaged."""
    return Path(shutil.copytree(sparse_model, tmp_path / "damaged"))

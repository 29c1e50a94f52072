from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse import ops
from hopsparse.compiler import cache, nvrtc, source
from hopsparse.compiler.cache import decode
from hopsparse.ops.plans import plans
from tests.cli.conftest import Run
from tests.helpers.tiny_kernels import write_kernels

PLAN = """
from tests.helpers.tiny_kernels import tiny_spec

SASS = ("STG",)

def every_spec():
    return [tiny_spec(value) for value in range(30)]
"""
WRONG = PLAN.replace("range(30)]", 'range(2)] + [tiny_spec(9, extra="oops;")]')
# As `main`, with one more operator.
INTERRUPTED = """
import sys
from pathlib import Path
from hopsparse import ops
from hopsparse.cli import main
from hopsparse.compiler import cache, source
root = Path(sys.argv.pop())
ops.__path__.append(str(root / "ops"))
source._package = lambda: root
sys.argv[0] = "hopsparse"
main()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operator `tiny` beside the real ones, and an empty cache."""
    root = write_kernels(tmp_path / "root")
    (root / "ops/tiny/__init__.py").touch()
    (root / "ops/tiny/plan.py").write_text(PLAN)
    monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(root / "ops")])
    monkeypatch.setattr(source, "_package", lambda: root)
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    for name in [name for name in sys.modules if name.startswith("hopsparse.ops.tiny")]:
        monkeypatch.delitem(sys.modules, name)
    return root


def test_kernels_are_compiled_and_then_found(
    root: Path, tmp_path: Path, run_json: Callable[..., Any]
) -> None:
    first = run_json("compile", "--op", "tiny")
    assert Path(first["cache"]) == tmp_path / "cache" / "kernels"
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 30
    kernels = first["kernels"]
    assert [each["name"] for each in kernels] == [f"kernel{value}" for value in range(30)]
    assert not any(each["cached"] or each["error"] or each["spill_bytes"] for each in kernels)
    assert all(0 < each["registers"] <= 32 and each["compile_ms"] > 0 for each in kernels)
    cache._shared.cache_clear()  # as in a new process
    again = run_json("compile", "--op", "tiny")
    assert all(each["cached"] for each in again["kernels"])
    # What was compiled then is told, and not how long reading took.
    assert again["kernels"] == [{**each, "cached": True} for each in kernels]


def test_a_table_and_progress_are_printed(root: Path, run: Run) -> None:
    result = run("compile", "--op", "tiny", "--workers", "1")
    assert "tiny/kernel29" in result.stdout
    assert "30 kernels in " in result.stdout
    assert "compile 30/30 tiny/kernel29, 0:00 left" in result.stderr


def test_a_kernel_that_does_not_compile_ends_with_1(
    root: Path, run: Run, run_json: Callable[..., Any]
) -> None:
    (root / "ops/tiny/plan.py").write_text(WRONG)
    told = run_json("compile", "--op", "tiny", exit_code=1)
    *good, wrong = told["kernels"]
    assert all(each["error"] is None for each in good)
    assert wrong["error"]["kind"] == "CompileError"
    assert 'identifier "oops" is undefined' in wrong["error"]["got"]
    result = run("compile", "--op", "tiny")
    assert result.exit_code == 1
    assert "does not compile" in result.stdout
    assert 'identifier "oops" is undefined' in result.stderr


def test_all_operators_are_those_with_a_plan(root: Path) -> None:
    assert "tiny" in plans()
    assert set(plans()) - {"tiny"} <= {path.name for path in Path(ops.__file__).parent.iterdir()}


@pytest.mark.parametrize("words", [(), ("--op", "tiny", "--all"), ("--op", "none")])
def test_a_wrong_choice_is_refused(root: Path, run: Run, words: tuple[str, ...]) -> None:
    result = run("compile", *words)
    assert result.exit_code == 2
    assert "--all" in result.stderr


@pytest.mark.parametrize("words", [("--op", "tiny"), ("--all",)])
def test_without_a_compiler_it_says_what_to_install(
    root: Path,
    tmp_path: Path,
    run_json: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr(nvrtc, "_folders", lambda: iter([tmp_path]))
    nvrtc.default_nvrtc.cache_clear()
    try:
        error = run_json("compile", *words, exit_code=2)["error"]
    finally:
        nvrtc.default_nvrtc.cache_clear()
    assert error["kind"] == "UnsupportedError"
    assert error["try"] == "pip install 'nvidia-cuda-nvrtc>=13.0,<14'"


def test_a_file_where_the_cache_should_be_costs_time_alone(
    root: Path, tmp_path: Path, run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        told = run_json("compile", "--op", "tiny")
        assert not any(each["cached"] or each["error"] for each in told["kernels"])
        cache._shared.cache_clear()  # as in a new process


def test_interrupting_leaves_whole_entries(root: Path, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "compile", "--op", "tiny", "--workers", "1", root],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stderr is not None
    assert child.stderr.readline().startswith("compile 1/30 tiny/kernel0")
    child.send_signal(signal.SIGINT)
    told, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "of 30 kernels were ready and stay in" in errors
    assert told == ""
    files = list((tmp_path / "cache" / "kernels").iterdir())
    assert 0 < len(files) < 30
    assert all(decode(path.read_bytes(), path.stem) for path in files)

"""The examples of docs/comm.md and docs/parallel.md, as they stand there, in two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["comm.md", "parallel.md"])
def test_the_example_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    told = re.search(r"prints `([^`]*)`", page)
    assert told is not None
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Not line by line: one rank may write between the text of another and the end of its line.
    assert done.stdout.replace("\n", "") == " ".join(told[1].split()) * 2, done.stderr

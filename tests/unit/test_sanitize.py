"""The script that runs compute-sanitizer: what it makes of a report, and which checks it runs."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sanitize import CHECKS, chosen, summary_of

ROOT = Path(__file__).parents[2]
_FAKE = """#!{python}
import json, sys
if "--version" in sys.argv:
    print("NVIDIA (R) Compute Sanitizer\\nVersion 2025.3.0 (build 1)")
    sys.exit()
log = sys.argv[sys.argv.index("--log-file") + 1]
told = sys.argv[sys.argv.index("--checks") + 1]
open(log, "w").write({log!r})
rows = [dict(check=str(i), ok=True, detail="", kernels=["a/b"]) for i in range({checks})]
open(told, "w").write("".join(json.dumps(row) + "\\n" for row in rows))
"""


def test_each_check_is_there_once_and_wants_a_kernel() -> None:
    checks = chosen()
    assert len({check.name for check in checks}) == len(CHECKS)
    assert all(check.kernel for check in checks)


def test_reports_are_read() -> None:
    report = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at spmm_nm_kernel+0x3f0
========= ERROR SUMMARY: 2 errors
"""
    found = summary_of(report)
    assert (found["errors"], found["warnings"]) == (2, 0)
    assert found["report"][0] == "Invalid __global__ write of size 2 bytes"
    assert summary_of("========= COMPUTE-SANITIZER\nError: Device not supported")["errors"] is None


@pytest.mark.parametrize(
    ("log", "checks", "code"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", len(CHECKS), 0),
        ("========= ERROR SUMMARY: 3 errors\n", len(CHECKS), 1),
        ("", len(CHECKS), 1),
    ],
)
def test_rows_are_kept(log: str, checks: int, code: int, tmp_path: Path) -> None:
    fake, out = tmp_path / "sanitizer", tmp_path / "rows.jsonl"
    fake.write_text(_FAKE.format(python=sys.executable, log=log, checks=checks))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    command = [sys.executable, str(ROOT / "benchmarks/sanitize.py"), "--sanitizer", str(fake)]
    done = subprocess.run(
        [*command, "--tool", "memcheck", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    row = json.loads(out.read_text())
    assert row["tool"] == "memcheck"
    assert row["compute_sanitizer"] == "2025.3.0"
    assert row["kernels"] == ["a/b"]
    assert (row["checks"], row["of_checks"]) == (checks, len(CHECKS))

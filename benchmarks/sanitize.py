"""Run small checks of every operator under compute-sanitizer, and keep its summaries.

    python benchmarks/sanitize.py --out benchmarks/results/h200/sanitizer.jsonl

memcheck sees what is read or written outside of a tensor, racecheck what warps of a block read and
write in shared memory without a barrier between them, synccheck barriers that not all reach. Of
copies by TMA and of clusters racecheck sees a part only. torch's caching of memory is off, so that
each tensor has bounds of its own. Needs an H100 or H200, compute-sanitizer and compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hopsparse.measure.record import append, check_can_append, environment

TOOLS = ("memcheck", "synccheck", "racecheck")
#: Checks by the start of their names: each kernel family once or twice, and nothing large.
CHECKS = (
    "pack_nm ragged nm-2:4 bfloat16",
    "pack_nm ragged-magnitude nm-2:4 bfloat16",
    "spmm_nm ragged nm-2:4 bfloat16",
    "spmm_nm seventeen-tokens nm-2:4 bfloat16",
    "spmm_nm_scaled 1x64x128 nm-2:4 int8",
    "spmm_nm_scaled 1x64x128 nm-2:4 e4m3-promoted",
    "spmm_nm_scaled 1x64x128 nm-2:4 e4m3-int4-fast",
    "spmm_nm_int4 1x64x128 nm-2:4 int4:64/bfloat16",
    "spmm_nm_experts one-each nm-2:4 bfloat16",
    "spmm_bsr smoke bsr-32x32 bfloat16",
    "spmm_bsr three-tokens bsr-64x64 bfloat16",
    "spmm_bsr act-relu-mma",
    "csr_matmul empty-ends csr bfloat16",
    "csr_matmul huge-rows csr float32",
    "sddmm_csr empty-ends csr bfloat16",
    "spmm_csr smoke csr bfloat16",
    "quantize_rows short-block bfloat16-e4m3",
    "quantize_rows warp-norm bfloat16-int8",
    "select off-tile-rank float32",
    "select beyond-a-block-rank float32",
    "score_blocks one-head-128-bound bfloat16",
    "append_keys one-head-128 bfloat16",
    "attend_decode 64x4-page-16 bfloat16",
    "attend_prefill 64-block-192-page-64-group-1 bfloat16",
    "im2col no-padding bfloat16",
    "rope_append 128x5 bfloat16",
    "select_blocks 64x4-bound-ends bfloat16",
    "select_blocks 64x4-mean-newest bfloat16",
    "hybrid_gradient 513-normal float32-int4",
)
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_WARNINGS = re.compile(r"\((\d+) errors?, (\d+) warnings?\)")
_LINES_KEPT = 20
_FAILED = 9


def chosen() -> list[Any]:
    """The checks, in the order of `CHECKS`; each name is there."""
    from hopsparse.ops.checks import all_checks

    checks, found = all_checks(), []
    for name in CHECKS:
        own = [check for check in checks if check.name.startswith(name)]
        assert own, f"no check is called {name}"
        found.append(own[0])
    return found


def run_checks(told: Path) -> None:
    """What the sanitizer watches: a line of JSON for each check that ends."""
    import torch

    from hopsparse.verify import outcome_of

    with told.open("w", encoding="utf-8") as file:
        for check in chosen():
            found = outcome_of(check, torch.device("cuda"))
            row = {"check": check.name, "ok": found.ok, "detail": found.detail}
            file.write(json.dumps(row | {"kernels": found.kernels}) + "\n")
            file.flush()


def sanitize(tool: str, sanitizer: str, seconds: float, more: list[str]) -> dict[str, Any]:
    """Run the checks under a tool; gives its summary and how far it came."""
    with tempfile.TemporaryDirectory() as name:
        log, told = Path(name, "log"), Path(name, "told")
        watched = [sys.executable, __file__, "--checks", str(told)]
        options = ["--tool", tool, "--log-file", str(log), "--error-exitcode", str(_FAILED), *more]
        started = time.monotonic()
        code, said = _run([sanitizer, *options, *watched], seconds)
        rows = [json.loads(line) for line in _text(told).splitlines()]
        return {
            "tool": tool,
            **summary_of(_text(log)),
            "ended": code is not None,
            "exit_code": code,
            "checks": len(rows),
            "of_checks": len(CHECKS),
            "wrong": [f"{row['check']}: {row['detail']}" for row in rows if not row["ok"]],
            "kernels": sorted({kernel for row in rows for kernel in row["kernels"]}),
            "said": [] if len(rows) == len(CHECKS) else said.splitlines()[-5:],
            "seconds": round(time.monotonic() - started, 1),
        }


def _run(command: list[str], seconds: float) -> tuple[int | None, str]:
    """Exit code, None if it took too long, and what went to standard error."""
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=seconds)[1]
        return process.returncode, said
    except subprocess.TimeoutExpired:
        # What is watched is a process of its own, and would keep the GPU.
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[1]


def summary_of(log: str) -> dict[str, Any]:
    """Errors, warnings and the first lines of a report; errors are None without a summary.

    Example:
        >>> summary_of("========= ERROR SUMMARY: 0 errors")
        {'errors': 0, 'warnings': 0, 'report': []}
        >>> log = "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)"
        >>> summary_of(log)["errors"], summary_of(log)["warnings"]
        (1, 2)
    """
    errors, warnings, report = None, 0, []
    for line in log.splitlines():
        said = line.strip("= ").strip()
        if found := _SUMMARY.search(line):
            errors = int(found[1] or found[2])
            if split := _WARNINGS.search(line):
                errors, warnings = int(split[1]), int(split[2])
        elif said and said != "COMPUTE-SANITIZER":
            report.append(said)
    return {"errors": errors, "warnings": warnings, "report": report[:_LINES_KEPT]}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _version(sanitizer: str) -> str:
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"[Vv]ersion ([\d.]+)", said)
    return found[1] if found else said.strip()


def main() -> None:
    """Run each tool, print its summary and append it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="append a JSON row a tool")
    parser.add_argument(
        "--tool", action="append", choices=TOOLS, help="repeatable; all if left out"
    )
    parser.add_argument("--seconds", type=float, default=60, help="of each tool at most")
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer"))
    parser.add_argument("--option", action="append", default=[], help="passed on to it; repeatable")
    parser.add_argument("--checks", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.checks is not None:
        run_checks(given.checks)
        return
    if given.sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    if given.out is not None:
        check_can_append(given.out)
    facts = environment() | {"compute_sanitizer": _version(given.sanitizer)}
    failed = False
    for tool in given.tool or TOOLS:
        row = sanitize(tool, given.sanitizer, given.seconds, given.option)
        failed |= row["errors"] != 0 or not row["ended"] or bool(row["wrong"])
        if given.out is not None:
            append(given.out, row | facts)
        told = f"{row['errors']} errors, {row['warnings']} warnings"
        print(f"{tool:10} {told}, {row['checks']} of {row['of_checks']} checks", end=", ")
        print(f"{len(row['kernels'])} kernels, {row['seconds']} s", flush=True)
        for line in [*row["report"], *row["wrong"], *row["said"]]:
            print("  ", line)
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""What ncu counted of launches, read from its raw page as CSV."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECTOR = 32
# Times in nanoseconds, sizes in bytes (--print-units base).
TIME, MEMORY = "gpu__time_duration.sum", "dram__bytes_read.sum"
L2 = ("lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_requests_srcunit_tex_op_read.sum")
L1 = (
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
)
OTHERS = (
    "lts__t_sectors_op_read.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum",
)
METRICS = (TIME, MEMORY, *L2, *L1, *OTHERS)


def under_ncu(ncu: str, script: str, arguments: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """Run a script with --for-ncu under ncu; the raw page as CSV, and what its launches were."""
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "order.json"
        command = [
            *(ncu, "--profile-from-start", "off", "--clock-control", "none"),
            *("--cache-control", "all", "--csv", "--page", "raw", "--print-units", "base"),
            *("--metrics", ",".join(known_metrics(ncu)), sys.executable, script),
            *("--for-ncu", str(order), *arguments),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not order.is_file():
            raise SystemExit(
                f"ncu returned {done.returncode}: {(done.stderr + done.stdout)[-800:]}"
            )
        return done.stdout, json.loads(order.read_text(encoding="utf-8"))


def known_metrics(ncu: str) -> list[str]:
    """Those of METRICS that this ncu has for this chip: it refuses a run with others."""
    command = [ncu, "--query-metrics", "--chip", "gh100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    found = [metric for metric in METRICS if metric.split(".")[0] in names]
    return found or list(METRICS)


def parsed(text: str) -> list[dict[str, float]]:
    r"""The counters of each launch in a raw page of ncu as CSV; units are a line of their own.

    Example:
        >>> page = '"ID","Kernel Name","dram__bytes_read.sum"'
        >>> parsed(page + '\n"","","byte"' + '\n"0","k","1,024"')
        [{'dram__bytes_read.sum': 1024.0}]
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    head, *rows = list(csv.reader(lines)) or [[]]
    found = []
    for row in rows:
        named = dict(zip(head, row, strict=True))
        if not named.get("ID", "").isdigit():
            continue  # units
        numbers = {name: named[name].replace(",", "") for name in METRICS if name in named}
        found.append({name: float(text) for name, text in numbers.items() if is_number(text)})
    return found


def is_number(text: str) -> bool:
    """Whether a counter was read."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def counted(told: Mapping[str, Any], counters: Mapping[str, float]) -> dict[str, Any]:
    """A row of what a launch read."""
    time_us, memory = counters.get(TIME, 0.0) / 1e3, counters.get(MEMORY)
    needed = told["needed_bytes"]
    return {
        **told,
        "ncu_us": time_us or None,
        "l2_sectors_a_request": per(counters, L2),
        "l1_sectors_a_request": per(counters, L1),
        "l2_sectors_over_needed": over(counters.get(L2[0]), needed / SECTOR),
        "memory_over_needed": over(memory, needed),
        "memory_tb_s": over(memory, time_us * 1e6),
        "useful_tb_s": over(needed, time_us * 1e6),
        "counters": {name: counters.get(name) for name in METRICS},
    }


def per(counters: Mapping[str, float], names: tuple[str, str]) -> float | None:
    """The first counter over the second."""
    return over(counters.get(names[0]), counters.get(names[1]))


def over(one: float | None, other: float | None) -> float | None:
    """A ratio, or None where one of the two was not counted."""
    return one / other if one is not None and other else None

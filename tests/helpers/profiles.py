"""Profiles as Nsight Compute writes them, with numbers that were chosen and not measured; and a
program that stands in for ncu."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hopsparse.measure.profile.counters import (
    DRAM,
    DRAM_READ,
    DRAM_WRITE,
    L2,
    METRICS,
    OPS_OFF,
    OPS_ON,
    SM_ACTIVE,
    TENSOR,
    TIME,
)

RANGE_COLUMN = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
UNITS = {TIME: "us", DRAM_READ: "Mbyte", DRAM_WRITE: "Mbyte", SM_ACTIVE: "%", TENSOR: "%"}
PROGRAM = """#!{python}
import os, sys
words = sys.argv[1:]
with open({log!r}, "a") as file:
    print(*words, sep="\\t", file=file)
if "--version" in words:
    print("NVIDIA (R) Nsight Compute Command Line Profiler")
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
elif "--import" in words:
    print(open({table!r}).read(), end="")
else:
    print({said!r})
    if {writes!r}:
        open(words[words.index("--export") + 1], "wb").write(b"NVR" + bytes(64))
    sys.exit({code!r})
"""


def launch(
    name: str, subject: str, values: Mapping[str, float], phase: str = ""
) -> dict[str, str | float]:
    """A row of a table; counters that are not named are 0."""
    ranges = [f"hopsparse.subject.{subject}"] + ([f"hopsparse.phase.{phase}"] if phase else [])
    attributes = ":none" * 6
    cells = "  ".join(f'"<default domain>:{text}{attributes}"' for text in ranges)
    known: dict[str, str | float] = dict.fromkeys(METRICS, 0.0)
    stack = f"71  {cells} " if subject else ""
    return {**known, **values, "Kernel Name": name, RANGE_COLUMN: stack}


def raw_csv(rows: Sequence[Mapping[str, str | float]]) -> str:
    """What `ncu --csv --page raw` prints of kernels."""
    header = ["ID", "Process ID", "Kernel Name", RANGE_COLUMN, "Block Size", *METRICS]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(header)
    writer.writerow([UNITS.get(column, "") if "__" in column else "" for column in header])
    for number, row in enumerate(rows):
        own = {"ID": number, "Process ID": 71, "Block Size": "(384, 1, 1)", **row}
        cells = (own[column] for column in header)
        writer.writerow([f"{each:,.2f}" if isinstance(each, float) else each for each in cells])
    return "==PROF== Connected to process 71 (/usr/bin/python3)\n" + text.getvalue()


def four_formats() -> str:
    """A table of the four formats of `hopsparse profile formats`."""
    busy = {SM_ACTIVE: 96.0, DRAM: 20.0, L2: 40.0, DRAM_READ: 150.0, DRAM_WRITE: 60.0}
    dense = busy | {TIME: 420.0, TENSOR: 90.0, OPS_OFF[0]: 2.7e11}
    return raw_csv(
        [
            launch("nvjet_dense", "dense", dense),
            launch("csr_rows", "csr_matmul", busy | {TIME: 8000.0}, "sparse.csr_matmul"),
            launch("combine", "csr_matmul", busy | {TIME: 40.0}, "sparse.csr_matmul"),
            launch(
                "spmm_bsr",
                "spmm_bsr",
                busy | {TIME: 260.0, TENSOR: 70.0, OPS_OFF[0]: 1.4e11},
                "sparse.spmm_bsr",
            ),
            launch(
                "spmm_nm",
                "spmm_nm",
                busy | {TIME: 250.0, TENSOR: 80.0, OPS_ON[0]: 2.7e11},
                "sparse.spmm_nm",
            ),
        ]
    )


def stand_in_for_ncu(
    folder: Path, table: str, *, said: str = "", code: int = 0, writes: bool = True
) -> Path:
    """A program that takes the command line of ncu, runs nothing, and prints what is given.

    Args:
        folder: Where it is made, as `ncu`; `ncu.log` beside it lists its calls.
        table: What an import prints.
        said: What a profile prints.
        code: What a profile returns.
        writes: Whether a profile leaves a report.
    """
    stored, program = folder / "table.csv", folder / "ncu"
    stored.write_text(table, encoding="utf-8")
    facts = {"log": str(folder / "ncu.log"), "table": str(stored), "said": said}
    text = PROGRAM.format(python=sys.executable, code=code, writes=writes, **facts)
    program.write_text(text, encoding="utf-8")
    os.chmod(program, 0o755)
    return program

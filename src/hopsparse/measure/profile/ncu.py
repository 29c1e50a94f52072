"""Running a program under Nsight Compute. Clocks are left as they are."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, DriverError, UnsupportedError
from .counters import METRICS, Kernel
from .files import REPORT_SUFFIX, parse_csv, read_report
from .install import report_module

_NO_PERMISSION = "ERR_NVGPUCTRPERM"
_NOTHING = "No kernels were profiled"
# What ncu says of itself, and of the program that it ran.
_ERROR, _OF_PROGRAM = "==ERROR==", "application returned an error"
_RELEASE = re.compile(r"Version (\d+(?:\.\d+)+)")
_MOST_WORDS = 400
_SOURCES = Path(__file__).parents[3]


@dataclass(frozen=True)
class Profiled:
    """What ncu found.

    Attributes:
        kernels: In the order of their launches.
        release: Of ncu, such as `2025.3.1.0`, or "".
        report: The .ncu-rep file.
        reader: What it was read with: `ncu_report` or `ncu --import`.
        seconds: Of the program under ncu, and of reading what it wrote.
    """

    kernels: list[Kernel]
    release: str
    report: Path
    reader: str
    seconds: float


def command(ncu: Path, program: Sequence[str], report: Path, *, most: int = 0) -> list[str]:
    """The command line of a profile.

    The program says itself what is profiled (cudaProfilerStart), and names it with NVTX ranges.
    Caches are flushed before each kernel and clocks are left alone.

    Args:
        ncu: Its path.
        program: What to run.
        report: The file to write.
        most: Kernels after which profiling ends; 0 for all.

    Example:
        >>> command(Path("ncu"), ["app"], Path("r.ncu-rep"))[1:5]
        ['--target-processes', 'all', '--clock-control', 'none']
    """
    limit = ["--launch-count", str(most)] if most else []
    return [
        str(ncu),
        *("--target-processes", "all"),
        *("--clock-control", "none"),
        *("--cache-control", "all"),
        *("--profile-from-start", "off"),
        "--nvtx",
        *("--metrics", ",".join(METRICS)),
        *limit,
        "--force-overwrite",
        *("--export", str(report)),
        *program,
    ]


def profile(
    ncu: Path, program: Sequence[str], report: Path, *, most: int = 0, timeout_s: float = 600
) -> Profiled:
    """Run a program under ncu, and read what it found.

    Args:
        ncu: Its path.
        program: What to run.
        report: The .ncu-rep file to write.
        most: Kernels after which profiling ends; 0 for all.
        timeout_s: Seconds after which the program is ended.

    Raises:
        UnsupportedError: ncu may not read the counters, or cannot run here.
        DriverError: The program failed, ran too long, or launched no kernel that was profiled.
        CheckpointError: What ncu wrote cannot be read.
    """
    started = time.monotonic()
    output = _output(command(ncu, program, report, most=most), timeout_s)
    if not report.is_file():
        raise _nothing_profiled(output)
    kernels, reader = _read(ncu, report, timeout_s)
    release = release_of(ncu)
    return Profiled(kernels, release, report, reader, time.monotonic() - started)


def _read(ncu: Path, report: Path, timeout_s: float) -> tuple[list[Kernel], str]:
    if report_module() is not None:
        # A second faster than ncu, which is asked where the module is older than the file.
        with suppress(CheckpointError):
            return read_report(report), "ncu_report"
    return _imported(ncu, report, timeout_s), "ncu --import"


def release_of(ncu: Path) -> str:
    """The release of ncu, or "" where it does not say."""
    found = _RELEASE.search(_run([str(ncu), "--version"], 60).stdout)
    return found[1] if found else ""


def _imported(ncu: Path, report: Path, timeout_s: float) -> list[Kernel]:
    words = [str(ncu), "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]
    return parse_csv(_output(words, timeout_s), f"ncu --import {report}")


def _output(words: Sequence[str], timeout_s: float) -> str:
    try:
        done = _run(words, timeout_s)
    except subprocess.TimeoutExpired:
        raise DriverError(
            f"{Path(words[0]).name} after {timeout_s:.0f} s",
            need="a profile that ends",
            hint="fewer tokens, or --kernels 20",
        ) from None
    output = done.stdout + done.stderr
    if _NO_PERMISSION in output:
        raise UnsupportedError(
            f"ncu may not read the counters of this GPU ({_NO_PERMISSION})",
            need="permission for all users, or an administrator",
            hint="the driver with NVreg_RestrictProfilingToAdminUsers=0, or --counters off",
        )
    told = [line for line in output.splitlines() if line.startswith(_ERROR)]
    if any(_OF_PROGRAM not in line for line in told):
        raise UnsupportedError(
            f"ncu does not run here: {_last_words(output)}",
            need="a driver and a machine that Nsight Compute supports",
            hint="--counters off, for times alone",
        )
    if done.returncode != 0:
        raise DriverError(
            f"{Path(words[0]).name} returned {done.returncode}: {_last_words(output)}",
            need="a program that runs under ncu",
            hint="--counters off, for times alone and what the program says",
        )
    return done.stdout if "--csv" in words else output


def _run(words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    # The program may be this package, run from a folder of sources.
    paths = [str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def _nothing_profiled(output: str) -> DriverError:
    none = _NOTHING in output
    return DriverError(
        _NOTHING if none else f"ncu wrote no {REPORT_SUFFIX} file: {_last_words(output)}",
        need="a kernel between cudaProfilerStart and cudaProfilerStop",
        hint="--device cuda, with work that launches kernels",
    )


def _last_words(output: str) -> str:
    """The errors that ncu told, else the end of what was printed."""
    told = [line for line in output.splitlines() if line.startswith(_ERROR)]
    text = " ".join(" ".join(told or output.splitlines()[-3:]).split())
    return text[-_MOST_WORDS:] or "no output"

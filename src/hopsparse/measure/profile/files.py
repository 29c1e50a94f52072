"""Profiles that Nsight Compute has written: raw CSV, and .ncu-rep through `ncu_report`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...errors import CheckpointError, UnsupportedError
from .counters import METRICS, Kernel
from .install import report_module

REPORT_SUFFIX = ".ncu-rep"

# Factors of units that ncu writes, to nanoseconds, bytes and plain counts.
_TIMES = {
    **dict.fromkeys(("ns", "nsecond"), 1.0),
    **dict.fromkeys(("us", "usecond"), 1e3),
    **dict.fromkeys(("ms", "msecond"), 1e6),
    **dict.fromkeys(("s", "second"), 1e9),
}
_PREFIXES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIXED = re.compile(r"([KMGTP])(?:[a-z]|Hz)")
# Words of the columns that NVTX ranges are in.
_RANGES = "Push/Pop_Range"
_QUOTED = re.compile(r'"([^"]*)"')


def read_profile(path: Path) -> list[Kernel]:
    """The kernels of a stored profile.

    Args:
        path: A .ncu-rep file, or what `ncu --csv --page raw` printed.

    Raises:
        CheckpointError: It cannot be read, is cut off, is no profile, or holds no kernel.
        UnsupportedError: A .ncu-rep file, and neither `ncu_report` nor ncu is here.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}", need="a file that ncu has written", hint="ls")
    if path.suffix == REPORT_SUFFIX:
        return read_report(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, f"not readable as text ({error})") from error
    return parse_csv(text, str(path))


def parse_csv(text: str, where: str = "the output of ncu") -> list[Kernel]:
    r"""The kernels of `ncu --csv --page raw`; lines before the table are skipped.

    Args:
        text: The output.
        where: Where it comes from, for errors.

    Raises:
        CheckpointError: No table, a line that is cut off, or a table without kernels.

    Example:
        >>> kernels = parse_csv('"ID","Kernel Name","gpu__time_duration.sum"\n'
        ...                     '"","","us"\n"0","add","1,250.5"\n')
        >>> kernels[0].name, kernels[0].metrics
        ('add', {'gpu__time_duration.sum': 1250500.0})
    """
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise _broken(where, "no table of kernels")
    if not text.endswith("\n") and not lines[-1].endswith('"'):
        raise _broken(where, "the last line is cut off")
    # ncu goes on to write lines of its own behind the table.
    table = [line for line in lines[start:] if line.startswith('"')]
    rows = list(csv.reader(table))
    header = rows[0]
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(header):
            raise _broken(where, f"row {number} has {len(row)} of {len(header)} columns")
    if "Kernel Name" not in header:
        raise _broken(where, "no column 'Kernel Name'")
    units = dict.fromkeys(header, "")
    if len(rows) > 1 and not rows[1][0]:
        units = dict(zip(header, rows.pop(1), strict=True))
    kernels = [_kernel(dict(zip(header, row, strict=True)), units) for row in rows[1:]]
    if not kernels:
        raise _broken(where, "no kernel in the table")
    return kernels


def read_report(path: Path) -> list[Kernel]:
    """The kernels of a .ncu-rep file.

    Raises:
        CheckpointError: It cannot be read, is cut off, or holds no kernel.
        UnsupportedError: `ncu_report` is not installed.
    """
    module = report_module()
    if module is None:
        raise UnsupportedError(
            f"{path} without ncu_report",
            need="the profile extra, to read it",
            hint=f"pip install 'hopsparse[profile]', or ncu --import {path.name} --csv --page raw",
        )
    if not path.read_bytes()[:4].startswith(b"NVR"):
        raise _broken(path, "not a report of Nsight Compute")
    try:
        context = module.load_report(str(path))
        kernels = list(_actions(context))
    except Exception as error:
        # A library of another vendor: what it raises of a broken file is not documented.
        raise _broken(path, f"{type(error).__name__}: {error}") from error
    if not kernels:
        # A file that is cut off anywhere is read as one without ranges.
        raise _broken(path, "no kernel in it, as where a file is cut off")
    return kernels


def _actions(context: object) -> Iterator[Kernel]:
    for index in range(context.num_ranges()):  # type: ignore[attr-defined]
        found = context.range_by_idx(index)  # type: ignore[attr-defined]
        for number in range(found.num_actions()):
            action = found.action_by_idx(number)
            metrics = {name: _of_action(action, name) for name in METRICS}
            known = {name: value for name, value in metrics.items() if value is not None}
            yield Kernel(action.name(), known, _ranges_of(action))


def _of_action(action: object, name: str) -> float | None:
    metric = action.metric_by_name(name)  # type: ignore[attr-defined]
    if metric is None or not metric.has_value():
        return None
    # Always in base units. Its unit is not asked for: of a percentage that crashes release 2025.3.
    value = float(metric.as_double())
    return value if value == value else None


def _ranges_of(action: object) -> tuple[str, ...]:
    state = action.nvtx_state()  # type: ignore[attr-defined]
    if state is None:
        return ()
    domains = [state.domain_by_id(each) for each in state.domains()]
    return tuple(name for domain in domains for name in domain.push_pop_ranges())


def _kernel(row: dict[str, str], units: dict[str, str]) -> Kernel:
    ranges = [text for column, text in row.items() if _RANGES in column and text]
    stack = [name for text in ranges for name in _QUOTED.findall(text) or [text]]
    metrics = {
        column: _number(text, units[column]) for column, text in row.items() if "__" in column
    }
    return Kernel(row["Kernel Name"], metrics, tuple(stack))


def _number(text: str, unit: str) -> float | None:
    """A cell in base units; None where ncu wrote that there is no value."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value * _factor(unit) if value == value else None


def _factor(unit: str) -> float:
    """What a number is multiplied by.

    Example:
        >>> _factor("us"), _factor("Kbyte"), _factor("Tbyte/s"), _factor("%"), _factor("inst")
        (1000.0, 1000.0, 1000000000000.0, 1.0, 1.0)
    """
    unit = unit.strip()
    if unit in _TIMES:
        return _TIMES[unit]
    found = _PREFIXED.match(unit)
    return _PREFIXES[found[1]] if found else 1.0


def _broken(where: Path | str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {why}",
        need="a whole profile: .ncu-rep, or the output of ncu --csv --page raw",
        hint="profiling again",
    )


def subjects_of(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels by what was profiled, in order of their first launch.

    Example:
        >>> list(subjects_of([Kernel("a", {}), Kernel("b", {}), Kernel("a", {})]))
        ['a', 'b']
    """
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.subject, []).append(kernel)
    return found

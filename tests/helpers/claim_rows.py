"""Reads committed rows of benchmarks/results and judges what they say of a claim."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MANY = 1024
#: Files of rows of an H200 that docs/claims.md says are not there yet.
AWAITED = ("alignment", "alignment_counters", "tile_search", "vision", "profile", "verify", "gate")

Row = dict[str, Any]


@cache
def rows(name: str) -> list[Row]:
    """All rows of a file under benchmarks/results."""
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def of(name: str, /, **facts: object) -> list[Row]:
    """The rows of a file that have all these facts."""
    found = [row for row in rows(name) if facts.items() <= row.items()]
    assert found, (name, facts)
    return found


def us(name: str, /, *keys: str, **facts: object) -> dict[tuple[Any, ...], dict[str, float]]:
    """Time of each contender, by the keys; a row without one is left out."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in of(name, **facts):
        if row.get("us") is not None:
            here = found.setdefault(tuple(row[key] for key in keys), {})
            assert row["contender"] not in here, (name, row)
            here[row["contender"]] = row["us"]
    return found


def ratios(name: str, /, rival: str, ours: str, least: int = 0, **facts: object) -> list[float]:
    """How many times as long as ours a rival takes, in every problem of so many tokens or more."""
    found = us(name, "tokens", "out", "k", **facts)
    return [
        each[rival] / each[ours]
        for (tokens, *_), each in found.items()
        if tokens >= least and {rival, ours} <= each.keys()
    ]


def word(found: float, claimed: float) -> str:
    """The verdict where more is better; within 2 % is as claimed."""
    if found > 1.02 * claimed:
        return "beaten"
    return "reproduced" if found >= 0.98 * claimed else "missed"


def line(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def judged(found: list[float], claimed: float) -> tuple[str, str]:
    """Mean and range of ratios, and the verdict on the mean."""
    middle = geometric_mean(found)
    spread = f", {min(found):.2f} to {max(found):.2f}" if len(found) > 1 else ""
    return f"{middle:.2f} x{spread}", word(middle, claimed)


def waits(name: str) -> str:
    """What stands in the place of a number."""
    assert name in AWAITED
    return f"no `{name}.jsonl`"


def percent(part: float) -> str:
    """A part as the page writes it."""
    return f"{100 * part:.0f} %"

"""The report of a recovered checkpoint: that of the pruned one, and what the recovery did."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..recover import RecoverOptions
from ._files import read_json
from ._prune_job import REPORT_NAME
from ._summary import SCHEMA
from .recover_texts import RecoverTexts

# What the rest of the report says already.
_NOT_REPEATED = ("version", "student", "teacher", "layers", "peak_memory_bytes")
_FLAGS = {"hidden_blocks": "--hidden-block", "evaluate": "--eval"}
# What a continued report reads of the one before.
_CONTINUED: dict[tuple[str, ...], Any] = {
    ("command",): str,
    ("layers",): list,
    ("bytes", "sparse"): int,
    ("seconds", "total"): int | float,
    ("peak_memory_bytes",): int,
}
# What repeats a run from its start, and what only Python code can say.
_NOT_IN_COMMAND = (
    *("resume", "overwrite"),
    *("betas", "clip", "mask_every", "mask_decay", "mask_freeze", "cache_limit"),
)


def report_of(folder: Path) -> dict[str, Any] | None:
    """The report that `sparsify` left in a checkpoint; None if there is none.

    Raises:
        CheckpointError: It cannot be read, or was damaged.
    """
    path = folder / REPORT_NAME
    report = read_json(path) if path.exists() else {}
    if report.get("schema") != SCHEMA:
        return None
    # Before hours of training, not behind them.
    for keys, kind in _CONTINUED.items():
        value: Any = report
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(
                f"{path} is damaged: {'.'.join(keys)} = {value!r:.80}",
                need="the report that `hopsparse sparsify` wrote",
                hint="restore it, or delete it: then the recovered model gets none",
            )
    return report


def with_recovery(report: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a pruned model as that of the model recovered from it.

    Args:
        report: Of the pruned model.
        found: What `recover_checkpoint` returned.
    """
    products = found["low_rank"]["bytes"] if found["low_rank"] else 0
    stored = report["bytes"]
    return {
        **report,
        "bytes": stored | {"sparse": stored["sparse"] + products},
        "evaluation": [
            {key: row[key] for key in ("text", "windows", "dense")} | {"sparse": row["after"]}
            for row in found["evaluation"]
        ],
        "recover": {key: value for key, value in found.items() if key not in _NOT_REPEATED},
    }


def continued(report: Mapping[str, Any], found: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The same for a recovery that was a run of its own.

    Args:
        report: Of the pruned model.
        found: What `recover_checkpoint` returned.
        command: The command line of the recovery.
    """
    total = found["seconds"]["total"]
    seconds = report["seconds"]
    return with_recovery(report, found) | {
        "command": f"{report['command']}\n{command}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # They were of the pruned model.
        "samples": [],
        "seconds": {**seconds, "recover": total, "total": round(seconds["total"] + total, 1)},
        "peak_memory_bytes": max(report["peak_memory_bytes"], found["peak_memory_bytes"]),
    }


def recover_command(
    sparse: Path, out: Path, teacher: str, options: RecoverOptions, texts: RecoverTexts
) -> str:
    """The command line that makes the same checkpoint.

    Example:
        >>> options = RecoverOptions(steps=9, hidden_blocks=(1, 2), cache_teacher=True)
        >>> again = recover_command(Path("a"), Path("b"), "dense", options, RecoverTexts())
        >>> again.partition("--teacher ")[2]
        'dense --steps 9 --hidden-block 1 --hidden-block 2 --cache-teacher'
    """
    words = ["hopsparse", "recover", str(sparse), "-o", str(out), "--teacher", teacher]
    words += ["--steps", str(options.steps)]
    for given in (options, texts):
        for field in fields(given):
            value = getattr(given, field.name)
            if field.name in ("steps", *_NOT_IN_COMMAND) or value == field.default:
                continue
            flag = _FLAGS.get(field.name, "--" + field.name.replace("_", "-"))
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag] if each is True else [flag, str(each)]
    return shlex.join(words)

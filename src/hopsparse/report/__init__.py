"""One self-contained HTML page about a sparsified model, from the JSON that `sparsify` leaves."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from ..files import written_whole
from .predicted import TOKENS, Predicted, predict_layers

__all__ = ["TOKENS", "Predicted", "check_extras", "predict_layers", "write_report"]

SCHEMA = 1


def check_extras() -> None:
    """Refuse before any work starts, where the page could not be made afterwards.

    Raises:
        UnsupportedError: matplotlib or jinja2 is not installed.
    """
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"no {' and no '.join(missing)} to make the HTML report with",
            need="the report extra",
            hint="pip install 'hopsparse[report]', or --no-report",
        )


def write_report(report: Mapping[str, Any], path: Path | str) -> Path:
    """Write the page; it appears complete or not at all.

    Plots are inlined and there is no script: the file can be mailed.

    Args:
        report: The dict that `sparsify_checkpoint` returns and OUT/report.json holds.
        path: The HTML file to write.

    Raises:
        UnsupportedError: The report extra is not installed.
        ArgumentError: The report has another schema.
        CheckpointError: The file cannot be written.
    """
    check_extras()
    if report.get("schema") != SCHEMA:
        raise ArgumentError(
            f"a report of schema {report.get('schema')!r}",
            need=f"schema {SCHEMA}",
            hint="the report.json that this version of `hopsparse sparsify` writes",
        )
    from .page import render

    path = Path(path)
    page = render(report, predict_layers(report["layers"]))
    again = "free some space, then write_report(json.load(report.json), path)"
    with written_whole(path, again) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path

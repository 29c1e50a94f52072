"""The probe of algorithm ids: what it makes of a process that ends at one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.probes import cusparselt_ids as ids

ATTEMPT = ids.Attempt("int8", 16, 64, 64, "rows", 8)


def child(folder: Path, text: str) -> str:
    path = folder / "child.py"
    path.write_text(text)
    return str(path)


def test_the_id_at_which_a_process_was_lost_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import os, sys\n"
        "for line in ('try 0', 'right 0', 'try 0 alpha', 'wrong 0 alpha', 'try 1', 'refused 1',\n"
        "             'try 2'):\n"
        "    print(line, flush=True)\n"
        "print('illegal instruction', file=sys.stderr, flush=True)\n"
        "os._exit(3)\n"
    )
    monkeypatch.setattr(ids, "__file__", child(tmp_path, text))
    row = ids.tried(ATTEMPT)
    assert (row["right"], row["wrong"], row["refused"]) == (["0"], ["0 alpha"], ["1"])
    assert (row["lost"], row["limit"]) == (2, None)
    assert row["errors"] == "illegal instruction"
    assert (row["dtype"], row["tokens"], row["scaling"]) == ("int8", 16, "rows")


def test_a_process_that_hangs_is_lost_at_the_id_that_it_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import time\nprint('try 5 alpha', flush=True)\ntime.sleep(600)\n"
    monkeypatch.setattr(ids, "__file__", child(tmp_path, text))
    monkeypatch.setattr(ids, "CHILD_S", 1.0)
    assert ids.tried(ATTEMPT)["lost"] == 5


def test_a_process_that_ends_well_has_lost_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, "__file__", child(tmp_path, "print('try 0\\nright 0\\nlimit 7')\n"))
    row = ids.tried(ATTEMPT)
    assert (row["right"], row["lost"], row["limit"], row["errors"]) == (["0"], None, 7, "")


def test_the_largest_safe_id_is_right_somewhere_and_lost_nowhere_before() -> None:
    first = {"right": ["0", "9", "9 alpha"], "lost": None}
    second = {"right": ["0", "3"], "lost": 7}
    assert ids.largest_safe([first]) == 9
    assert ids.largest_safe([first, second]) == 3
    assert ids.largest_safe([{"right": [], "lost": 0}]) is None

"""`hopsparse bench comm`: what it refuses; and, where it may, links that it makes and removes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hopsparse.cli.bench_comm import BenchComm, races_of
from hopsparse.comm.namespaces import linked, remove_orphans
from hopsparse.comm.race import METHODS, Race
from hopsparse.errors import ArgumentError
from tests.cli.conftest import Run, start

LINKS = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="needs root, ip and tc",
)
ONE = ("bench", "comm", "--ranks", "2", "--mbit", "1000", "--steps", "1")


def mine() -> list[str]:
    """Namespaces of this process, and of those that it started."""
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in told.stdout.splitlines() if line.startswith("hopsparse-")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("bench", "comm", "--shape", "8x8"), "--shape"),
        (("bench", "comm", "--ranks", "1"), "ranks 1"),
        (("bench", "comm", "--mbit", "fast"), "--mbit 'fast'"),
        (("bench", "comm", "--methods", "dense,int5"), "method 'int5'"),
        (("bench", "comm", "--model", "gpt"), "model 'gpt'"),
        (("bench", "comm", "--steps", "0"), "steps 0"),
    ],
)
def test_what_cannot_be_run_is_said_first(run: Run, arguments: tuple[str, ...], told: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_without_root_it_says_so(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    out = tmp_path / "rows.jsonl"
    error = run_json("bench", "comm", "--out", str(out), exit_code=2)["error"]
    assert error["kind"] == "UnsupportedError"
    assert "root" in error["got"]
    assert not out.exists()


def test_everything_is_run_at_every_rate() -> None:
    races = races_of(BenchComm())
    assert {(each.ranks, each.mbit) for each in races} == {
        (ranks, mbit) for ranks in (2, 4) for mbit in (100, 1000, 0)
    }
    assert {"dense", "bf16", "fp16", "int4", "powersgd-2"} <= {each.method for each in races}
    assert races_of(BenchComm(methods=",".join(METHODS), ranks="3"))[-1].ranks == 3
    with pytest.raises(ArgumentError, match="at least 1"):
        Race("dense", steps=0)


@LINKS
@pytest.mark.timeout(180)
def test_bytes_are_counted_and_a_second_run_has_nothing_to_do(
    run_json: Callable[..., Any], tmp_path: Path
) -> None:
    words = (*ONE, "--methods", "dense,int4,int3.5", "--out", str(tmp_path / "rows.jsonl"))
    rows = run_json(*words)["rows"]
    dense, *coded = (row["interface_bytes_a_step"] for row in rows)
    # On a busy machine TCP takes late answers for lost ones, and sends up to 1,514 bytes again.
    again = [1514 * row["segments_again_a_step"] for row in rows[1:]]
    assert dense > 4 * rows[0]["parameters"]
    # Headers, acknowledgements and barriers come on top, of all of them.
    for row, sent, twice, values in zip(rows[1:], coded, again, (0.516, 0.4531), strict=True):
        message = (values + 0.006) * row["parameters"]
        assert message < sent < 1.1 * message + twice
    assert all(0 < row["step_ms_least"] <= row["step_ms"] <= row["step_ms_most"] for row in rows)
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["method"] for row in written] == ["dense", "int4", "int3.5"]
    assert run_json(*words)["rows"] == []
    assert mine() == []


@LINKS
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(number: signal.Signals) -> None:
    process = start(*ONE[:-1], "1000", "--methods", "int4")
    until = time.monotonic() + 60
    while not (made := [name for name in mine() if f"-{process.pid}-" in name]):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    assert len(made) >= 1
    time.sleep(1)  # ranks are on their way
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Interrupted" in told
    assert [name for name in mine() if f"-{process.pid}-" in name] == []
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f"hopsparse-{process.pid}-" not in running.stdout


@LINKS
def test_links_are_apart_from_the_machine_and_orphans_are_removed() -> None:
    def interfaces() -> str:
        return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True).stdout

    before = interfaces()
    with linked(2, 100) as places:
        assert interfaces() == before
        words = places[0].command("ip", "route", "get", "198.51.100.1")
        assert subprocess.run(words, capture_output=True, check=False).returncode != 0
    dead = subprocess.Popen(["true"])
    dead.wait()
    subprocess.run(["ip", "netns", "add", f"hopsparse-{dead.pid}-0"], check=True)
    remove_orphans()
    assert f"hopsparse-{dead.pid}-0" not in mine()

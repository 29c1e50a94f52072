from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hopsparse.errors import CheckpointError
from hopsparse.measure.power import Sampler, State, sample
from hopsparse.measure.record import append, check_can_append, done, environment, read

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "rows.jsonl"


def test_rows_are_read_as_they_were_written(path: Path) -> None:
    rows = [{"layer": "o", "us": 1.5}, {"layer": "über", "us": None}]
    for row in rows:
        append(path, row)
    assert read(path) == rows
    assert path.read_bytes().count(b"\n") == 2


def test_a_run_goes_on_behind_the_keys_it_has(path: Path) -> None:
    append(path, {"out": 1, "k": 2, "us": 5.0})
    append(path, {"out": 1, "k": 3, "us": 5.0})
    append(path, {"out": 1, "other": True})
    assert done(path, ("out", "k")) == {(1, 2), (1, 3)}
    assert done(path, ("out",)) == {(1,)}


def test_a_row_that_was_cut_off_does_not_count_and_does_not_hurt(path: Path) -> None:
    append(path, {"number": 1})
    with path.open("ab") as file:
        file.write(b'{"number": 2, "us": 1')
    assert read(path) == [{"number": 1}]
    append(path, {"number": 3})
    assert read(path) == [{"number": 1}, {"number": 3}]


def test_a_process_that_is_killed_keeps_its_rows(path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from hopsparse.measure.record import append\n"
        "append(Path(sys.argv[1]), {'number': 1})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program, str(path)], env=environment, check=False)
    assert read(path) == [{"number": 1}]


@pytest.mark.parametrize("line", ["[1]", "{", "", "NaN"])
def test_a_line_that_is_no_row_is_named(path: Path, line: str) -> None:
    append(path, {"number": 1})
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CheckpointError, match="line 2: no JSON object"):
        read(path)


def test_what_json_does_not_have_is_refused_and_not_written(path: Path) -> None:
    with pytest.raises(ValueError):
        append(path, {"us": float("nan")})
    assert not path.exists()


@pytest.mark.parametrize("name", [".", "file/rows.jsonl", "x" * 300])
def test_a_file_that_cannot_be_written_is_refused_before_and_after(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    for write in (check_can_append, lambda where: append(where, {"us": 1.0})):
        with pytest.raises(CheckpointError, match="cannot be written"):
            write(tmp_path / name)


def test_a_full_disk_is_an_error_and_leaves_whole_rows(path: Path) -> None:
    row = {"us": 1.0, "layer": "x" * 100}
    append(path, row)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))  # the next row ends beyond it
    try:
        with pytest.raises(CheckpointError, match="rows.jsonl cannot be written"):
            append(path, row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read(path) == [row]
    append(path, row)
    assert read(path) == [row, row]


def test_a_file_that_can_be_written_is_there_and_empty(path: Path) -> None:
    check_can_append(path)
    assert read(path) == []
    assert path.read_bytes() == b""


def test_environment_names_versions_and_is_json() -> None:
    facts = environment()
    assert {"gpu", "driver", "cuda", "torch", "cusparselt", "nvrtc"} <= facts.keys()
    assert json.loads(json.dumps(facts)) == facts


def test_the_commit_is_that_of_the_checkout() -> None:
    if not (ROOT / ".git").exists():
        assert environment()["commit"] is None
        return
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert head.startswith(environment()["commit"].rstrip("+"))


def test_what_cannot_be_read_is_none_and_says_why() -> None:
    state = sample()
    known = [state.sm_mhz, state.memory_mhz, state.watts, state.celsius, state.limits]
    assert (None in known) == (state.why != "")


def test_a_sampler_reads_at_least_once_and_folds_what_it_saw() -> None:
    with Sampler() as seen:
        pass
    assert seen.states
    assert seen.seconds > 0
    seen.joules, seen.states = None, [State(1000, 5, 100, 40, ()), State(1500, 5, 300, 50, None)]
    seen.states.append(State(1600, 5, 200, 45, ("power cap",)))
    assert (seen.sm_mhz, seen.watts, seen.celsius) == (1500, 200, 50)
    assert seen.limits == ("power cap",)
    seen.joules, seen.seconds = 900.0, 2.0
    assert seen.watts == 450

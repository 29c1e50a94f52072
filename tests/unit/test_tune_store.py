"""The store under torture: damage, foreign files, two processes, folders that take nothing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hopsparse.plan import KernelSpec
from hopsparse.settings import Settings
from hopsparse.tune import Entry, Machine, Measured, Store, kernel_hash, version_of
from hopsparse.tune.store import decode, encode
from tests.helpers.tuning import KEY

FAST, SLOW = Measured(1.0, 0.9, 1.1), Measured(2.0, 1.9, 2.1)
BOTH = {"fast": FAST, "slow": SLOW}
ROOT = Path(__file__).parents[2]
SPEC = KernelSpec(
    "spmm_nm", "one", "ops/spmm_nm/kernel.cuh", "struct Config {};", "k", 128, (1, 1, 1), 0, 16
)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with one entry."""
    Store(tmp_path).put(KEY, BOTH)
    return tmp_path


def entry_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_an_entry_is_one_readable_file(stored: Path) -> None:
    path = entry_file(stored)
    assert path.name == f"{KEY.name}.json"
    content = json.loads(path.read_text())["content"]
    assert content["key"]["machine"] == {"gpu": "NVIDIA H200", "sm_count": 132, "driver": "580"}
    assert content["measured"]["fast"] == [1.0, 0.9, 1.1, ""]
    assert Store(stored).get(KEY) == Entry(KEY, BOTH)


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, op="other"),
        replace(KEY, kernel="edited"),
        replace(KEY, problem="24x40 float64, tokens 17-32"),
        replace(KEY, machine=Machine("NVIDIA H100", 132, "580")),
        replace(KEY, machine=Machine("NVIDIA H200", 16, "580")),
        replace(KEY, machine=Machine("NVIDIA H200", 132, "590")),
    ],
)
def test_nothing_is_found_for_another_key(stored: Path, other: object) -> None:
    assert Store(stored).best(other, BOTH) is None  # type: ignore[arg-type]
    # Nor where a file of one key lies under the name of another.
    entry_file(stored).rename(stored / f"{other.name}.json")  # type: ignore[attr-defined]
    assert Store(stored).best(other, BOTH) is None  # type: ignore[arg-type]


def test_the_fastest_of_those_asked_for_wins(stored: Path) -> None:
    store = Store(stored)
    assert store.best(KEY, ["slow", "fast", "unknown"]) == "fast"
    assert store.best(KEY, ["slow", "unknown"]) == "slow"
    assert store.best(KEY, ["unknown"]) is None
    store.put(KEY, {"equal": FAST, "wrong": Measured.wrong("wrong: twice the bound")})
    assert store.best(KEY, ["equal", "fast", "wrong"]) == "equal"
    assert store.best(KEY, ["fast", "equal", "wrong"]) == "fast"
    assert Store(stored).get(KEY).measured["wrong"].error == "wrong: twice the bound"


def test_a_look_up_asks_the_disk_once(stored: Path) -> None:
    store = Store(stored)
    assert store.best(KEY, BOTH) == "fast"
    entry_file(stored).unlink()
    assert store.best(KEY, BOTH) == "fast"
    store.forget()
    assert store.best(KEY, BOTH) is None


def test_a_choice_does_not_change_under_a_running_process(tmp_path: Path) -> None:
    running = Store(tmp_path)
    assert running.best(KEY, BOTH) is None
    Store(tmp_path).put(KEY, BOTH)
    assert running.best(KEY, BOTH) is None


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_file_that_was_cut_off_is_nothing_and_is_replaced(stored: Path, size: int) -> None:
    path = entry_file(stored)
    path.write_bytes(path.read_bytes()[: size if size >= 0 else -3])
    assert Store(stored).best(KEY, BOTH) is None
    Store(stored).put(KEY, {"slow": SLOW})
    assert Store(stored).get(KEY).measured == {"slow": SLOW}


def test_no_changed_digit_goes_unseen(stored: Path) -> None:
    data = entry_file(stored).read_bytes()
    digits = [place for place, byte in enumerate(data) if byte in b"0123456789"]
    for place in digits:
        changed = bytearray(data)
        changed[place] = ord("7") if data[place] != ord("7") else ord("8")
        assert decode(bytes(changed), KEY) is None, place


@pytest.mark.parametrize(
    "data", [b"[]", b"null", b'{"content": 1}', b"\xff\xfe", b"[" * 5000, b'{"sha256": ""}']
)
def test_what_is_no_entry_is_nothing(stored: Path, data: bytes) -> None:
    entry_file(stored).write_bytes(data)
    assert Store(stored).best(KEY, BOTH) is None


def test_an_entry_of_a_later_layout_is_nothing(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hopsparse.tune.store.SCHEMA", 2)
    later = encode(Entry(KEY, BOTH))
    monkeypatch.undo()
    assert decode(later, KEY) is None
    assert decode(encode(Entry(KEY, BOTH)), KEY) == Entry(KEY, BOTH)


def test_a_folder_in_place_of_an_entry_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / f"{KEY.name}.json").mkdir()
    store = Store(tmp_path)
    store.put(KEY, BOTH)
    assert store.best(KEY, BOTH) == "fast"
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY.name}.json"]


def test_measurements_are_added_and_none_is_overwritten(stored: Path) -> None:
    Store(stored).put(KEY, {"fast": SLOW, "new": FAST})
    assert Store(stored).get(KEY).measured == {**BOTH, "new": FAST}


def test_abandoned_files_are_swept(stored: Path) -> None:
    old, young = stored / ".0.tmp", stored / ".1.tmp"
    for path in (old, young):
        path.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    Store(stored).put(KEY, {"new": FAST})
    assert not old.exists()
    assert young.exists()


WRITER = """
import sys
from pathlib import Path
from hopsparse.tune import Measured, Store
from tests.helpers.tuning import KEY
store = Store(Path(sys.argv[1]))
for number in range(40):
    store.put(KEY, {f"{sys.argv[2]}{number}": Measured(1.0 + number, 1.0, 1.0)})
    store.forget()
    assert store.get(KEY).measured, "a file that is not whole was read"
"""


def test_two_processes_leave_one_whole_entry(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), who],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for who in "ab"
    ]
    for child in children:
        _, told = child.communicate(timeout=120)
        assert child.returncode == 0, told
    path = entry_file(tmp_path)
    found = decode(path.read_bytes(), KEY)
    assert found is not None
    # Whoever came last read what the other had by then.
    assert {"a39", "b39"} & set(found.measured)


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Root may write anywhere, but not below a file.
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "tuning")
    with caplog.at_level(logging.WARNING):
        store.put(KEY, BOTH)
        store.put(KEY, {"new": FAST})
    assert store.best(KEY, BOTH) == "fast"
    assert len(caplog.records) == 1
    assert "are lost with this process" in caplog.text


READER = """
import os, sys
from pathlib import Path
from hopsparse.tune import Measured, Store
from tests.helpers.tuning import KEY
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
store = Store(Path("tuning"))
print(store.best(KEY, ["fast", "slow"]))
store.put(KEY, {"new": Measured(0.5, 0.5, 0.5)})
print(store.best(KEY, ["fast", "new"]))
"""


def test_a_read_only_folder_is_read_and_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "tuning"
    Store(folder).put(KEY, BOTH)
    before = entry_file(folder).read_bytes()
    tmp_path.chmod(0o755)
    folder.chmod(0o555)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    told = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert told.stdout.split() == ["fast", "new"]
    assert "Permission denied" in told.stderr
    assert entry_file(folder).read_bytes() == before


def test_a_kernel_is_its_text_and_a_candidate_its_config() -> None:
    changed = replace(SPEC, text="struct Config { int a; };")
    assert kernel_hash(changed) == kernel_hash(SPEC)
    assert version_of("wide", changed) != version_of("wide", SPEC)
    other = replace(SPEC, kernel="ops/pack_nm/kernel.cuh")
    assert kernel_hash(other) != kernel_hash(SPEC)


def test_the_folder_is_that_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOPSPARSE_CACHE_DIR", str(tmp_path))
    assert Store.default().folder == Settings.from_environment().cache_dir / "tuning"
    assert Store.default() is Store.default()
